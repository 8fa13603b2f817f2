"""Fixtures for the tests of groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

import keylane
from keylane.server import NatsCluster, NatsServer
from tests.integration.groups.rig import Ground, make_ground

MakeGround = Callable[..., Awaitable[Ground]]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Ends what a test started, latest first."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def make(stack: AsyncExitStack, nats_server: NatsServer, unique: Callable[..., str]) -> MakeGround:
    """A function that makes a stream on the single server."""
    connection = await stack.enter_async_context(await keylane.connect(nats_server.url))

    async def ground(**options: Any) -> Ground:
        return await make_ground(stack, connection, options.pop("stream", unique("grp")), nats_server.url, **options)

    return ground


@pytest.fixture
async def ground(make: MakeGround) -> Ground:
    """A stream in memory, without partitions: for elastic groups."""
    return await make()


@pytest.fixture
async def partitioned(make: MakeGround) -> Ground:
    """A stream in memory that carries 4 partitions: for static groups."""
    return await make(partitions=4)


@pytest.fixture
async def cluster_ground(stack: AsyncExitStack, nats_cluster: NatsCluster, unique: Callable[..., str]) -> Ground:
    """A stream with three replicas in files, in the cluster."""
    connection = await stack.enter_async_context(await keylane.connect(nats_cluster.urls))
    return await make_ground(stack, connection, unique("grp"), nats_cluster.urls, storage="file", num_replicas=3)


@pytest.fixture
async def own_server_ground(stack: AsyncExitStack, unique: Callable[..., str]) -> tuple[Ground, NatsServer]:
    """A stream in files on a server that the test may stop."""
    server = stack.enter_context(NatsServer.start())
    connection = await stack.enter_async_context(await keylane.connect(server.url))
    return await make_ground(stack, connection, unique("grp"), server.url, storage="file"), server
