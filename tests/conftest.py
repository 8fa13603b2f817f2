"""Fixtures that every test may use: real servers on loopback, a connection, unique names."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from keylane.server import NatsCluster, NatsServer
from keylane.server.ports import ReservedPort

if TYPE_CHECKING:
    from keylane import Connection


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """One server for the whole run. A test that stops or kills a server starts its own."""
    with NatsServer.start() as server:
        yield server


@pytest.fixture(scope="session")
def nats_cluster() -> Iterator[NatsCluster]:
    """A cluster of three nodes, started when the first test asks for it. Leave it whole."""
    with NatsCluster.start(3) as cluster:
        yield cluster


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
