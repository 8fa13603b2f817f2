"""Workers that come and go in order: nothing is lost, repeated or out of order, and every partition has one owner."""

from __future__ import annotations

import asyncio

import pytest

from keylane import fleet
from keylane.fleet import WorkerState
from keylane.groups import GroupMessage
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround
from tests.integration.groups.rig import flawless
from tests.waiter import until


async def test_one_worker_has_everything(ground: FleetGround) -> None:
    worker = await ground.join("a")
    sent = await ground.publish(KEYS * 5)
    await ground.evidence.all_of(sent)
    assert worker.id == "f-0"
    assert worker.state is WorkerState.LEADING
    assert worker.partitions == tuple(map(str, range(PARTITIONS)))
    assert flawless(ground.evidence.verdict(sent))


async def test_workers_come_and_go_under_load(ground: FleetGround) -> None:
    async with ground.load() as sent:
        a = await ground.join("a")
        await ground.shared(a)
        b = await ground.join("b")
        await ground.shared(a, b)
        c = await ground.join("c")
        await ground.shared(a, b, c)
        await a.stop()  # the leader
        await ground.shared(b, c)
        a = await ground.join("a")
        await ground.shared(a, b, c)
        assert a.id == "f-0", "its id was reserved for it"
        await b.stop()
        await c.stop()
        await ground.shared(a)
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    assert {line.by for line in ground.evidence.lines} == {"a", "b", "c"}


@pytest.mark.long("three workers that stop and start again, with the leader's pauses between them")
async def test_a_rolling_restart_gives_each_worker_its_partitions_back(limits: FleetGround) -> None:
    workers = {name: await limits.join(name) for name in "abc"}
    await limits.shared(*workers.values())
    before = {name: worker.partitions for name, worker in workers.items()}
    for name in "abc":
        await workers[name].stop()
        workers[name] = await limits.join(name)
        await limits.shared(*workers.values())
    assert {name: worker.partitions for name, worker in workers.items()} == before


async def test_fewer_workers_start_than_have_stopped(limits: FleetGround) -> None:
    """All stop at once: nobody is left to assign what they had, and their successors are gone too."""
    workers = [await limits.join(name) for name in "abc"]
    await limits.shared(*workers)
    await asyncio.gather(*(worker.stop() for worker in workers))
    one = await limits.join("d")
    async with asyncio.timeout(5):
        await limits.shared(one)
    sent = await limits.publish(KEYS)
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))


async def test_the_others_do_not_notice_a_move(limits: FleetGround) -> None:
    """A handler that is at work on a partition that stays is not waited for, and not disturbed."""
    at_work, go_on = asyncio.Event(), asyncio.Event()

    async def slow(message: GroupMessage) -> None:
        if message.data == b"slow":
            at_work.set()
            await go_on.wait()
        await limits.evidence.note("a", message)

    a = await limits.join("a", slow)
    await limits.shared(a)
    [stuck] = await limits.publish([KEYS[0]], b"slow")
    await at_work.wait()
    b = await limits.join("b")
    await until(lambda: b.partitions)
    sent = await limits.publish(KEYS[1:])
    moved = {int(one) for one in b.partitions}
    await limits.evidence.until(lambda lines: {line.partition for line in lines if line.by == "b"} == moved)
    go_on.set()
    await limits.shared(a, b)
    await limits.evidence.all_of([stuck, *sent])
    assert flawless(limits.evidence.verdict([stuck, *sent]))


async def test_tokens_grow_with_every_change_of_owner(limits: FleetGround) -> None:
    tokens: dict[int, list[int]] = {}

    async def handle(message: GroupMessage) -> None:
        tokens.setdefault(message.partition, []).append(message.origin.revision)

    async with limits.load():
        a = await limits.join("a", handle)
        await limits.shared(a)
        b = await limits.join("b", handle)
        await limits.shared(a, b)
        moved = [int(one) for one in b.partitions]

        async def each_had(owners: int) -> None:
            await until(lambda: min(len(set(tokens.get(one, ()))) for one in moved), lambda seen: seen >= owners)

        await each_had(2)
        await b.stop()
        await limits.shared(a)
        await each_had(3)
    for seen in tokens.values():
        assert seen == sorted(seen)


@pytest.mark.long("a cluster of three servers, and workers that come and go on it")
async def test_workers_come_and_go_on_a_cluster(cluster_ground: FleetGround) -> None:
    await cluster_ground.come_and_go()


async def test_a_stop_does_not_wait_for_the_leader(limits: FleetGround) -> None:
    """Workers that stop name their successors, which take over at once. The leader's next version says the same."""
    workers = {name: await limits.join(name, lease_s=30.0) for name in "abcd"}
    await limits.shared(*workers.values())
    assert workers["a"].is_leader
    async with limits.load() as sent:
        for name in "ba":
            await limits.evidence.all_of(list(sent))
            async with asyncio.timeout(10):  # without a successor it waits for a version, and lease_s at most
                await workers.pop(name).stop()
            await limits.shared(*workers.values())
        written = await until(
            lambda: fleet.history(limits.connection, limits.stream, "f"),
            lambda found: {move.before for one in found for move in one.moves} == {None, "f-0", "f-1"},
        )
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))
    assert {one.cause for one in written} <= {"start", "scale", "leader"}, "never an emergency"
    assert all("leaving" not in one.reason for one in written)


async def test_workers_that_stop_together(limits: FleetGround) -> None:
    workers = [await limits.join(name, lease_s=30.0) for name in "abcd"]
    await limits.shared(*workers)
    async with limits.load() as sent:
        async with asyncio.timeout(10):
            await asyncio.gather(*(worker.stop() for worker in workers[:3]))
        await limits.shared(workers[3])
    await limits.evidence.all_of(sent)
    assert flawless(limits.evidence.verdict(sent))
    async with asyncio.timeout(10):
        await workers[3].stop()  # the last one
