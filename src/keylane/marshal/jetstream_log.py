"""The coordination log in a JetStream stream: one partition, one subject for each (group, topic, partition).

Owns: the stream, its settings and its subjects. The stream sequence is the offset and the fencing token; the server's
timestamp is the log's time. The payload is the same as on Kafka, so one reader can read both.

With a subject per key the server compares and sets: a claim whose writer has not read the newest record of its subject
is rejected in one round trip and leaves no record. Only the subject decides which record is the newest, so a record
that cannot be read does not hinder a writer that has read beyond it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from nats.js.api import DiscardPolicy, PersistMode, RetentionPolicy, StorageType, StoreCompression, StreamConfig

from keylane.core.claim_facts import LogRecord
from keylane.core.claim_records import Message, ReleaseGroup, encode, subject_for
from keylane.core.names import check_stream_name
from keylane.core.subjects import check_subject, is_subset
from keylane.errors import (
    ApiError,
    InvalidInput,
    LogReplaced,
    NotFound,
    PublishRejected,
    ReadIncomplete,
    RevisionConflict,
    UnsafeLog,
)
from keylane.jetstream import Publisher, check_seconds, open_publisher, read_batch, streams
from keylane.marshal.log import DEFAULT_INTERVAL_S, Bounds, Newest, Position

if TYPE_CHECKING:
    from keylane.jetstream import Connection

DEFAULT_NAME = "marshal"
DEFAULT_MAX_AGE_S = 7 * 24 * 3600.0
_SAFE_REPLICAS = 3
_BATCH = 10_000
_LAG_PAUSE_S = 0.02
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)

_INTERVAL = "keylane_marshal_interval_s"
"""In the stream's metadata."""

_WRONG_LAST = (10071, 10164)
_EXISTS_DIFFERENTLY = 10058
_SUBJECTS_OVERLAP = 10065
_TOO_FEW_SERVERS = (10005, 10074)
_ACTUAL_LAST = re.compile(r"wrong last sequence: (\d+)")


class JetStreamLog:
    """A coordination log in a stream. Made by `open_jetstream_log`."""

    partitions = 1
    first_offset = 1
    compares = True

    def __init__(
        self,
        connection: Connection,
        name: str,
        publisher: Publisher,
        created: datetime,
        *,
        interval_s: float,
        timeout_s: float,
    ) -> None:
        self._connection = connection
        self.name = name
        self.interval_s = interval_s
        self._publisher = publisher
        self._created = created
        self._timeout_s = timeout_s
        self._prefix = subjects_of(name).removesuffix(">")

    def __repr__(self) -> str:
        return f"<JetStreamLog {self.name}>"

    async def append(self, message: Message, partition: int = 0, *, expect: Newest | None = None) -> Position:
        """As in `CoordinationLog`. `OutcomeUnknown`: it may be in the log; read the log before you write again."""
        self._check_partition(partition)
        value = encode(message)
        subject = subject_of(self.name, message)
        if expect is None:
            return await self._store(subject, value, None)
        last = expect.offset or 0
        try:
            return await self._store(subject, value, last)
        except RevisionConflict as conflict:
            actual = _ACTUAL_LAST.search(str(conflict.__cause__))
            if actual is None or int(actual[1]) >= max(last, expect.read_to):
                raise
            # Nobody else wrote: the newest record of the subject was read and is not about the key, or the record that
            # was read has expired and nothing came after it.
            return await self._store(subject, value, int(actual[1]))

    async def bounds(self, partition: int = 0) -> Bounds:
        self._check_partition(partition)
        try:
            state = await streams.state(self._connection, self.name)
        except NotFound as gone:
            raise LogReplaced(f"coordination log {self.name!r} was deleted; stop all its consumers") from gone
        if state.created != self._created:
            raise LogReplaced(
                f"coordination log {self.name!r} was recreated at {state.created.isoformat()}: the claims in the old "
                "one are void; stop all its consumers and start them again"
            )
        return Bounds(max(state.first_sequence, self.first_offset), state.last_sequence + 1)

    async def read(self, partition: int = 0, offset: int = 1) -> AsyncIterator[LogRecord]:
        """As in `CoordinationLog`. In a cluster any replica may answer; a replica that lags is asked again."""
        first, end = await self.bounds(partition)
        self._check_not_gone(offset, first)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while offset < end:
            messages, _ = await read_batch(
                self._connection, self.name, sequence=offset, batch=min(_BATCH, end - offset), timeout_s=self._timeout_s
            )
            if messages:
                deadline = loop.time() + self._timeout_s
            elif loop.time() > deadline:
                raise ReadIncomplete(
                    f"coordination log {self.name!r}: record {offset} of {end - 1} did not come within "
                    f"{self._timeout_s} s: a replica lags; read again"
                )
            else:
                await asyncio.sleep(_LAG_PAUSE_S)
                self._check_not_gone(offset, (await self.bounds(partition)).first)
            for message in messages:
                self._check_not_gone(offset, message.sequence)
                time_ms = (message.timestamp - _EPOCH) // _MILLISECOND
                yield LogRecord(0, message.sequence, time_ms, message.data, self._subject(message.subject))
                offset = message.sequence + 1

    def _subject(self, subject: str) -> str:
        """The subject without the log's prefix. A stream created by hand may have others, which belong to no key."""
        return subject[len(self._prefix) :] if subject.startswith(self._prefix) else f".{subject}"

    async def kept_for_s(self) -> float | None:
        try:
            return (await streams.info(self._connection, self.name)).config.max_age or None
        except NotFound as gone:
            raise LogReplaced(f"coordination log {self.name!r} was deleted; stop all its consumers") from gone

    async def _store(self, subject: str, value: bytes, last: int | None) -> Position:
        headers = {"Nats-Expected-Stream": self.name}
        if last is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(last)
        pending = await self._publisher.send(subject, value, headers)
        await self._publisher.flush()
        try:
            return Position(0, (await pending).sequence)
        except PublishRejected as rejected:
            if last is None or rejected.err_code not in _WRONG_LAST:
                raise
            raise RevisionConflict(
                f"coordination log {self.name!r}: somebody wrote to {subject} after record {last}: read the log"
            ) from rejected

    def _check_not_gone(self, offset: int, first: int) -> None:
        """In a stream that denies deletes, records only expire, the oldest first."""
        if first > offset:
            raise ReadIncomplete(f"coordination log {self.name!r}: records {offset} to {first - 1} have expired")

    def _check_partition(self, partition: int) -> None:
        if partition != 0:
            raise InvalidInput(f"partition {partition} of coordination log {self.name!r}: a stream is one partition, 0")


