"""Kafka topics as a Marshal source: partitions and offsets are Kafka's own.

Owns: the readers, and the offsets committed under the group's name, from which other tools compute the lag. Nothing
here joins a Kafka group: the coordination log alone decides who may read a partition.

A reader skips offsets that have expired, to the earliest that exists, never to the latest. An offset beyond the end
means that the topic was recreated or truncated, and raises `TopicReplaced`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias, cast, get_args

from confluent_kafka import IsolationLevel, KafkaError, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]  # it is documented there

from keylane.errors import BrokerUnavailable, InvalidInput, KafkaRefused, NoSuchTopic, ReadIncomplete, TopicReplaced
from keylane.kafka.client import KafkaLink, translate
from keylane.kafka.offset_commits import CommittedOffsets
from keylane.kafka.partition_fetcher import FetchedPartition, PartitionFetcher, open_fetcher
from keylane.kafka.topic import checked_offset
from keylane.marshal import Extent, Reader, SourceRecord

_log = logging.getLogger("keylane.kafka")

Isolation: TypeAlias = Literal["read_committed", "read_uncommitted"]

_ASK_AGAIN_S = 0.1
_MOST_MESSAGES = 2000
_MOST_BYTES = 4 << 20
_LEVELS = {"read_committed": IsolationLevel.READ_COMMITTED, "read_uncommitted": IsolationLevel.READ_UNCOMMITTED}
_EARLIEST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_IN_USE = (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.NON_EMPTY_GROUP, KafkaError.ILLEGAL_GENERATION)


class KafkaSource:
    """The topics of one cluster. Made by `open_kafka_source`, for one consumer."""

    def __init__(self, link: KafkaLink, fetcher: PartitionFetcher, isolation: Isolation, *, commits: bool) -> None:
        self._link = link
        self._fetcher = fetcher
        self._isolation = _LEVELS[isolation]
        self._commits = commits
        self._committed: dict[str, CommittedOffsets] = {}
        self._read: set[tuple[str, int]] = set()

    def __repr__(self) -> str:
        return f"<KafkaSource {self._link.address.bootstrap}>"

    async def partitions(self, topic: str) -> int:
        """`NoSuchTopic` if there is none; `PermissionDenied` if this user may not see it."""
        return await self._waiting_for_leaders(lambda: self._count(topic))

    async def _count(self, topic: str) -> int:
        doing = f"looking for topic {topic!r}"
        found = await self._link.call(
            lambda: self._link.admin.list_topics(topic, timeout=self._link.timeout_s).topics.get(topic), doing=doing
        )
        if found is not None and found.error is not None:
            raise translate(found.error, doing)
        if found is None or not found.partitions:
            raise NoSuchTopic(f"{doing}: there is none at {self._link.address.bootstrap}")
        return len(found.partitions)

    async def extent(self, topic: str, partition: int) -> Extent:
        earliest, end = await asyncio.gather(
            self._waiting_for_leaders(lambda: self._offset_of(topic, partition, _EARLIEST)),
            self._waiting_for_leaders(lambda: self._offset_of(topic, partition, _LATEST)),
        )
        return Extent(earliest, max(earliest, end))

    async def backlog(self, topic: str, partition: int, offset: int) -> int:
        """Counted in offsets, including transaction markers and messages that compaction has removed."""
        earliest, end = await self.extent(topic, partition)
        return max(end - max(offset, earliest), 0)

    async def committed(self, group: str, topic: str, partition: int) -> int | None:
        return await self._offsets_of(group).get(topic, partition) if self._commits else None

    async def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        """If consumers have joined the group in Kafka itself, nothing is committed, and a warning is logged."""
        if not self._commits:
            return
        try:
            await self._offsets_of(group).put(topic, partition, offset)
        except KafkaRefused as refused:
            if refused.code not in _IN_USE:
                raise
            _log.warning(
                "%s: consumers have joined this group in Kafka itself; name the groups differently, or open the source "
                "with commits=False",
                refused,
            )

    @asynccontextmanager
    async def reader(self, topic: str, partition: int, offset: int) -> AsyncIterator[Reader]:
        place = (topic, partition)
        if place in self._read:
            raise ReadIncomplete(f"{topic}/{partition} is still read here by another reader: wait until it has ended")
        self._read.add(place)
        reading = _KafkaReader(self, self._fetcher, place, offset)
        try:
            yield reading
        finally:
            self._read.discard(place)
            await reading.close()

    async def close(self) -> None:
        """Close the consumers that commit offsets. The link stays open."""
        await asyncio.gather(*(one.close() for one in self._committed.values()))

    def _offsets_of(self, group: str) -> CommittedOffsets:
        if group not in self._committed:
            self._committed[group] = CommittedOffsets(self._link, group)
        return self._committed[group]

    async def _waiting_for_leaders(self, ask: Callable[[], Awaitable[int]]) -> int:
        """Retry while a partition has no leader: a new topic, or one whose leader died, gets one soon."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._link.timeout_s
        while True:
            try:
                return await ask()
            except BrokerUnavailable:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _offset_of(self, topic: str, partition: int, spec: OffsetSpec) -> int:
        place = TopicPartition(topic, partition)
        asked = self._link.admin.list_offsets(
            {place: spec}, isolation_level=self._isolation, request_timeout=self._link.timeout_s
        )
        doing = f"asking what {topic}/{partition} holds"
        try:
            return checked_offset(await self._link.answer(asked[place], doing=doing), doing)
        except KafkaRefused as refused:
            if refused.code != KafkaError._NOENT:
                raise
            if partition >= await self._count(topic):  # else it has no leader at the moment
                raise InvalidInput(f"{doing}: the topic has no such partition") from refused
            raise BrokerUnavailable(str(refused)) from refused


