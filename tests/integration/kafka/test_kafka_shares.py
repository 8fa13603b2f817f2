"""Consumers on a log in Kafka: stray records stop nobody, and shares become even."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from keylane.core.claim_facts import Ended, overlaps
from keylane.core.claim_records import ClaimingPartition, Heartbeat, coordinating_partition, encode
from keylane.errors import TwoHashes
from keylane.kafka import KafkaLink, open_kafka, open_kafka_log
from keylane.kafka.producer import open_producer
from keylane.marshal import Admin, Appetite, Consumer, MemorySource
from tests.integration.marshal.rig import GROUP, TOPIC, Seen, fill, in_order_per_key
from tests.peers.kafka import Kafka
from tests.waiter import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

INTERVAL_S = 1.0
LOG_PARTITIONS = 4
PARTITIONS = 6


@asynccontextmanager
async def consumer(kafka: Kafka, name: str, client: str, source: MemorySource, handler: Any) -> AsyncIterator[Consumer]:
    """With a link of its own, as another process would have."""
    async with (
        open_kafka(kafka.bootstrap) as link,
        open_kafka_log(link, name, interval_s=INTERVAL_S, partitions=LOG_PARTITIONS) as log,
        Consumer(log, source, GROUP, client, [TOPIC], handler, pick=Appetite(greedy=True)) as one,
    ):
        yield one


def stray() -> tuple[bytes, int]:
    """A record about a partition of the topic, and a partition of the log where no hash puts it."""
    hashes = {
        coordinating_partition(TOPIC, 0, LOG_PARTITIONS),
        coordinating_partition(TOPIC, 0, LOG_PARTITIONS, placing="topic"),
    }
    used = {coordinating_partition(TOPIC, number, LOG_PARTITIONS) for number in range(PARTITIONS)}
    return encode(Heartbeat("i", "odd", GROUP, TOPIC, 0, 5, 1)), min(used - hashes)


async def test_strays_stop_nobody(kafka: Kafka, link: KafkaLink, name: str, caplog: pytest.LogCaptureFixture) -> None:
    source, seen = MemorySource({TOPIC: PARTITIONS}), Seen()
    misplaced, there = stray()
    async with consumer(kafka, name, "anna", source, seen) as anna, open_producer(link) as writer:
        await until(lambda: len(anna.partitions) == PARTITIONS)
        for number in range(LOG_PARTITIONS):
            for value in (b"\x00\x01", b"", b"Handover/2/1/i/anna/billing/orders/0/5"):
                await writer.append(name, number, value)
        await writer.append(name, there, misplaced)
        async with consumer(kafka, name, "bert", source, seen) as bert:
            await until(lambda: len(anna.partitions) == len(bert.partitions) == PARTITIONS // 2)
            fill(source, PARTITIONS, 10)
            await seen.until(lambda one: len(one.messages) == 60)
    assert set(seen.times.values()) == {1}
    assert "records of the coordination log are skipped, such as record" in caplog.text
    async with open_kafka_log(link, name, interval_s=INTERVAL_S) as log:
        world = await Admin(log).world(keep_history=True)
    assert (world.unreadable, world.misplaced) == (3 * LOG_PARTITIONS, 1)
    assert list(overlaps(world.tenures())) == []


async def test_another_hash_stops_everybody_while_its_user_may_live(kafka: Kafka, link: KafkaLink, name: str) -> None:
    source = MemorySource({TOPIC: PARTITIONS})
    theirs = coordinating_partition(TOPIC, 2, LOG_PARTITIONS, placing="topic")
    assert theirs != coordinating_partition(TOPIC, 2, LOG_PARTITIONS)
    async with open_producer(link) as writer:
        async with consumer(kafka, name, "anna", source, Seen()) as anna:
            await until(lambda: len(anna.partitions) == PARTITIONS)
            await writer.append(name, theirs, encode(ClaimingPartition("i", "go", GROUP, TOPIC, 2, 1)))
            with pytest.raises(TwoHashes, match="client 'go' wrote it with the other hash"):
                await anna.wait()
        await asyncio.sleep(2.1 * INTERVAL_S)  # what it claimed runs out
        async with consumer(kafka, name, "anna", source, Seen()) as anna:
            await until(lambda: len(anna.partitions) == PARTITIONS)


async def test_two_and_then_three_share_evenly(kafka: Kafka, link: KafkaLink, name: str) -> None:
    source, seen, count = MemorySource({TOPIC: PARTITIONS}), Seen(), 0

    async def flow() -> None:
        nonlocal count
        while True:
            fill(source, PARTITIONS, 1, first=count)
            count += 1
            await asyncio.sleep(0.01)

    async with AsyncExitStack() as stack:
        members = [await stack.enter_async_context(consumer(kafka, name, "anna", source, seen))]
        await until(lambda: len(members[0].partitions) == PARTITIONS)
        flowing = asyncio.create_task(flow())
        try:
            for client in ("bert", "carl"):
                members.append(await stack.enter_async_context(consumer(kafka, name, client, source, seen)))
                await until(lambda: {len(one.partitions) for one in members} == {PARTITIONS // len(members)})
        finally:
            flowing.cancel()
        await seen.until(lambda one: len(one.messages) == count * PARTITIONS)
    assert set(seen.times.values()) == {1}
    assert in_order_per_key(seen.messages), "also from one owner to the next"
    async with open_kafka_log(link, name, interval_s=INTERVAL_S) as log:
        world = await Admin(log).world(keep_history=True)
    assert list(overlaps(world.tenures())) == []
    assert {one.ended for one in world.tenures()} == {Ended.RELEASED}
