"""Fixtures that every test may use: the servers of keylane's own plugin, a connection, unique names."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from keylane.server.ports import ReservedPort
from keylane.testing.pytest_plugin import keylane_cluster as nats_cluster
from keylane.testing.pytest_plugin import keylane_server as nats_server

if TYPE_CHECKING:
    from keylane import Connection
    from keylane.server import NatsServer


# One server for the whole run: a test that stops or kills a server starts its own. A cluster of three nodes, started
# when the first test asks for it: leave it whole.
__all__ = ["nats_cluster", "nats_server"]


@pytest.fixture
async def connection(nats_server: NatsServer) -> AsyncIterator[Connection]:
    """A keylane connection to `nats_server`, closed after the test."""
    import keylane  # noqa: PLC0415 - tests of the server alone need no connection

    async with await keylane.connect(nats_server.url) as connected:
        yield connected


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port for a listener that sets SO_REUSEADDR, as servers do; nobody else gets it before the test ends."""
    reserved = ReservedPort()
    yield reserved.number
    reserved.release()


@pytest.fixture
def unique() -> Callable[..., str]:
    """A function that makes a name nobody else uses: `unique("orders")` -> `orders_1f0c9a2b`."""

    def name(prefix: str = "t") -> str:
        return f"{prefix}_{uuid.uuid4().hex[:10]}"

    return name