class _KafkaReader:
    """One partition from an offset on."""

    def __init__(self, source: KafkaSource, fetcher: PartitionFetcher, place: tuple[str, int], offset: int) -> None:
        self._source = source
        self._fetcher = fetcher
        self._place = place
        self._offset = offset
        self._fetched: FetchedPartition | None = None

    async def next(self, most: int, wait_s: float) -> list[SourceRecord]:
        if self._fetched is None:
            self._fetched = await self._fetcher.follow(*self._place, self._offset)
        try:
            found = [_record(one) for one in await self._fetched.take(most, within_s=wait_s)]
        except ReadIncomplete as error:
            await self.close()
            await self._skip_expired(error)
            return []
        if found:
            self._offset = found[-1].offset + 1
        return found

    async def close(self) -> None:
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            await fetched.stop()

    async def _skip_expired(self, error: ReadIncomplete) -> None:
        """The next offset cannot be read: continue at the earliest one, if that is the reason."""
        topic, partition = self._place
        earliest, end = await self._source.extent(topic, partition)
        if self._offset > end:
            raise TopicReplaced(
                f"{topic}/{partition} ends at {end} and was read to {self._offset}: the topic was recreated, or "
                "lost messages; stop all consumers of the group, and restore the topic or use a new group"
            ) from error
        if self._offset >= earliest:
            raise error
        _log.warning("%s/%d: offsets %d to %d have expired", topic, partition, self._offset, earliest - 1)
        self._offset = earliest


@asynccontextmanager
async def open_kafka_source(
    link: KafkaLink, *, isolation: Isolation = "read_committed", commits: bool = True
) -> AsyncIterator[KafkaSource]:
    """The topics of a cluster as a source, for as long as the block lasts; for one consumer.

    `isolation`: `read_committed` omits messages of uncommitted transactions. `commits`: whether offsets are committed
    under the group's name, so that other tools see the lag; this needs the permission to read that group.

    >>> async with open_kafka("127.0.0.1:9092") as link, open_kafka_source(link) as source:
    ...     await source.partitions("orders")
    """
    if isolation not in _LEVELS:
        raise InvalidInput(f"isolation is {isolation!r}: use one of {', '.join(get_args(Isolation))}")
    async with open_fetcher(
        link,
        settings={"isolation.level": isolation, "queued.min.messages": _MOST_MESSAGES},
        most_messages=_MOST_MESSAGES,
        most_bytes=_MOST_BYTES,
    ) as fetcher:
        source = KafkaSource(link, fetcher, isolation, commits=commits)
        try:
            yield source
        finally:
            await source.close()


def _record(message: Message) -> SourceRecord:
    offset, value = message.offset(), message.value()
    assert offset is not None, message
    _, timestamp_ms = message.timestamp()
    headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    return SourceRecord(
        offset,
        message.key(),
        value or b"",
        max(timestamp_ms, 0),
        tuple((name, content or b"") for name, content in headers),
        is_tombstone=value is None,
    )
