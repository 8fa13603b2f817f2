"""Layout `worker`: one consumer for all partitions of a worker. What holds for the other layout holds here."""

from __future__ import annotations

from collections.abc import Collection

from keylane.fleet import Worker
from keylane.groups import GroupMessage
from keylane.jetstream import consumers
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround
from tests.integration.groups.rig import flawless
from tests.waiter import until


async def filters_of(ground: FleetGround, worker: Worker) -> Collection[str]:
    assert worker.id is not None
    info = await consumers.info(ground.connection, ground.stream, worker.id)
    return info.config.filter_subjects or ()


async def test_a_worker_has_one_consumer(ground: FleetGround) -> None:
    sent = await ground.publish(KEYS * 5)
    worker = await ground.join("a", layout="worker")
    await ground.shared(worker)
    sent += await ground.publish(KEYS * 5)
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    assert len(await filters_of(ground, worker)) == PARTITIONS
    await until(lambda: consumers.names(ground.connection, ground.stream), lambda names: names == ["f-0"])
    await worker.stop()
    assert await consumers.names(ground.connection, ground.stream) == []
    sent += await ground.publish(KEYS)
    await ground.shared(await ground.join("a", layout="worker"))
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))


async def test_workers_with_one_consumer_come_and_go_under_load(ground: FleetGround) -> None:
    await ground.come_and_go(layout="worker")


async def test_a_killed_worker_with_one_consumer_is_replaced_in_order(ground: FleetGround) -> None:
    await ground.lose_a_worker(layout="worker")
    await until(lambda: consumers.names(ground.connection, ground.stream), lambda names: "f-1" not in names)


async def test_what_was_handled_above_a_failing_message_does_not_move_with_its_partition(ground: FleetGround) -> None:
    failed: set[int] = set()
    record = ground.evidence.handler("a")

    async def fails_for_k1(message: GroupMessage) -> None:
        if message.key == "k1":
            failed.add(message.sequence)
            raise ValueError("no")
        await record(message)

    a = await ground.join("a", fails_for_k1, layout="worker")
    await ground.shared(a)
    keys = ["k1", *KEYS * 5]
    sent = await ground.publish(keys)
    await ground.evidence.all_of([one for one, key in zip(sent, keys, strict=True) if key != "k1"])
    await until(lambda: bool(failed))
    await a.stop()
    await ground.shared(await ground.join("b", layout="worker"))
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
