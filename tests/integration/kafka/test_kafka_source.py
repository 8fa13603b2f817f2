"""A Kafka topic as a source: what it holds, what is committed, and reading it through whatever happens."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AclOperation, ResourceType  # type: ignore[attr-defined]  # documented there

from keylane.errors import InvalidInput, NoSuchTopic, PermissionDenied, ReadIncomplete, TopicReplaced
from keylane.kafka import KafkaLink, KafkaSource, open_kafka_source
from keylane.kafka.partition_fetcher import open_fetcher
from tests.integration.kafka.topic_rig import Unique, delete_before, deny, fill, make_topic, numbers, read
from tests.peers.kafka import Kafka

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

PARTITIONS = 4


@pytest.fixture
async def source(link: KafkaLink) -> AsyncIterator[KafkaSource]:
    async with open_kafka_source(link) as opened:
        yield opened


@pytest.fixture
async def topic(link: KafkaLink, unique: Unique) -> str:
    name = unique("orders")
    await make_topic(link, name, PARTITIONS)
    return name


async def test_what_a_topic_holds(kafka: Kafka, link: KafkaLink, source: KafkaSource, topic: str) -> None:
    assert await source.partitions(topic) == PARTITIONS
    assert await source.extent(topic, 0) == (0, 0)
    fill(kafka.bootstrap, topic, PARTITIONS, 100)
    assert await source.extent(topic, 3) == (0, 25)
    assert await source.backlog(topic, 3, 5) == 20
    assert await source.backlog(topic, 3, 25) == 0
    assert await source.backlog(topic, 3, 99) == 0
    await delete_before(link, topic, 3, 10)
    assert await source.extent(topic, 3) == (10, 25)
    assert await source.backlog(topic, 3, 0) == 15, "what is gone does not wait"


async def test_messages_come_as_they_are(kafka: Kafka, source: KafkaSource, topic: str) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce(topic, b"one", b"k", 0, timestamp=1_700_000_000_123, headers=[("trace", b"7"), ("none", None)])
    producer.produce(topic, None, b"k", 0)
    producer.produce(topic, b"", None, 0)
    assert producer.flush(30) == 0
    async with source.reader(topic, 0, 0) as reader:
        one, deleted, empty = await read(reader, 3)
        assert (one.offset, one.key, one.data, one.timestamp_ms) == (0, b"k", b"one", 1_700_000_000_123)
        assert one.headers == (("trace", b"7"), ("none", b""))
        assert one.subject is None
        assert (deleted.data, deleted.is_tombstone) == (b"", True)
        assert (empty.key, empty.data, empty.is_tombstone) == (None, b"", False)
        assert await reader.next(10, 0.05) == []
        producer.produce(topic, b"late", b"k", 0)
        assert producer.flush(30) == 0
        assert [record.offset for record in await read(reader, 1)] == [3]


async def test_a_reader_begins_where_it_is_told_and_takes_no_more_than_asked(
    kafka: Kafka, source: KafkaSource, topic: str
) -> None:
    fill(kafka.bootstrap, topic, 1, 50)
    async with source.reader(topic, 0, 20) as reader:
        assert numbers(await read(reader, 30, most=7)) == list(range(20, 50))
    async with source.reader(topic, 0, 45) as reader:
        first = await reader.next(3, 10.0)
        assert numbers(first) == list(range(45, 45 + len(first)))
        assert 1 <= len(first) <= 3


async def test_readers_of_all_partitions_share_one_thread(
    kafka: Kafka, link: KafkaLink, source: KafkaSource, unique: Unique
) -> None:
    topic, many = unique("wide"), 64
    await make_topic(link, topic, many)
    fill(kafka.bootstrap, topic, many, 10 * many)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(source.reader(topic, 0, 0))
        assert len(await read(first, 10)) == 10
        threads = len(os.listdir("/proc/self/task"))
        readers = [await stack.enter_async_context(source.reader(topic, number, 0)) for number in range(1, many)]
        found = await asyncio.gather(*(read(one, 10) for one in readers))
        for number, records in enumerate(found, start=1):
            assert numbers(records) == list(range(number, 10 * many, many))
        assert len(os.listdir("/proc/self/task")) <= threads + 1


async def test_a_reader_that_nobody_reads_holds_up_no_other(kafka: Kafka, source: KafkaSource, topic: str) -> None:
    """More than its buffer takes, and not a message less when it goes on."""
    count = 20_000
    fill(kafka.bootstrap, topic, 2, count)
    async with source.reader(topic, 0, 0) as slow, source.reader(topic, 1, 0) as quick:
        assert len(await slow.next(1, 10.0)) == 1
        assert numbers(await read(quick, count // 2, most=1000)) == list(range(1, count, 2))
        assert numbers(await read(slow, count // 2 - 1, most=1000)) == list(range(2, count, 2))


async def test_a_partition_is_read_again_at_once_from_another_offset(
    kafka: Kafka, source: KafkaSource, topic: str
) -> None:
    fill(kafka.bootstrap, topic, 1, 3000)
    for offset in (0, 2500, 10, 2999, 0):
        async with source.reader(topic, 0, offset) as reader:
            count = min(3000 - offset, 50)
            assert numbers(await read(reader, count)) == list(range(offset, offset + count))
    async with source.reader(topic, 0, 0):
        with pytest.raises(ReadIncomplete, match="is still read here") as refused:
            async with source.reader(topic, 0, 0):
                pass
        assert refused.value.is_transient


async def test_offsets_that_are_gone_are_passed_over_to_the_earliest(
    kafka: Kafka, link: KafkaLink, source: KafkaSource, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(kafka.bootstrap, topic, 1, 100)
    await delete_before(link, topic, 0, 70)
    with caplog.at_level(logging.WARNING, "keylane.kafka"):
        async with source.reader(topic, 0, 20) as reader:
            assert numbers(await read(reader, 30)) == list(range(70, 100)), "the earliest, not the latest"
    assert "offsets 20 to 69 have expired" in caplog.text


async def test_an_offset_beyond_the_end_is_another_topics(kafka: Kafka, source: KafkaSource, topic: str) -> None:
    fill(kafka.bootstrap, topic, 1, 10)
    async with source.reader(topic, 0, 500) as reader:
        with pytest.raises(TopicReplaced, match="ends at 10 and was read to 500") as replaced:
            await read(reader, 1)
    assert not replaced.value.is_transient


async def test_only_what_is_committed_is_read(kafka: Kafka, link: KafkaLink, topic: str, unique: Unique) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": unique("writer")})
    producer.init_transactions(30)
    for word, ending in (("given up", producer.abort_transaction), ("kept", producer.commit_transaction)):
        producer.begin_transaction()
        producer.produce(topic, word.encode(), b"k", 0)
        assert producer.flush(30) == 0
        ending(30)
    producer.begin_transaction()
    producer.produce(topic, b"open", b"k", 0)
    assert producer.flush(30) == 0
    async with open_kafka_source(link) as source, source.reader(topic, 0, 0) as reader:
        assert [one.data for one in await read(reader, 1)] == [b"kept"]
        assert await reader.next(10, 0.3) == []
        assert (await source.extent(topic, 0)).end == 4, "up to the transaction that is still open"
    everything = open_kafka_source(link, isolation="read_uncommitted")
    async with everything as source, source.reader(topic, 0, 0) as reader:
        assert [one.data for one in await read(reader, 3)] == [b"given up", b"kept", b"open"]
    producer.abort_transaction(30)


# ---- committed offsets ------------------------------------------------------------------------------------


async def test_offsets_are_kafkas_own(kafka: Kafka, source: KafkaSource, topic: str, unique: Unique) -> None:
    group = unique("billing")
    assert await source.committed(group, topic, 1) is None
    await source.commit(group, topic, 1, 17)
    assert await source.committed(group, topic, 1) == 17
    assert await source.committed(unique("other"), topic, 1) is None
    other_tool = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    try:
        [seen] = other_tool.committed([TopicPartition(topic, 1)], timeout=30)
        assert seen.offset == 17
    finally:
        other_tool.close()


async def test_a_group_that_somebody_joined_in_kafka_itself(
    kafka: Kafka, source: KafkaSource, topic: str, unique: Unique, caplog: pytest.LogCaptureFixture
) -> None:
    group = unique("billing")
    fill(kafka.bootstrap, topic, PARTITIONS, 20)
    member = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "auto.offset.reset": "earliest"})
    member.subscribe([topic])
    try:
        async with asyncio.timeout(60):
            while await asyncio.to_thread(member.poll, 1.0) is None:
                pass
        await source.commit(group, topic, 0, 5)
        assert "consumers have joined this group in Kafka itself" in caplog.text
    finally:
        member.close()


async def test_without_commits(link: KafkaLink, topic: str, unique: Unique) -> None:
    group = unique("billing")
    async with open_kafka_source(link, commits=False) as source:
        await source.commit(group, topic, 0, 5)
        assert await source.committed(group, topic, 0) is None
    async with open_kafka_source(link) as source:
        assert await source.committed(group, topic, 0) is None, "nothing was written"


# ---- what is wrong ----------------------------------------------------------------------------------------


async def test_topics_that_are_not_there(source: KafkaSource, topic: str) -> None:
    with pytest.raises(NoSuchTopic, match=r"looking for topic 'nowhere'.*check the name"):
        await source.partitions("nowhere")
    with pytest.raises(NoSuchTopic, match="looking for topic 'nowhere'"):
        await source.extent("nowhere", 0)
    with pytest.raises(InvalidInput, match=f"{topic}/{PARTITIONS} holds: the topic has no such partition"):
        await source.extent(topic, PARTITIONS)


async def test_a_topic_that_this_user_may_not_read(
    kafka: Kafka, link: KafkaLink, source: KafkaSource, topic: str, unique: Unique
) -> None:
    hidden = unique("hidden")
    await make_topic(link, hidden, 1)
    await deny(link, ResourceType.TOPIC, hidden)
    with pytest.raises(PermissionDenied, match=f"looking for topic '{hidden}'.*lacks a permission"):
        await source.partitions(hidden)
    fill(kafka.bootstrap, topic, 1, 5)
    async with source.reader(topic, 0, 0) as reader:
        assert len(await read(reader, 5)) == 5
        await deny(link, ResourceType.TOPIC, topic, AclOperation.READ)
        with pytest.raises(PermissionDenied, match=f"reading {topic}/0") as refused:
            await read(reader, 1)
    assert not refused.value.is_transient


async def test_a_group_that_this_user_may_not_use(
    link: KafkaLink, source: KafkaSource, topic: str, unique: Unique
) -> None:
    group = unique("secret")
    await deny(link, ResourceType.GROUP, group)
    with pytest.raises(PermissionDenied, match=f"committed offset of group '{group}'"):
        await source.committed(group, topic, 0)
    with pytest.raises(PermissionDenied, match=f"committing offset 3 of group '{group}'"):
        await source.commit(group, topic, 0, 3)


async def test_options_that_cannot_be(link: KafkaLink) -> None:
    with pytest.raises(InvalidInput, match="isolation is 'dirty': use one of read_committed, read_uncommitted"):
        async with open_kafka_source(link, isolation="dirty"):  # type: ignore[arg-type]
            pass


async def test_reading_needs_no_permission_for_any_group(
    kafka: Kafka, link: KafkaLink, topic: str, unique: Unique
) -> None:
    """The client library wants the name of a group, and asks for its coordinator; nothing depends on the answer."""
    group = unique("secret")
    await deny(link, ResourceType.GROUP, group)
    fill(kafka.bootstrap, topic, 1, 10)
    async with open_fetcher(link, settings={"group.id": group}) as fetcher:
        following = await fetcher.follow(topic, 0, 0)
        got = 0
        async with asyncio.timeout(30):
            while got < 10:
                got += len(await following.take(10, within_s=1.0))
        assert await following.take(10, within_s=3.0) == []
