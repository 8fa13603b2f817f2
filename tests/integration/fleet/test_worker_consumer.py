"""The contract of `update_worker_consumer` on a real server: what changes, what never does, and what failures leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from keylane.core.consumer_filters import UpdatePace
from keylane.core.fleet_partitions import Partition
from keylane.errors import (
    ConsumerUpdateCancelled,
    ConsumerUpdateUnconfirmed,
    InvalidInput,
    NotFound,
    SubjectCapExceeded,
)
from keylane.fleet.shared_consumer import ConsumerTerms
from keylane.fleet.worker_consumer import WorkerConsumer
from keylane.jetstream import ConsumerConfig, Message, consumers
from tests.integration.fleet.rig import KEYS, FleetGround
from tests.waiter import until

WORKER = "f-0"


class Rig:
    """A consumer on a work queue, and what it delivered."""

    def __init__(self, ground: FleetGround) -> None:
        self.ground = ground
        self.partitions = ground.partitions.resolve().partitions
        self.seen: list[int] = []
        self.troubles: list[str] = []
        self.may_change = True

    def consumer(self, **options: object) -> WorkerConsumer:
        terms = ConsumerTerms(
            stream=self.ground.stream, is_queue=True, ack_wait_s=30.0, max_ack_pending=500, pin_timeout_s=60.0
        )
        given: dict[str, object] = {"pace": UpdatePace(min_interval_s=0.1, escalate_after_s=0.3), **options}
        return WorkerConsumer(
            self.ground.connection,
            WORKER,
            terms,
            may_change=lambda: self.may_change,
            on_trouble=self.troubles.append,
            **given,  # type: ignore[arg-type]
        )

    def handle(self, batch: list[Message]) -> None:
        for message in batch:
            self.seen.append(message.sequence)
            message.ack()

    async def config(self) -> ConsumerConfig:
        return (await consumers.info(self.ground.connection, self.ground.stream, WORKER)).config

    async def update(self, consumer: WorkerConsumer, partitions: tuple[Partition, ...]) -> bool:
        return await consumer.update_worker_consumer(WORKER, partitions, self.handle)


@pytest.fixture
async def rig(queue: FleetGround) -> Rig:
    return Rig(queue)


@pytest.fixture
async def consumer(rig: Rig) -> AsyncIterator[WorkerConsumer]:
    made = rig.consumer()
    yield made
    await made.close()


async def test_only_the_filters_change(rig: Rig, consumer: WorkerConsumer) -> None:
    assert await rig.update(consumer, rig.partitions[:3])
    before = await rig.config()
    assert before.filter_subjects == tuple(one.filter for one in rig.partitions[:3])
    assert await rig.update(consumer, rig.partitions[1:6])
    after = await rig.config()
    assert after.filter_subjects == tuple(one.filter for one in rig.partitions[1:6])
    assert replace(after, filter_subjects=None) == replace(before, filter_subjects=None)


async def test_the_same_partitions_are_no_update(rig: Rig, consumer: WorkerConsumer) -> None:
    await rig.update(consumer, rig.partitions[:3])
    updates = consumer.counts.updates
    assert not await rig.update(consumer, rig.partitions[2::-1] + rig.partitions[:1])
    assert (consumer.counts.updates, consumer.counts.skipped, consumer.counts.duplicates) == (updates, 1, 1)


async def test_no_partitions_pause_and_never_mean_the_whole_stream(rig: Rig, consumer: WorkerConsumer) -> None:
    await rig.update(consumer, rig.partitions)
    await rig.update(consumer, ())
    sent = await rig.ground.publish(KEYS)
    with pytest.raises(NotFound):
        await rig.config()
    assert rig.seen == []
    await rig.update(consumer, rig.partitions)
    await until(lambda: sorted(rig.seen) == sent)


async def test_too_many_subjects_are_refused_and_the_last_good_ones_hold(rig: Rig) -> None:
    consumer = rig.consumer(max_subjects=3)
    await rig.update(consumer, rig.partitions[:3])
    with pytest.raises(SubjectCapExceeded, match="4 subjects are wanted of one consumer, and its limit is 3"):
        await rig.update(consumer, rig.partitions[:4])
    assert len((await rig.config()).filter_subjects or ()) == 3
    await consumer.close()


async def test_a_second_consumer_where_it_is_allowed(rig: Rig) -> None:
    consumer = rig.consumer(max_subjects=5, may_split=True)
    sent = await rig.ground.publish(KEYS)
    await rig.update(consumer, rig.partitions)
    await until(lambda: sorted(rig.seen) == sent)
    names = await consumers.names(rig.ground.connection, rig.ground.stream)
    assert sorted(names) == ["f-0", "f-0=1"]
    await rig.update(consumer, ())
    await consumer.close()


@pytest.mark.alone("counts what falls into a quarter of a second")
async def test_many_updates_at_once_become_few(rig: Rig, consumer: WorkerConsumer) -> None:
    await rig.update(consumer, rig.partitions[:1])
    async with asyncio.TaskGroup() as tasks:
        for number in range(40):
            tasks.create_task(rig.update(consumer, rig.partitions[: 2 + number % 6]))
            await asyncio.sleep(0.005)
    assert consumer.counts.updates < 12
    assert (await rig.config()).filter_subjects == tuple(one.filter for one in rig.partitions[:5])


async def test_an_update_under_load_loses_nothing(rig: Rig, consumer: WorkerConsumer) -> None:
    async with rig.ground.load() as sent:
        for upto in (2, 8, 1, 5, 8):
            await rig.update(consumer, rig.partitions[:upto])
    await until(lambda: set(sent) - set(rig.seen), lambda missing: not missing)


async def test_filters_that_another_consumer_has_are_waited_for_and_told_to_the_leader(
    rig: Rig, consumer: WorkerConsumer
) -> None:
    """The pull loop goes on with the last good filters meanwhile."""
    await rig.update(consumer, rig.partitions[:2])
    other = ConsumerConfig(durable_name="other", filter_subject=rig.partitions[2].filter)
    await consumers.create(rig.ground.connection, rig.ground.stream, other)
    with pytest.raises(ConsumerUpdateUnconfirmed, match=r"did not change within 0\.5 s"):
        await consumer.update_worker_consumer(WORKER, rig.partitions[:3], rig.handle, timeout_s=0.5)
    await until(lambda: rig.troubles, lambda told: told and "cannot widen its filters to 3" in told[0])
    sent = await rig.ground.publish(KEYS)
    await until(lambda: len(rig.seen) > 0)
    await consumers.delete(rig.ground.connection, rig.ground.stream, "other")
    await until(lambda: consumer.filters == {one.filter for one in rig.partitions[:3]})
    await until(lambda: rig.troubles[-1] == "")
    await rig.update(consumer, rig.partitions)
    await until(lambda: sorted(set(rig.seen)) == sent)


async def test_a_closed_consumer_ends_the_wait_for_an_update(rig: Rig, consumer: WorkerConsumer) -> None:
    rig.may_change = False
    waiting = asyncio.create_task(rig.update(consumer, rig.partitions))
    await asyncio.sleep(0)
    await consumer.close()
    with pytest.raises(ConsumerUpdateCancelled):
        await waiting


async def test_another_workers_id_is_refused(rig: Rig, consumer: WorkerConsumer) -> None:
    with pytest.raises(InvalidInput, match="this is the consumer of worker 'f-0'"):
        await consumer.update_worker_consumer("f-1", rig.partitions, rig.handle)
