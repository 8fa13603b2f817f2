"""Fixtures for the tests of fleets: streams that carry partitions, on the ground of the groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from nats.js.api import RetentionPolicy

import keylane
from keylane.server import NatsCluster, NatsServer
from tests.integration.fleet.rig import PARTITIONS, FleetGround
from tests.integration.groups.conftest import MakeGround, make, stack
from tests.integration.groups.rig import make_ground

__all__ = ["make", "stack"]

MakeOnCluster = Callable[[str], Awaitable[FleetGround]]


@pytest.fixture(params=[pytest.param("limits", marks=pytest.mark.long("again, on a stream with limits")), "workqueue"])
async def ground(make: MakeGround, request: pytest.FixtureRequest) -> FleetGround:
    """A stream in files that numbers its partitions; both kinds of retention that a fleet takes.

    `make test` has the work queue, which forgives less: what was acked wrongly is gone.
    """
    return FleetGround(
        await make(partitions=PARTITIONS, storage="file", retention=RetentionPolicy(request.param), allow_direct=True)
    )


@pytest.fixture
async def limits(make: MakeGround) -> FleetGround:
    """A stream in memory with limits: for what does not depend on the retention."""
    return FleetGround(await make(partitions=PARTITIONS, allow_direct=True))


@pytest.fixture
async def queue(make: MakeGround) -> FleetGround:
    """A work queue in memory."""
    return FleetGround(await make(partitions=PARTITIONS, retention=RetentionPolicy.WORK_QUEUE, allow_direct=True))


@pytest.fixture
def make_on_cluster(stack: AsyncExitStack, nats_cluster: NatsCluster, unique: Callable[..., str]) -> MakeOnCluster:
    """A stream with three replicas in files, in the cluster."""

    async def made(retention: str) -> FleetGround:
        connection = await stack.enter_async_context(await keylane.connect(nats_cluster.urls))
        return FleetGround(
            await make_ground(
                stack,
                connection,
                unique("fleet"),
                nats_cluster.urls,
                partitions=PARTITIONS,
                storage="file",
                num_replicas=3,
                allow_direct=True,
                retention=RetentionPolicy(retention),
            )
        )

    return made


@pytest.fixture
async def cluster_ground(make_on_cluster: MakeOnCluster) -> FleetGround:
    return await make_on_cluster("limits")


@pytest.fixture(params=["limits", "workqueue"])
async def cluster_ground_of_both(make_on_cluster: MakeOnCluster, request: pytest.FixtureRequest) -> FleetGround:
    """With both kinds of retention."""
    return await make_on_cluster(request.param)


@pytest.fixture(params=["limits", "workqueue"])
async def own_server(
    stack: AsyncExitStack, unique: Callable[..., str], request: pytest.FixtureRequest
) -> tuple[FleetGround, NatsServer]:
    """A stream in files on a server that the test may stop."""
    server = stack.enter_context(NatsServer.start())
    connection = await stack.enter_async_context(await keylane.connect(server.url))
    ground = await make_ground(
        stack,
        connection,
        unique("fleet"),
        server.url,
        partitions=PARTITIONS,
        storage="file",
        retention=RetentionPolicy(request.param),
        allow_direct=True,
    )
    return FleetGround(ground), server
