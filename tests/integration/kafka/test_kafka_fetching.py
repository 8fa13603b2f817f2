"""FetchedPartition partitions of a real broker with one consumer and one thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from confluent_kafka import Producer

from keylane.errors import InvalidInput, KafkaRefused, NoSuchTopic, ReadIncomplete
from keylane.kafka import KafkaLink
from keylane.kafka.partition_fetcher import FetchedPartition, open_fetcher
from keylane.kafka.producer import open_producer
from tests.integration.kafka.log_rig import Unique, create, delete
from tests.peers.kafka import Kafka
from tests.waiter import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]

PARTITIONS = 3
EACH = 3000


@pytest.fixture
async def topic(kafka: Kafka, link: KafkaLink, unique: Unique) -> AsyncIterator[str]:
    """Three partitions with numbers in them."""
    name = unique("numbers")
    await create(link, name, partitions=PARTITIONS)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True})  # else retries reorder
    for number in range(EACH):
        for partition in range(PARTITIONS):
            producer.produce(name, b"%d" % number, partition=partition)
    assert await asyncio.to_thread(producer.flush, 30) == 0
    try:
        yield name
    finally:
        await delete(link, name)


async def numbers(following: FetchedPartition, count: int, most: int = 700) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(90):
        while len(found) < count:
            found += [int(message.value() or b"") for message in await following.take(most, within_s=5)]
    return found


async def test_a_buffer_that_nobody_takes_from_holds_up_nobody(link: KafkaLink, topic: str) -> None:
    """Its partition is paused; the others are read to the end, and later it is read too, with nothing left out."""
    async with open_fetcher(link, most_messages=100) as fetcher:
        idle, *busy = [await fetcher.follow(topic, partition, 0) for partition in range(PARTITIONS)]
        for following in busy:
            assert await numbers(following, EACH) == list(range(EACH))
        await until(lambda: idle.is_paused)
        assert idle.given - idle.taken < EACH, "it is not all in memory"
        assert await numbers(idle, EACH) == list(range(EACH))
        assert repr(idle) == f"<FetchedPartition {topic}/0 at {EACH}, 0 waiting>"


async def test_a_buffer_is_bounded_in_bytes_too(link: KafkaLink, topic: str) -> None:
    async with open_fetcher(link, most_bytes=50) as fetcher:
        following = await fetcher.follow(topic, 0, 0)
        assert await numbers(following, EACH, most=3) == list(range(EACH))


async def test_following_anew_from_another_place(link: KafkaLink, topic: str) -> None:
    """What was fetched for the old place never comes up at the new one."""
    async with open_fetcher(link) as fetcher:
        for offset in (0, 2990, 5, EACH, 17):
            following = await fetcher.follow(topic, 1, offset)
            assert await numbers(following, min(20, EACH - offset), most=20) == list(range(offset, EACH))[:20]
            with pytest.raises(InvalidInput, match="is followed already"):
                await fetcher.follow(topic, 1, 0)
            await following.stop()


async def test_up_to_a_place(link: KafkaLink, topic: str) -> None:
    async with open_fetcher(link) as fetcher:
        following = await fetcher.follow(topic, 0, 10)
        assert [message.offset() for message in await following.take(100, within_s=10, before=12)] == [10, 11]
        assert (following.position, following.taken_to) == (12, 12)
        assert await following.take(100, within_s=10, before=12) == []
        assert [message.offset() for message in await following.take(2, within_s=10, before=100)] == [12, 13]


async def test_places_that_are_not(link: KafkaLink, topic: str) -> None:
    async with open_fetcher(link) as fetcher:
        beyond = await fetcher.follow(topic, 0, EACH + 5)
        with pytest.raises(ReadIncomplete, match=rf"offset {EACH + 5} of {topic}/0 cannot be read"):
            await beyond.take(1, within_s=20)


async def test_a_writer_says_where_each_record_is(link: KafkaLink, topic: str) -> None:
    async with open_producer(link) as writer:
        stored = await asyncio.gather(*(writer.append(topic, 2, b"%d" % number) for number in range(50)))
        assert stored == [(2, EACH + number) for number in range(50)]
        with pytest.raises(NoSuchTopic):
            await writer.append(topic, PARTITIONS + 1, b"x")
        with pytest.raises(KafkaRefused, match="Message size too large"):
            await writer.append(topic, 0, b"x" * 5_000_000)
