"""`state="checkpointed"`: consumers in memory with one replica that are lost, and made again from positions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import keylane
from keylane.core.fleet_records import WorkerPositions, from_json
from keylane.fleet.store import FLEET_BUCKET
from keylane.jetstream import Bucket, RetentionPolicy, consumers, streams
from keylane.server import NatsCluster, NatsServer
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround
from tests.integration.groups.rig import flawless, make_ground
from tests.waiter import until

STATE: dict[str, Any] = {"state": "checkpointed"}


async def records(ground: FleetGround) -> list[WorkerPositions]:
    found = await Bucket(ground.connection, FLEET_BUCKET).entries(f"{ground.stream}.f.position")
    cut = len(f"{ground.stream}.f.")
    read = [from_json(one.key[cut:], one.value) for one in found if one.value is not None]
    return [one for one in read if isinstance(one, WorkerPositions)]


async def test_workers_come_and_go_under_load(ground: FleetGround) -> None:
    await ground.come_and_go(**STATE)
    info = await consumers.info(ground.connection, ground.stream, "f-p0")
    assert (info.config.mem_storage, info.config.num_replicas) == (True, 1)


@pytest.mark.parametrize("acks", ["message", "prefix"])
async def test_positions_are_recorded_and_a_deleted_consumer_begins_there(limits: FleetGround, acks: str) -> None:
    await limits.join("a", acks=acks, **STATE)
    sent = await limits.publish(KEYS * 3)
    await limits.evidence.all_of(sent)
    [record] = await until(
        lambda: records(limits), lambda found: found and max(found[0].positions.values()) == sent[-1]
    )
    assert len(record.positions) == PARTITIONS
    times = []
    for partition in range(PARTITIONS):
        await consumers.delete(limits.connection, limits.stream, f"f-p{partition}")
        began = time.monotonic()
        await until(lambda: consumers.names(limits.connection, limits.stream), lambda names: len(names) == PARTITIONS)
        times.append(time.monotonic() - began)
        sent += await limits.publish(KEYS)
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))
    assert sorted(times)[len(times) // 2] < 2


async def test_the_next_owner_finds_the_positions_of_a_dead_worker(limits: FleetGround) -> None:
    async with limits.process("b", checkpoint_s=0.2, **STATE) as b:
        await until(lambda: len(b.partitions) == PARTITIONS)
        sent = await limits.publish(KEYS * 5)
        await limits.evidence.all_of(sent)
        last = {
            str(line.partition): line.sequence for line in sorted(limits.evidence.lines, key=attrgetter("sequence"))
        }
        await until(lambda: records(limits), lambda all_: all_ and all_[0].positions == last)
        b.process.kill()
        await b.process.wait()
    for partition in range(PARTITIONS):
        await consumers.delete(limits.connection, limits.stream, f"f-p{partition}")
    a = await limits.join("a", **STATE)
    await limits.shared(a)
    sent += await limits.publish(KEYS)
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_server_that_restarts_loses_its_consumers_and_nothing_else(
    stack: AsyncExitStack, tmp_path: Path, retention: str
) -> None:
    server = stack.enter_context(NatsServer.start(store_dir=tmp_path))
    connection = await stack.enter_async_context(await keylane.connect(server.url))
    kind = {"partitions": PARTITIONS, "storage": "file", "retention": RetentionPolicy(retention)}
    ground = FleetGround(await make_ground(stack, connection, "restarted", server.url, **kind))
    await ground.join("a", **STATE)
    sent = await ground.publish(KEYS * 20)
    await ground.evidence.all_of(sent)
    await asyncio.to_thread(server.restart)
    await until(lambda: connection.is_connected)
    sent += await ground.publish(KEYS * 3)
    await ground.evidence.all_of(sent)
    verdict = ground.evidence.verdict(sent)
    assert verdict.clean
    # An ack that was under way when the server went down is lost; what it was for is recognised.
    assert not verdict.duplicated


async def test_auto_is_stored_as_what_it_chose(limits: FleetGround) -> None:
    await limits.join("a", **STATE)
    sent = await limits.publish(KEYS)
    await limits.evidence.all_of(sent)
    other = await limits.join("b", state="auto")
    await until(lambda: other.id)


@pytest.mark.long("a cluster of its own, whose nodes are killed under load and come back")
@pytest.mark.parametrize("acks", ["message", "prefix"])
async def test_a_node_that_is_killed_under_load(stack: AsyncExitStack, unique: Callable[..., str], acks: str) -> None:
    cluster = stack.enter_context(NatsCluster.start(3))
    connection = await stack.enter_async_context(await keylane.connect(cluster.nodes[0].url))
    kind = {"partitions": PARTITIONS, "storage": "file", "num_replicas": 3, "allow_direct": True}
    ground = FleetGround(await make_ground(stack, connection, unique("fleet"), cluster.urls, **kind))
    a, b = await ground.join("a", acks=acks, **STATE), await ground.join("b", acks=acks, **STATE)
    await ground.shared(a, b)
    sent = await ground.publish(KEYS)
    await ground.evidence.all_of(sent)
    leader = (await streams.state(connection, ground.stream)).leader
    victim = next(node for node in cluster.nodes[1:] if node.name != leader)

    async def at_victim() -> bool:
        """The server chooses where it makes a consumer: see to it that one is where it is needed."""
        if (await consumers.info(connection, ground.stream, "f-p0")).leader == victim.name:
            return True
        await consumers.delete(connection, ground.stream, "f-p0")
        await until(lambda: consumers.names(connection, ground.stream), lambda names: "f-p0" in names)
        return False

    await until(at_victim)
    async with ground.load(0.02) as more:
        await until(lambda: len(more) > 400)
        await asyncio.to_thread(victim.kill)
        await ground.evidence.all_of(list(more), deadline_s=60)
        await asyncio.to_thread(victim.restart)
        await until(lambda: len(more) > 2000, deadline_s=60)
        await ground.evidence.all_of(list(more), deadline_s=60)
    await ground.evidence.all_of(more, deadline_s=60)
    verdict = ground.evidence.verdict([*sent, *more])
    assert verdict.clean
    assert not verdict.duplicated, "its owner lives, and knows what it has handled"
