"""Fixtures for pytest. They are there where keylane is installed, and start nothing until a test asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from keylane.app import App, RunningApp
    from keylane.server import NatsCluster, NatsServer
    from keylane.testing import Evidence

StartApp = Callable[["App"], AbstractAsyncContextManager["RunningApp"]]


@pytest.fixture(scope="session")
def keylane_server() -> Iterator[NatsServer]:
    """A real nats-server with JetStream, for all tests; `keylane_server.url` is its address."""
    from keylane.server import NatsServer  # noqa: PLC0415 - only where a test asks for it

    with NatsServer.start() as server:
        yield server


@pytest.fixture(scope="session")
def keylane_cluster() -> Iterator[NatsCluster]:
    """Three real servers in a JetStream cluster, for all tests; `keylane_cluster.urls` has their addresses."""
    from keylane.server import NatsCluster  # noqa: PLC0415

    with NatsCluster.start(3) as cluster:
        yield cluster


@pytest.fixture
def keylane_app(keylane_server: NatsServer) -> StartApp:
    """Runs an app on `keylane_server`, whatever address it has: `async with keylane_app(app) as running: …`."""

    @asynccontextmanager
    async def start(app: App) -> AsyncIterator[RunningApp]:
        from keylane.jetstream import connect  # noqa: PLC0415

        async with (
            connect(keylane_server.url) as connection,
            app.start(connection=connection) as running,
        ):
            yield running

    return start


@pytest.fixture
def keylane_evidence() -> Evidence:
    """Collects what was sent and handled; then `lost`, `duplicated` and `out_of_order` are judged."""
    from keylane.testing import Evidence  # noqa: PLC0415

    return Evidence()