@asynccontextmanager
async def open_jetstream_log(
    connection: Connection,
    name: str = DEFAULT_NAME,
    *,
    interval_s: float | None = None,
    max_age_s: float | None = None,
    replicas: int | None = None,
    timeout_s: float = 10.0,
) -> AsyncIterator[JetStreamLog]:
    """A coordination log for as long as the block lasts; its stream is created if it is missing.

    `UnsafeLog` if the stream exists with settings that could lose claims. `interval_s`: the heartbeat interval of all
    consumers on the log, which the stream keeps in its metadata. By default it is that of the stream, or 10 for a new
    one; a different one is refused. `max_age_s`: how long records are kept, 7 days by default. `replicas`: by default
    three, or one if there are fewer than three servers. `timeout_s`: the deadline of every append, and of a read that
    receives nothing.

    >>> async with open_jetstream_log(connection, interval_s=10) as log:
    ...     world = World(interval_s=10, first_offset=log.first_offset)
    ...     await catch_up(log, world)
    """
    check_stream_name(name)
    if interval_s is not None:
        check_seconds(interval_s, "interval_s")
    check_seconds(timeout_s, "timeout_s")
    if max_age_s is not None:
        check_seconds(max_age_s, "max_age_s")
    try:
        config = (await streams.info(connection, name)).config
    except NotFound:
        _check_age(max_age_s, interval_s or DEFAULT_INTERVAL_S)
        config = await _create(
            connection, name, interval_s or DEFAULT_INTERVAL_S, max_age_s or DEFAULT_MAX_AGE_S, replicas
        )
    interval_s = _interval_of(config, name, interval_s)
    _check_age(max_age_s, interval_s)
    if problem := _problem(config, name, interval_s):
        raise UnsafeLog(f"stream {name!r} cannot be a coordination log: {problem}")
    created = (await streams.state(connection, name)).created
    async with open_publisher(connection, timeout_s=timeout_s) as publisher:
        yield JetStreamLog(connection, name, publisher, created, interval_s=interval_s, timeout_s=timeout_s)


def _check_age(max_age_s: float | None, interval_s: float) -> None:
    if max_age_s is not None and max_age_s < 2 * interval_s:
        raise InvalidInput(f"max_age_s is {max_age_s}: keep records for at least two intervals of {interval_s} s")


