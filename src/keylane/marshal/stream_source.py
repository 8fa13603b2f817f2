"""A partitioned JetStream stream as a source: the topic is the stream, the partition the first token of the subject.

Owns: the readers. An offset is the next sequence to read; it has gaps where messages of other partitions are. Each
reader has its own small consumer, in memory and without acks. The consumer's delivery sequence shows that no message is
missing; after a gap, a lost connection or a deleted consumer, a new consumer continues at the offset that was reached.

Offsets can be committed to a KV bucket. Without one they are not stored; heartbeats carry them anyway.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from keylane.core.partitions import Partitioning, parse_transform
from keylane.errors import (
    ConsumerGone,
    InvalidInput,
    KeylaneError,
    NoSuchTopic,
    NotFound,
    ReadIncomplete,
    RevisionConflict,
)
from keylane.groups import Placing, placing_by
from keylane.jetstream import (
    Bucket,
    ConnectionHooks,
    ConsumerConfig,
    Feed,
    FeedOptions,
    consumers,
    existing_stream,
    open_feed,
    read_batch,
    streams,
)
from keylane.marshal.log_view import own_clock
from keylane.marshal.source import Extent, Reader, SourceRecord

if TYPE_CHECKING:
    from keylane.jetstream import Connection, Message

_log = logging.getLogger("keylane.marshal")

_HELD = 1000
_IDLE_S = 60.0
_CHECK_EVERY_S = 5.0
_NANOSECONDS_IN_MS = 1_000_000
_NOT_IN_KEYS = re.compile(rb"[^-_A-Za-z0-9]")


class StreamSource:
    """The partitioned streams of one connection.

    `commits`: the name of a KV bucket for committed offsets; it is created if it is missing.

    >>> source = StreamSource(connection)
    >>> consumer = Consumer(log, source, "billing", "worker-1", ["ORDERS"], handler)
    """

    def __init__(self, connection: Connection, *, commits: str | None = None) -> None:
        self._connection = connection
        self._placings: dict[str, Placing] = {}
        self._direct: dict[str, bool] = {}
        self._bucket = None if commits is None else Bucket(connection, commits)
        self._revisions: dict[str, int] = {}
        self._bucket_is_there = False

    def __repr__(self) -> str:
        return f"<StreamSource {self._connection.server}>"

    async def partitions(self, topic: str) -> int:
        try:
            config = (await existing_stream(self._connection, topic)).config
        except NotFound as error:
            raise NoSuchTopic(str(error)) from error
        transform = config.subject_transform
        found: Partitioning | None = None
        if transform is not None:
            found = parse_transform(transform.src or ">", transform.dest)
        if found is None:
            raise InvalidInput(
                f"stream {topic!r} is not partitioned: it needs a subject transform that puts a partition number in "
                "front, such as {{Partition(10,1)}}.orders.{{Wildcard(1)}}"
            )
        self._placings[topic] = placing_by([found], whole_subject=not found.wildcards)
        self._direct[topic] = bool(config.allow_direct)
        return found.partitions

    async def extent(self, topic: str, partition: int) -> Extent:
        state = await streams.state(self._connection, topic)
        return Extent(max(state.first_sequence, 1), state.last_sequence + 1)

    async def backlog(self, topic: str, partition: int, offset: int) -> int:
        if topic not in self._direct:
            await self.partitions(topic)
        sequence, only = max(offset, 1), f"{partition}.>"
        if self._direct[topic]:
            found, more = await read_batch(self._connection, topic, sequence=sequence, batch=1, subject_filter=only)
            return len(found) + more
        # Without allow_direct, a new consumer at this sequence has the count in its num_pending.
        counter = await consumers.create(self._connection, topic, _reader_of(only, sequence))
        await consumers.delete(self._connection, topic, counter.name)
        return counter.num_pending

    async def committed(self, group: str, topic: str, partition: int) -> int | None:
        if self._bucket is None:
            return None
        key = _commit_key(group, topic, partition)
        entry = await self._bucket.get(key)
        if entry is None:
            return None
        self._revisions[key] = entry.revision
        return int(entry.value) if entry.value is not None and entry.value.isdigit() else None

    async def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        """If another owner has committed since this one last read the offset, the commit is left to the next call."""
        if self._bucket is None:
            return
        if not self._bucket_is_there:
            replicas = (await streams.info(self._connection, topic)).config.num_replicas or 1
            await self._bucket.ensure(replicas=replicas)
            self._bucket_is_there = True
        key = _commit_key(group, topic, partition)
        if key not in self._revisions:
            entry = await self._bucket.get(key)
            self._revisions[key] = 0 if entry is None else entry.revision
        revision = self._revisions.pop(key)
        try:
            self._revisions[key] = await self._bucket.put(key, b"%d" % offset, revision=revision)
        except RevisionConflict as conflict:
            _log.info("offset %d of %s/%d is not committed: %s", offset, topic, partition, conflict)

    @asynccontextmanager
    async def reader(self, topic: str, partition: int, offset: int) -> AsyncIterator[Reader]:
        if topic not in self._placings:
            await self.partitions(topic)
        reading = _StreamReader(self._connection, topic, partition, offset, self._placings[topic])
        unobserve = self._connection.observe(ConnectionHooks(on_disconnect=reading.link_lost))
        try:
            yield reading
        finally:
            unobserve()
            await reading.close()


class _StreamReader:
    """Reads one partition from a sequence on."""

    def __init__(self, connection: Connection, stream: str, partition: int, offset: int, place: Placing) -> None:
        self._connection = connection
        self._stream = stream
        self._filter = f"{partition}.>"
        self._offset = offset
        self._place = place
        self._feed: Feed | None = None
        self._delivered = 0
        self._in_doubt = False
        self._heard_at = own_clock()

    def link_lost(self, _: str) -> None:
        """Messages in flight are lost: without acks they are not redelivered."""
        self._in_doubt = True

    async def next(self, most: int, wait_s: float) -> list[SourceRecord]:
        if self._in_doubt:
            await self.close()
        if self._feed is None:
            self._feed = await self._open()
        feed = self._feed
        records: list[SourceRecord] = []
        try:
            message = await feed.next(wait_s)
            while message is not None:
                records.append(self._record(message))
                message = await feed.next(0) if len(records) < most else None
        except (ConsumerGone, _Gap) as error:
            _log.info("%s %s: reading again from %d: %s", self._stream, self._filter, self._offset, error)
            self._in_doubt = True
        except KeylaneError:
            self._in_doubt = True
            if not records:
                raise
        if records:
            self._offset = records[-1].offset + 1
            self._heard_at = own_clock()
        elif own_clock() > self._heard_at + _CHECK_EVERY_S:
            await self._check()
        return records

    async def close(self) -> None:
        feed, self._feed = self._feed, None
        if feed is None:
            return
        await feed.drain(0)
        try:
            await consumers.delete(self._connection, self._stream, feed.consumer)
        except KeylaneError as error:
            _log.debug("consumer %s is left to the server: %s", feed.consumer, error)

    async def _open(self) -> Feed:
        config = _reader_of(self._filter, max(self._offset, 1))
        self._in_doubt, self._delivered, self._heard_at = False, 0, own_clock()
        created = await consumers.create(self._connection, self._stream, config)
        return await open_feed(self._connection, self._stream, created.name, FeedOptions(max_messages=_HELD))

    def _record(self, message: Message) -> SourceRecord:
        delivery = message.delivery
        if delivery.consumer_sequence != self._delivered + 1:
            raise _Gap(f"delivery {delivery.consumer_sequence} came after {self._delivered}")
        self._delivered += 1
        place = self._place(message.raw_subject)
        headers = tuple((name, value.encode()) for name, value in message.header_items)
        return SourceRecord(
            delivery.sequence,
            place.key.encode("utf-8", "surrogateescape"),
            message.data,
            delivery.timestamp_ns // _NANOSECONDS_IN_MS,
            headers,
            place.subject,
        )

    async def _check(self) -> None:
        """Nothing came for a while: check whether the server has sent messages that did not arrive."""
        assert self._feed is not None
        self._heard_at = own_clock()
        try:
            info = await consumers.info(self._connection, self._stream, self._feed.consumer)
        except NotFound:
            self._in_doubt = True
        else:
            self._in_doubt |= info.delivered_sequence >= self._offset


def _reader_of(subject_filter: str, sequence: int) -> ConsumerConfig:
    return ConsumerConfig(
        deliver_policy="by_start_sequence",
        opt_start_seq=sequence,
        ack_policy="none",
        filter_subject=subject_filter,
        inactive_threshold_s=_IDLE_S,
        mem_storage=True,
        num_replicas=1,
    )


class _Gap(ReadIncomplete):
    """A delivery is missing."""


def _commit_key(group: str, topic: str, partition: int) -> str:
    def token(text: str) -> str:
        return _NOT_IN_KEYS.sub(lambda found: b"=%02X" % found[0][0], text.encode()).decode()

    return f"{token(group)}.{token(topic)}.{partition}"
