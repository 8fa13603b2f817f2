"""The fleet's bucket does not answer for longer than the lease: work goes on under confirmed pins, and nobody is
expired when it answers again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

import keylane
from keylane import Connection
from keylane.fleet import Worker, WorkerHooks, WorkerState
from keylane.fleet.store import FLEET_BUCKET
from keylane.jetstream import Bucket, streams
from keylane.server import NatsCluster
from tests.integration.fleet.rig import PARTITIONS, FleetGround
from tests.integration.groups.rig import flawless, make_ground
from tests.waiter import until

LEASE_S = 1.0
OUTAGE_S = 4 * LEASE_S
BUCKET = f"KV_{FLEET_BUCKET}"


class Watched:
    """Two workers, and the states that they went through."""

    def __init__(self, ground: FleetGround) -> None:
        self.ground = ground
        self.states: dict[str, list[WorkerState]] = {"a": [], "b": []}
        self.workers: list[Worker] = []

    async def join(self) -> None:
        for name, seen in self.states.items():
            hooks = WorkerHooks(on_state=lambda state, _, seen=seen: seen.append(state))  # type: ignore[misc]
            self.workers.append(await self.ground.join(name, hooks=hooks, lease_s=LEASE_S))
        await self.ground.shared(*self.workers)

    async def all_unreachable(self) -> None:
        await until(lambda: all(WorkerState.UNREACHABLE in seen for seen in self.states.values()))

    async def all_active(self) -> None:
        active = (WorkerState.ACTIVE, WorkerState.LEADING)
        await until(lambda: [worker.state for worker in self.workers], lambda seen: all(one in active for one in seen))


async def goes_on(watched: Watched, sent: list[int]) -> None:
    """Everything that is published during the outage is handled during it, by the worker that owned it."""
    await watched.all_unreachable()
    loop = asyncio.get_running_loop()
    end = loop.time() + OUTAGE_S
    while loop.time() < end:
        published = len(sent)
        await watched.ground.evidence.all_of(sent[:published])
        await asyncio.sleep(0.1)
    assert all(worker.state is WorkerState.UNREACHABLE for worker in watched.workers)


async def test_work_goes_on_without_the_bucket(limits: FleetGround) -> None:
    watched = Watched(limits)
    await watched.join()
    before = [worker.partitions for worker in watched.workers]
    config = (await streams.info_json(limits.connection, BUCKET))["config"]
    async with limits.load(0.05) as sent:
        await streams.delete(limits.connection, BUCKET)
        try:
            await goes_on(watched, sent)
        finally:
            await streams.create_json(limits.connection, config)
        await watched.all_active()
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))
    assert [worker.partitions for worker in watched.workers] == before
    assert all(WorkerState.FENCED not in seen for seen in watched.states.values())


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def leader_of(connection: Connection, stream: str) -> str:
    return str((await streams.info_json(connection, stream))["cluster"]["leader"])


@pytest.mark.long("a cluster of its own, one of whose nodes stands still for four leases")
async def test_work_goes_on_while_the_node_of_the_bucket_stands_still(
    stack: AsyncExitStack, unique: Callable[..., str], tmp_path: Path
) -> None:
    """The bucket has one replica on one node, the messages one on another: only the bucket does not answer."""
    cluster = await stack.enter_async_context(NatsCluster.start(3, store_dir=tmp_path))
    async with keylane.connect(cluster.urls) as connection:
        await Bucket(connection, FLEET_BUCKET).ensure(replicas=1)
        home = await leader_of(connection, BUCKET)
    urls = [node.url for node in cluster.nodes if node.name != home]
    connection = await stack.enter_async_context(await keylane.connect(urls))
    for _ in range(20):
        ground = await make_ground(stack, connection, unique("fleet"), urls, partitions=PARTITIONS, allow_direct=True)
        if await leader_of(connection, ground.stream) != home:
            break
    watched = Watched(FleetGround(ground))
    await watched.join()
    before = [worker.partitions for worker in watched.workers]
    async with watched.ground.load(0.05) as sent:
        with frozen(cluster.node(home).pid):
            await goes_on(watched, sent)
        await watched.all_active()
    await watched.ground.evidence.all_of(sent)
    assert flawless(watched.ground.evidence.verdict(sent))
    assert [worker.partitions for worker in watched.workers] == before
    assert all(WorkerState.FENCED not in seen for seen in watched.states.values())