def _interval_of(config: StreamConfig, name: str, given_s: float | None) -> float:
    """The interval in the stream's metadata; if there is none, the given one."""
    said = (config.metadata or {}).get(_INTERVAL)
    if said is None:
        return DEFAULT_INTERVAL_S if given_s is None else given_s
    try:
        known_s = check_seconds(float(said), _INTERVAL)
    except (ValueError, InvalidInput):
        raise UnsafeLog(f"stream {name!r} says in its metadata that {_INTERVAL} is {said!r}: correct it") from None
    if given_s not in (None, known_s):
        raise UnsafeLog(
            f"interval_s is {given_s:g}, and the heartbeat interval of coordination log {name!r} is {known_s:g} s: "
            "everybody on a log has the same; leave it out. To change it, stop all consumers, and then change "
            f"{_INTERVAL} in the metadata of the stream"
        )
    return known_s


def subject_of(name: str, message: Message) -> str:
    """The subject of a message: all messages about one key have the same.

    >>> from keylane.core.claim_records import ClaimingPartition
    >>> subject_of("marshal", ClaimingPartition("i", "c", "billing.eu", "orders", 3, 0))
    'keylane.marshal.marshal.claims.billing=2Eeu.orders.3'
    """
    topic, partition = ("", 0) if isinstance(message, ReleaseGroup) else (message.topic, message.partition)
    own = subject_for(type(message).__name__, message.group, topic, partition)
    return check_subject(subjects_of(name).removesuffix(">") + own)


def subjects_of(name: str) -> str:
    """All subjects of a log."""
    return f"keylane.marshal.{name}.>"


async def _create(
    connection: Connection, name: str, interval_s: float, max_age_s: float, replicas: int | None
) -> StreamConfig:
    config = StreamConfig(
        name=name,
        description="keylane: who owns which partition",
        subjects=[subjects_of(name)],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        num_replicas=_SAFE_REPLICAS if replicas is None else replicas,
        max_age=max_age_s,
        duplicate_window=min(120.0, max_age_s),
        compression=StoreCompression.S2,
        deny_delete=True,
        deny_purge=True,
        allow_direct=True,
        metadata={_INTERVAL: repr(float(interval_s))},
    )
    try:
        return (await streams.create(connection, config)).config
    except ApiError as error:
        if error.err_code in _TOO_FEW_SERVERS and replicas is None:
            return await _create(connection, name, interval_s, max_age_s, 1)
        if error.err_code == _SUBJECTS_OVERLAP:
            raise UnsafeLog(
                f"another stream has subjects of {subjects_of(name)}: coordination log {name!r} cannot be kept beside "
                f"it; take these subjects out of the other stream ({error})"
            ) from error
        if error.err_code != _EXISTS_DIFFERENTLY:
            raise
    # Another consumer created it at the same moment.
    return (await streams.info(connection, name)).config


def _problem(config: StreamConfig, name: str, interval_s: float) -> str:
    """Why a stream would lose or reorder claims; empty if it would not."""
    if not any(is_subset(subjects_of(name), subject) for subject in config.subjects or ()):
        return f"its subjects are {config.subjects}, without {subjects_of(name)}; add it, or choose another name"
    max_age_s = config.max_age or 0
    wrong = {
        f"max_msgs_per_subject is {config.max_msgs_per_subject}, which drops the first claim": (
            config.max_msgs_per_subject > 0
        ),
        f"max_msgs is {config.max_msgs}, which drops claims that hold": (config.max_msgs or 0) > 0,
        f"max_bytes is {config.max_bytes}, which drops claims that hold": (config.max_bytes or 0) > 0,
        f"max_age is {max_age_s} s, less than two intervals of {interval_s} s": 0 < max_age_s < 2 * interval_s,
        f"retention is {config.retention}, not limits": config.retention != RetentionPolicy.LIMITS,
        "storage is memory: after a restart nobody would own anything": config.storage == StorageType.MEMORY,
        "persist_mode is async: an answer does not mean that it is stored": config.persist_mode == PersistMode.ASYNC,
        "deny_delete is off, so claims can be deleted": not config.deny_delete,
        "deny_purge is off, so claims can be purged": not config.deny_purge,
        "allow_rollup_hdrs is on, so a record can drop others": config.allow_rollup_hdrs,
        "allow_msg_ttl is on, so single records can vanish": bool(config.allow_msg_ttl),
        "allow_direct is off": not config.allow_direct,
        "no_ack is on": config.no_ack,
        "it is sealed": config.sealed,
        "it is a mirror": config.mirror is not None,
        "it has sources": bool(config.sources),
        "it has a subject transform": config.subject_transform is not None,
    }
    found = [text for text, is_so in wrong.items() if is_so]
    return f"{'; '.join(found)}; change it, or choose another name to have it made" if found else ""
