"""The coordination log in a Kafka topic: the broker's offsets are its order, the broker's clock is its time.

Owns: what a log promises, on Kafka. An append is confirmed by all in-sync copies. A read asks the leader for the end
first and gives everything before it, or an error. Kafka cannot compare and set: a claim is written, read back and
judged by its place, so losers leave a record too.

The topic is looked at again and again: one that was deleted, made anew or given more partitions ends its users.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka import Message as KafkaMessage

from keylane.core.claim_facts import LogRecord
from keylane.core.claim_records import Message, encode
from keylane.errors import BrokerUnavailable, InvalidInput, LogReplaced, NoSuchTopic, ReadIncomplete, UnsafeLog
from keylane.kafka.client import KafkaLink
from keylane.kafka.ends import Ends
from keylane.kafka.fetching import Fetcher, open_fetcher
from keylane.kafka.producing import Writer, open_writer
from keylane.kafka.tail import Tail
from keylane.kafka.topic import (
    DEFAULT_TOPIC,
    LEAST_INTERVALS,
    LogTopic,
    check_topic_name,
    provide,
    retention_of,
    settings,
)
from keylane.kafka.watch import TopicWatch
from keylane.marshal import Bounds, Newest, Position

_LONGEST_BETWEEN_LOOKS_S = 2.0
_BELIEVED_CUT_OFF_S = 60.0
"""How long a leader may not know of a record that was confirmed: one that was replaced learns of it in less."""


class KafkaLog:
    """A coordination log in a topic. Made by `open_kafka_log`."""

    first_offset = 0
    compares = False

    def __init__(  # noqa: PLR0917 - made in one place
        self, link: KafkaLink, topic: LogTopic, writer: Writer, fetcher: Fetcher, watch: TopicWatch, interval_s: float
    ) -> None:
        self.name = topic.name
        self.interval_s = interval_s
        self.partitions = topic.partitions
        self._link = link
        self._watch = watch
        self._writer = writer
        self._fetcher = fetcher
        self._ends = Ends(link, topic.name)
        self._appended_to = [0] * topic.partitions
        self._behind_since: dict[int, float] = {}
        self._tails = [self._tail(number) for number in range(topic.partitions)]

    def __repr__(self) -> str:
        return f"<KafkaLog {self.name} of {self.partitions} partitions>"

    async def append(self, message: Message, partition: int, *, expect: Newest | None = None) -> Position:
        """As the port says; `expect` is ignored. `OutcomeUnknown`: it may be in the log, or come to be."""
        self._check_partition(partition)
        value = encode(message)
        self._watch.check()
        async with self._a_look_if_unknown():
            stored = await self._writer.append(self.name, partition, value)
        self._appended_to[partition] = max(self._appended_to[partition], stored.offset + 1)
        return Position(*stored)

    async def bounds(self, partition: int) -> Bounds:
        self._check_partition(partition)
        self._watch.check()
        async with self._a_look_if_unknown():
            first = await self._ends.ask("begins", partition)
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

    def _tail(self, partition: int) -> Tail:
        return Tail(
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
                    "wait until such records are gone"
                )
            records.append(LogRecord(partition, offset, time_ms, message.value() or b""))
        return records

    async def _end(self, partition: int) -> int:
        own = self._appended_to[partition]
        async with self._a_look_if_unknown():
            end = await self._ends.ask("ends", partition)
        if end >= own:
            self._behind_since.pop(partition, None)
            return end
        await self._watch.look()
        said = f"partition {partition} of coordination log {self.name!r} ends at {end}, before record {own - 1}"
        now = asyncio.get_running_loop().time()
        if now - self._behind_since.setdefault(partition, now) > _BELIEVED_CUT_OFF_S:
            raise LogReplaced(f"{said}, which was confirmed: it was cut off; stop all its consumers")
        raise ReadIncomplete(f"{said}, which was confirmed: its leader does not know yet that it is none; read again")

    @asynccontextmanager
    async def _a_look_if_unknown(self) -> AsyncIterator[None]:
        """A topic that is not known is deleted, or on its way to a broker that starts."""
        try:
            yield
        except NoSuchTopic as error:
            await self._watch.look()
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
    """A coordination log for as long as the block lasts; its topic is made if it is missing.

    A topic that is there with settings that break the rules is refused with `UnsafeLog`. `interval_s`: the heartbeat
    interval of everybody on the log. `partitions`: 8 if not given and the topic is made; one that is there must have as
    many. `retention_s`: how long records are kept, 7 days if not given. `copies`: three if not given, or as many as
    there are brokers. The link's deadline is that of every append, and of a read that hears nothing.

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
        open_writer(link) as writer,
        # Every record counts, also one of a transaction that was given up: so all readers see the same.
        open_fetcher(link, settings={"isolation.level": "read_uncommitted"}) as fetcher,
    ):
        watch = TopicWatch(link, found, min(interval_s / 2, _LONGEST_BETWEEN_LOOKS_S))
        try:
            yield KafkaLog(link, found, writer, fetcher, watch, interval_s)
        finally:
            await watch.close()


def _check_positive(value: float, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InvalidInput(f"{name} is {value!r}: give seconds, more than 0")
    return value
