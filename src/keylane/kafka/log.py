"""The coordination log in a Kafka topic: the broker's offsets are its order, the broker's clock is its time.

Owns: the guarantees of `CoordinationLog` on Kafka. All in-sync replicas confirm an append. A read asks the leader for
the end first and returns everything before it, or raises. Kafka cannot compare and set: a claim is written, read back
and judged by its offset, so claims that lost leave a record too.

The topic is checked regularly: if it was deleted, recreated or given more partitions, every call raises `LogReplaced`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka import Message as KafkaMessage

from keylane.core.claim_facts import LogRecord
from keylane.core.claim_records import Message, encode
from keylane.errors import BrokerUnavailable, InvalidInput, LogReplaced, NoSuchTopic, ReadIncomplete, UnsafeLog
from keylane.kafka.client import KafkaLink
from keylane.kafka.partition_fetcher import FetchedPartition, PartitionFetcher, open_fetcher
from keylane.kafka.producer import RecordProducer, open_producer
from keylane.kafka.topic import (
    DEFAULT_TOPIC,
    LEAST_INTERVALS,
    LogTopic,
    PartitionOffsets,
    TopicWatch,
    check_topic_name,
    provide,
    retention_of,
    settings,
)
from keylane.marshal import Bounds, Newest, Position

_BATCH = 5000
_KEPT = 2000
_LONGEST_BETWEEN_CHECKS_S = 2.0
_BELIEVED_TRUNCATED_S = 60.0
"""How long a leader may lack a record that was confirmed: one that was replaced learns of it sooner."""


class _PartitionTail:
    """One partition of the log, read onwards for any number of readers.

    All readers are near the end of the log, so records that one of them fetched are kept here for the others. A reader
    that begins further back moves the position, and all go on from there. `follow` begins at an offset; `records`
    converts messages to records, or raises.
    """

    def __init__(
        self,
        follow: Callable[[int], Awaitable[FetchedPartition]],
        records: Callable[[list[KafkaMessage]], list[LogRecord]],
        timeout_s: float,
    ) -> None:
        self._follow = follow
        self._records = records
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._fetched: FetchedPartition | None = None
        self._recent: list[LogRecord] = []
        self._from = 0
        """`_recent` has every record from this offset to the position of `_fetched`."""

    async def next(self, offset: int, end: int) -> tuple[list[LogRecord], int]:
        """Some records from an offset on and before `end`, and the next offset: `end` when there are no more."""
        async with self._turn:
            fetched = self._fetched
            if fetched is None or not self._from <= offset <= fetched.position:
                fetched = await self._begin(offset)
            if offset == fetched.position:
                await self._fetch(fetched, end)
            low, high = (bisect_left(self._recent, at, key=_offset) for at in (offset, end))
            found = self._recent[low : min(high, low + _BATCH)]
            is_all = low + len(found) == high and fetched.position >= end
            return found, end if is_all else found[-1].offset + 1 if found else fetched.position

    async def stop(self) -> None:
        fetched, self._fetched, self._recent = self._fetched, None, []
        if fetched is not None:
            await fetched.stop()

    async def _begin(self, offset: int) -> FetchedPartition:
        await self.stop()
        self._from = offset
        fetched = self._fetched = await self._follow(offset)
        return fetched

    async def _fetch(self, fetched: FetchedPartition, end: int) -> None:
        try:
            messages = await fetched.take(_BATCH, within_s=self._timeout_s, before=end)
            records = self._records(messages)
        except BaseException:  # messages that were taken and not kept must be fetched again
            await self.stop()
            raise
        if not messages and fetched.position < end:
            await self.stop()
            raise ReadIncomplete(
                f"record {fetched.position} of {end - 1} did not come within {self._timeout_s:g} s; read again"
            )
        if len(self._recent) > _KEPT:
            self._from = self._recent[-_KEPT].offset
            del self._recent[:-_KEPT]
        self._recent += records


class KafkaLog:
    """A coordination log in a topic. Made by `open_kafka_log`."""

    first_offset = 0
    compares = False

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        link: KafkaLink,
        topic: LogTopic,
        producer: RecordProducer,
        fetcher: PartitionFetcher,
        watch: TopicWatch,
        interval_s: float,
    ) -> None:
        self.name = topic.name
        self.interval_s = interval_s
        self.partitions = topic.partitions
        self._link = link
        self._watch = watch
        self._producer = producer
        self._fetcher = fetcher
        self._offsets = PartitionOffsets(link, topic.name)
        self._appended_to = [0] * topic.partitions
        self._behind_since: dict[int, float] = {}
        self._tails = [self._tail(number) for number in range(topic.partitions)]

    def __repr__(self) -> str:
        return f"<KafkaLog {self.name} of {self.partitions} partitions>"

    async def append(self, message: Message, partition: int, *, expect: Newest | None = None) -> Position:
        """As in `CoordinationLog`; `expect` is ignored. `OutcomeUnknown`: it may be in the log, or arrive later."""
        self._check_partition(partition)
        value = encode(message)
        self._watch.check()
        async with self._check_if_unknown():
            stored = await self._producer.append(self.name, partition, value)
        self._appended_to[partition] = max(self._appended_to[partition], stored.offset + 1)
        return Position(*stored)

    async def bounds(self, partition: int) -> Bounds:
        self._check_partition(partition)
        self._watch.check()
        async with self._check_if_unknown():
            first = await self._offsets.ask("begins", partition)
        return Bounds(first, await self._end(partition))

    async def read(self, partition: int, offset: int) -> AsyncIterator[LogRecord]:
        self._check_partition(partition)
        end = await self._end(partition)
        while offset < end:
            try:
                records, offset = await self._tails[partition].next(offset, end)
            except ReadIncomplete as error:
                raise ReadIncomplete(
                    f"partition {partition} of coordination log {self.name!r} was not read to its end: {error}"
                ) from error
            for record in records:
                yield record

    async def kept_for_s(self) -> float | None:
        return retention_of(await settings(self._link, self.name))

    # ---- reading ------------------------------------------------------------------------------------

    def _tail(self, partition: int) -> _PartitionTail:
        return _PartitionTail(
            lambda offset: self._fetcher.follow(self.name, partition, offset),
            lambda messages: self._records(partition, messages),
            self._link.timeout_s,
        )

    def _records(self, partition: int, messages: list[KafkaMessage]) -> list[LogRecord]:
        records = []
        for message in messages:
            kind, time_ms = message.timestamp()
            offset = message.offset()
            assert offset is not None, message
            if kind != TIMESTAMP_LOG_APPEND_TIME:
                raise UnsafeLog(
                    f"record {offset} in partition {partition} of coordination log {self.name!r} has its writer's "
                    "time: it was written while message.timestamp.type was not LogAppendTime; use another topic, or "
                    "wait until such records have expired"
                )
            records.append(LogRecord(partition, offset, time_ms, message.value() or b""))
        return records

    async def _end(self, partition: int) -> int:
        own = self._appended_to[partition]
        async with self._check_if_unknown():
            end = await self._offsets.ask("ends", partition)
        if end >= own:
            self._behind_since.pop(partition, None)
            return end
        await self._watch.check_now()
        said = f"partition {partition} of coordination log {self.name!r} ends at {end}, before record {own - 1}"
        now = asyncio.get_running_loop().time()
        if now - self._behind_since.setdefault(partition, now) > _BELIEVED_TRUNCATED_S:
            raise LogReplaced(f"{said}, which was confirmed: it was truncated; stop all its consumers")
        raise ReadIncomplete(f"{said}, which was confirmed: its leader does not know yet of a newer one; read again")

    @asynccontextmanager
    async def _check_if_unknown(self) -> AsyncIterator[None]:
        """A topic that a broker does not know was deleted, or the broker is starting and has not learned of it yet."""
        try:
            yield
        except NoSuchTopic as error:
            await self._watch.check_now()
            raise BrokerUnavailable(str(error)) from error

    def _check_partition(self, partition: int) -> None:
        if not 0 <= partition < self.partitions:
            raise InvalidInput(
                f"partition {partition} of coordination log {self.name!r}: it has 0 to {self.partitions - 1}"
            )


@asynccontextmanager
async def open_kafka_log(
    link: KafkaLink,
    topic: str = DEFAULT_TOPIC,
    *,
    interval_s: float,
    partitions: int | None = None,
    retention_s: float | None = None,
    copies: int | None = None,
) -> AsyncIterator[KafkaLog]:
    """A coordination log for as long as the block lasts; its topic is created if it is missing.

    `UnsafeLog` if the topic exists with settings that could lose claims. `interval_s`: the heartbeat interval of all
    consumers on the log. `partitions`: 8 by default for a new topic; an existing one must have exactly as many.
    `retention_s`: how long records are kept, 7 days by default. `copies`: the replication factor, by default three or
    the number of brokers. The link's timeout is the deadline of every append, and of a read that receives nothing.

    >>> async with open_kafka("127.0.0.1:9092") as link, open_kafka_log(link, interval_s=10) as log:
    ...     world = World(interval_s=10, partitions=log.partitions)
    ...     await catch_up(log, world)
    """
    check_topic_name(topic)
    _check_positive(interval_s, "interval_s")
    for name, number in (("partitions", partitions), ("copies", copies)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise InvalidInput(f"{name} is {number!r}: give a whole number, at least 1")
    if retention_s is not None and _check_positive(retention_s, "retention_s") < LEAST_INTERVALS * interval_s:
        raise InvalidInput(
            f"retention_s is {retention_s:g}: keep records for at least {LEAST_INTERVALS} intervals of {interval_s:g} s"
        )
    found = await provide(
        link, topic, interval_s=interval_s, partitions=partitions, retention_s=retention_s, copies=copies
    )
    async with (
        open_producer(link) as producer,
        # Every record counts, also those of aborted transactions, so that all readers see the same.
        open_fetcher(link, settings={"isolation.level": "read_uncommitted"}) as fetcher,
    ):
        watch = TopicWatch(link, found, min(interval_s / 2, _LONGEST_BETWEEN_CHECKS_S))
        try:
            yield KafkaLog(link, found, producer, fetcher, watch, interval_s)
        finally:
            await watch.close()


def _check_positive(value: float, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InvalidInput(f"{name} is {value!r}: give seconds, more than 0")
    return value


def _offset(record: LogRecord) -> int:
    return record.offset
