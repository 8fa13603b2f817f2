"""Dead letters: messages that a group gave up, kept with the reason until somebody replays or drops them.

Owns the stream that they are in, their headers, and the ways in and out. Never settles the original: whoever calls
`put` terminates it, and only after `put` has returned.

The dead letters of a stream are in one other stream, `<stream>@dlq`, so that an operator has one place to look and one
limit to set; the subject `keylane.dlq.<stream>.<group>.<partition>` tells groups and partitions apart. The name cannot
be that of a group's queue, `<stream>-<group>`, of any stream: no group name holds an `@`, and here one always comes
after the last `-`. A full dead-letter stream refuses (discard new) and never drops an older letter.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from keylane.core.names import check_group_name, check_stream_name
from keylane.core.subjects import MAX_SUBJECT_BYTES, shown
from keylane.dispatch import error_line, traceback_text
from keylane.errors import (
    ApiError,
    ApiUnavailable,
    GroupError,
    InvalidInput,
    KeylaneError,
    NotFound,
    NotStored,
    PublishRejected,
    RequestTimeout,
)
from keylane.jetstream import (
    PublishAck,
    StoredMessage,
    check_seconds,
    parse_headers,
    parse_time,
    publish_raw,
    read_batch,
    streams,
)
from keylane.processing.message import GroupMessage
from keylane.processing.side_streams import ensure_side_stream
from keylane.retrying import Backoff

if TYPE_CHECKING:
    from keylane.jetstream import Connection

_log = logging.getLogger("keylane.groups")

# ---- headers: ours, which say what happened, and those of the original -----------------------------------
#
# On bytes. A message that cannot be stored blocks its key, so nothing that a publisher wrote into a header (odd bytes,
# repeated names, names that the server obeys) may make this fail or pass for a header of ours. Names that begin with
# `Nats-` or `Keylane-` are the server's and ours; the original's own ones of that kind are kept behind
# `Keylane-Original-`.

ORIGINAL = "Keylane-Original-"
MAX_HEADER_BYTES = 65_000
"""A server stores no more than 65,535 bytes of headers."""
TRACEBACK_BYTES = 8000

_PLAIN = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""Stands in a header as it is, with letters and digits. Everything else is percent-escaped."""
_ADDED_BY_SERVER = (b"nats-stream-source", b"nats-pin-id")
_LINE_BREAK = re.compile(rb"\r\n|\r|\n")
_LONE_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # the others stand for bytes that are not UTF-8


def kept_lines(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The headers of a delivered message as a dead letter keeps them, without what the server added on the way."""
    for name, value in header_lines(raw):
        if name.lower() not in _ADDED_BY_SERVER:
            yield ORIGINAL.encode() + name if is_reserved(name) else name, value


def replayed_lines(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The original's headers from those of its dead letter, without those that the server would obey again."""
    for name, value in original_lines(raw):
        if not name.lower().startswith(b"nats-"):
            yield name, value


def original_lines(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The original's headers from those of its dead letter."""
    for name, value in header_lines(raw):
        if not is_reserved(name):
            yield name, value
        elif name.startswith(ORIGINAL.encode()):
            yield name.removeprefix(ORIGINAL.encode()), value


def is_reserved(name: bytes) -> bool:
    return name.lower().startswith((b"nats-", b"keylane-"))


def header_lines(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Names and values as bytes. A lone CR or LF also ends a line, as it does for some clients."""
    for line in _LINE_BREAK.split(raw)[1:]:
        name, colon, value = line.partition(b":")
        if colon and name.strip():
            yield name.strip(), value.strip()


def header_block(lines: Iterable[tuple[bytes, bytes]]) -> bytes:
    block = list(lines)
    assert not any(_LINE_BREAK.search(part) for line in block for part in line)
    return b"NATS/1.0\r\n" + b"".join(b"%b: %b\r\n" % line for line in block) + b"\r\n"


def letter_head(
    values: Mapping[str, object],
    error: BaseException,
    message_id: str,
    target: str,
    original: bytes,
    *,
    traceback: str | None = None,
    conditions: Mapping[str, str] | None = None,
) -> bytes:
    """The header block of a dead letter: its values, what happened, and the original's headers."""
    ours = {f"Keylane-{name}": escaped(value) for name, value in values.items()}
    ours["Keylane-Error"] = error_line(error)
    ours["Keylane-Time"] = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if traceback is not None:
        ours["Keylane-Traceback"] = traceback_value(traceback)
    ours |= {"Nats-Msg-Id": message_id, "Nats-Expected-Stream": target, **(conditions or {})}
    lines = [(name.encode(), value.encode()) for name, value in ours.items()]
    return header_block([*lines, *kept_lines(original)])


def escaped(value: object) -> str:
    return _escaped(str(value), safe=_PLAIN)


def _escaped(value: str, safe: str) -> str:
    text = _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    return quote(text, safe=safe, errors="surrogateescape")


def traceback_value(text: str) -> str:
    """A traceback, escaped but readable. Only the end of a long one is kept."""
    while len(value := _escaped(text, safe=f"{_PLAIN} ")) > TRACEBACK_BYTES:
        text = f"…{text[1 + len(text) // 4 :]}"
    return value


def unescaped(text: str) -> str:
    return unquote(text, errors="surrogateescape")


def number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0


_LOOK_AGAIN_S = 0.05
_ENSURE_S = 2.0
_TRY_S = 5.0
_PAGE = 64
_NOT_IN_SUBJECT = re.compile(rb"[\x00-\x20\x7f]")

_OTHER_STREAM = 10060


def dead_letter_stream(stream: str) -> str:
    """The name of the stream that has the dead letters of a stream."""
    return check_stream_name(f"{check_stream_name(stream)}@dlq")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that a group gave up. Texts are empty and numbers 0 where somebody else wrote into the stream."""

    sequence: int
    """Its own, in the dead-letter stream."""
    time: datetime
    stream: str
    source_sequence: int
    """Where the original was in its stream."""
    subject: str
    """What the original was published on."""
    group: str
    partition: int
    key: str
    member: str
    tries: int
    error: str
    headers: dict[str, str]
    """The publisher's own; of a repeated name the first."""
    data: bytes
    traceback: str = ""
    """Where the last try failed; of a long one the end."""
    is_parked: bool = False
    """Whether it waits until its key is released, and later messages of its key behind it."""
    stored_ns: int = 0
    """When the original was stored."""


# ---- in -----------------------------------------------------------------------------------------------


class DeadLetters:
    """Stores the messages that members of one group give up.

    >>> letters = DeadLetters(connection, "ORDERS", "billing")
    >>> await letters.put(message, member="alice", tries=5, error=error)
    >>> message.term("dead letter")  # only now
    """

    def __init__(self, connection: Connection, stream: str, group: str, *, timeout_s: float = 10.0) -> None:
        self._name = dead_letter_stream(stream)
        self._stream = stream
        self._group = check_group_name(group)
        self._connection = connection
        self._timeout_s = check_seconds(timeout_s, "timeout_s")
        self._is_ready = False

    def __repr__(self) -> str:
        return f"<DeadLetters of group {self._group!r} in stream {self._name!r}>"

    async def give_up(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        """Store a message that had all its tries, in the name of the member that has it."""
        await self.put(message, member=message.origin.member, tries=tries, error=error)

    async def put(self, message: GroupMessage, *, member: str, tries: int, error: BaseException) -> None:
        """Store the message. Returns when the server has confirmed it; else raises, and may be called again.

        A repeat within an hour stores nothing new. `InvalidInput`: the message leaves no room for our headers below
        the server's max_payload, so a repeat cannot help. `PublishRejected`: the stream is full.
        """
        await self.store(
            message,
            f"keylane.dlq.{self._stream}.{self._group}.{message.partition}",
            member=member,
            tries=tries,
            error=error,
        )

    async def store(
        self,
        message: GroupMessage,
        subject: str,
        *,
        member: str,
        tries: int,
        error: BaseException,
        conditions: Mapping[str, str] | None = None,
    ) -> None:
        """As `put`, on this subject of the dead-letter stream. `conditions`: headers that the server obeys."""
        head = self._head(message, member, tries, error, conditions)
        if len(head) > MAX_HEADER_BYTES or len(head) + len(message.data) > self._connection.nats.max_payload:
            head = self._head(message, member, tries, error, conditions, with_traceback=False)
        end = time.monotonic() + self._timeout_s
        while True:
            try:
                if not self._is_ready:
                    await self._ensure_soon(message)
                await publish_raw(self._connection, subject.encode(), head, message.data, self._timeout_s)
            except (NotStored, ApiUnavailable, RequestTimeout):
                # Deleted since, or just made: a cluster elects its leader, and its other servers hear of it later.
                self._is_ready = False
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(_LOOK_AGAIN_S)
            else:
                return

    def _head(
        self,
        message: GroupMessage,
        member: str,
        tries: int,
        error: BaseException,
        conditions: Mapping[str, str] | None,
        *,
        with_traceback: bool = True,
    ) -> bytes:
        sequence, stored_ns = message.sequence, message.original.delivery.timestamp_ns
        values = {
            "Subject": message.subject,
            "Stream": self._stream,
            "Sequence": sequence,
            "Group": self._group,
            "Member": member,
            "Partition": message.partition,
            "Key": message.key,
            "Tries": tries,
        }
        # The time is that of the message: a stream that is created again counts from 1, and those are other messages.
        message_id = f"{escaped(self._stream)} {escaped(self._group)} {sequence} {stored_ns}"
        traceback = traceback_text(error) if with_traceback else None
        given = message.original.raw_headers
        return letter_head(values, error, message_id, self._name, given, traceback=traceback, conditions=conditions)

    async def _ensure_soon(self, message: GroupMessage) -> None:
        """Without a leader the server does not answer: fail early, so that the caller asks again."""
        try:
            async with asyncio.timeout(_ENSURE_S):
                await self._ensure(message)
        except TimeoutError as error:
            raise RequestTimeout(f"stream {self._name!r} was not there within {_ENSURE_S:g} s") from error

    async def _ensure(self, message: GroupMessage) -> None:
        # A group's queue has the storage and the replicas of the stream that it copies.
        await ensure_dead_letter_stream(self._connection, self._stream, like=message.delivery.delivery.stream)
        self._is_ready = True


async def ensure_dead_letter_stream(connection: Connection, stream: str, *, like: str) -> None:
    """Create the stream for dead letters if it does not exist. One that exists keeps its limits.

    It gets the storage and the replicas of the stream `like`.
    """
    await ensure_side_stream(
        connection,
        dead_letter_stream(stream),
        f"keylane.dlq.{stream}.>",
        purpose="dead letters",
        like=like,
        description=f"what groups of {stream} gave up: keylane dlq ls {stream}",
        retention="limits",
        discard="new",
    )


# ---- look ---------------------------------------------------------------------------------------------


async def list_dead_letters(
    connection: Connection,
    stream: str,
    *,
    group: str | None = None,
    partition: int | None = None,
    key: str | None = None,
    first: int = 1,
    last: int | None = None,
    limit: int | None = None,
) -> AsyncIterator[DeadLetter]:
    """The dead letters of a stream, oldest first, page by page; `first` to `last` are their own sequences.

    Ends with the newest one that was there at the start. A stream without any, or without a dead-letter stream,
    gives none.
    """
    name = dead_letter_stream(stream)
    _check_selection(group, partition, first, last, limit)
    try:
        newest = (await streams.state(connection, name)).last_sequence
    except NotFound:
        return
    wanted = f"keylane.dlq.{stream}.{group or '*'}.>"
    found = 0
    async for one in _pages(connection, name, wanted, first, newest if last is None else min(last, newest)):
        if not _is_letter(one.subject):
            continue
        letter = read_letter(one.sequence, one.timestamp, one.subject, one.headers, one.data)
        if (key is None or letter.key == key) and (partition is None or letter.partition == partition):
            yield letter
            found += 1
            if found == limit:
                return


def _check_selection(group: str | None, partition: int | None, first: int, last: int | None, limit: int | None) -> None:
    if group is not None:
        check_group_name(group)
    if partition is not None and partition < 0:
        raise InvalidInput(f"partition is {partition}: partitions start at 0")
    if first < 1 or (last is not None and last < first):
        raise InvalidInput(f"dead letters {first} to {last}: sequences start at 1, and the lower one comes first")
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit}: give at least 1, or none at all")


async def _pages(
    connection: Connection, name: str, subject_filter: str, first: int, last: int
) -> AsyncIterator[StoredMessage]:
    """Pages are small, because each letter may be as large as a message can be."""
    pending = 1
    while pending and first <= last:
        page, pending = await read_batch(connection, name, sequence=first, batch=_PAGE, subject_filter=subject_filter)
        for one in page:
            if one.sequence > last:
                return
            yield one
        if not page:
            return
        first = page[-1].sequence + 1


async def read_dead_letter(connection: Connection, stream: str, sequence: int) -> DeadLetter:
    """One dead letter by its own sequence. Raises `NotFound`."""
    stored = await _stored(connection, stream, sequence)
    return read_letter(sequence, stored.time, stored.subject, parse_headers(stored.head), stored.data)


# ---- out ----------------------------------------------------------------------------------------------


async def replay(connection: Connection, stream: str, sequence: int, *, timeout_s: float = 5.0) -> PublishAck:
    """Publish the original again, on its subject and with its headers, then delete the dead letter.

    It becomes a new message of the stream, behind all others, so every group that takes its subject gets it, not
    only the one that gave it up. Headers that steer the server (`Nats-…`) are left out. If the answer to the publish
    is lost, replaying again within the stream's duplicate window stores it once. Raises `NotFound`.
    """
    check_seconds(timeout_s, "timeout_s")
    stored = await _stored(connection, stream, sequence)
    original = read_letter(sequence, stored.time, stored.subject, parse_headers(stored.head), stored.data)
    if original.is_parked:
        raise GroupError(
            f"dead letter {sequence} of stream {stream!r} is parked: its group handles it, and what waits behind it, "
            f"when its key is released: keylane dlq release {stream} {original.group} {original.key}"
        )
    subject = original.subject.encode("utf-8", "surrogateescape")
    if not subject or _NOT_IN_SUBJECT.search(subject) or len(subject) > MAX_SUBJECT_BYTES:
        raise GroupError(
            f"dead letter {sequence} of stream {stream!r} cannot be replayed: its header Keylane-Subject is "
            f"{shown(original.subject)}, which is no subject; drop it, or publish its data yourself"
        )
    head = [
        (b"Nats-Msg-Id", f"{escaped(dead_letter_stream(stream))} {sequence} {stored.written}".encode()),
        (b"Nats-Expected-Stream", stream.encode()),
        *replayed_lines(stored.head),
    ]
    try:
        ack = await publish_raw(connection, subject, header_block(head), stored.data, timeout_s)
    except PublishRejected as error:
        if error.err_code != _OTHER_STREAM:
            raise
        raise GroupError(
            f"dead letter {sequence} was not replayed: its subject {shown(original.subject)} belongs to another stream "
            f"than {stream!r} by now; publish its data yourself and drop it"
        ) from error
    try:
        await drop(connection, stream, sequence)
    except NotFound:  # somebody else replayed or dropped it at the same moment
        return ack
    except KeylaneError as error:
        raise GroupError(
            f"dead letter {sequence} was replayed as sequence {ack.sequence} of stream {stream!r}, and could not be "
            f"deleted ({error}): drop it"
        ) from error
    return ack


async def drop(connection: Connection, stream: str, sequence: int) -> None:
    """Delete a dead letter. Raises `NotFound`."""
    name = dead_letter_stream(stream)
    _check_sequence(sequence)
    try:
        await streams.delete_message(connection, name, sequence)
    except NotFound as error:
        raise _no_letter(stream, sequence, error) from error
    except ApiError:
        # For one that is not there the server has several errors, by storage and place, and none of them is a 404.
        await _stored(connection, stream, sequence)
        raise


# ---- the wire -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    subject: str
    head: bytes
    data: bytes
    time: datetime
    written: str
    """The time in the server's own digits."""


async def _stored(connection: Connection, stream: str, sequence: int) -> _Stored:
    """From the leader, and with the header block as it is."""
    name = dead_letter_stream(stream)
    _check_sequence(sequence)
    try:
        wire = await streams.get_message(connection, name, sequence=sequence)
    except NotFound as error:
        raise _no_letter(stream, sequence, error) from error
    head, data = (base64.b64decode(wire.get(part, "")) for part in ("hdrs", "data"))
    return _Stored(wire["subject"], head, data, parse_time(wire["time"]), wire["time"])


def _check_sequence(sequence: int) -> None:
    if sequence < 1:
        raise InvalidInput(f"dead letter {sequence}: sequences start at 1")


def _no_letter(stream: str, sequence: int, error: NotFound) -> NotFound:
    return NotFound(
        error.code, error.err_code, f"stream {stream!r} has no dead letter {sequence}: look with `keylane dlq ls`"
    )


def _is_letter(subject: str) -> bool:
    """Whether a message of the dead-letter stream is a letter: the owners' fences and wishes to release are none."""
    return subject.split(".")[4:5] not in (["fence"], ["release"])


def read_letter(sequence: int, time: datetime, subject: str, head: Mapping[str, str], data: bytes) -> DeadLetter:
    words = [*subject.split("."), "", "", "", ""]  # an operator may have given the stream other subjects too
    return DeadLetter(
        sequence=sequence,
        time=time,
        stream=words[2],
        source_sequence=number(head.get("Keylane-Sequence", "")),
        subject=unescaped(head.get("Keylane-Subject", "")),
        group=words[3],
        partition=number(head.get("Keylane-Partition", words[4])),
        is_parked=words[4] == "parked",
        stored_ns=number(head.get("Nats-Msg-Id", "").rpartition(" ")[2]),
        key=unescaped(head.get("Keylane-Key", "")),
        member=unescaped(head.get("Keylane-Member", "")),
        tries=number(head.get("Keylane-Tries", "")),
        error=head.get("Keylane-Error", ""),
        traceback=unescaped(head.get("Keylane-Traceback", "")),
        headers={
            name.removeprefix(ORIGINAL): value
            for name, value in head.items()
            if name.startswith(ORIGINAL) or not is_reserved(name.encode())
        },
        data=data,
    )


# ---- what never became a message: something that was to be published and cannot be -----------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpublished:
    """What was to be published, by whom, and why it cannot be. As a dead letter it looks like what a group gave up."""

    stream: str
    """Where it was to be stored."""
    subject: str
    """As it was given, which may be the fault."""
    message_id: str
    """The same one within an hour is stored once."""
    header_lines: bytes
    """Its headers as they would have been sent; empty where they are the fault."""
    data: bytes
    group: str
    member: str
    partition: int
    error: BaseException


async def put_unpublished(connection: Connection, letter: Unpublished, *, timeout_s: float) -> None:
    """Store it as a dead letter of its stream. Returns when the server has confirmed it; else raises.

    Data that is too large for the server is cut, and stored without its subject, so that it cannot be replayed.
    `PublishRejected`: the dead-letter stream is full.
    """
    target = f"keylane.dlq.{letter.stream}.{letter.group}.{letter.partition}".encode()
    head, data = _fitting(letter, connection.nats.max_payload)
    backoff = Backoff(f"storing a dead letter of stream {letter.stream}", timeout_s, log=_log, since=time.monotonic())
    while True:
        try:
            await ensure_dead_letter_stream(connection, letter.stream, like=letter.stream)
            await publish_raw(connection, target, head, data, _TRY_S)
        except PublishRejected:  # also where the server calls itself unavailable: the stream is full
            raise
        except KeylaneError as error:
            await backoff.after(error)
        else:
            return


def _fitting(letter: Unpublished, room: int) -> tuple[bytes, bytes]:
    whole = _head(letter, letter.subject, letter.header_lines)
    if len(whole) + len(letter.data) <= room and len(whole) <= MAX_HEADER_BYTES:
        return whole, letter.data
    bare = _head(letter, "", b"")
    return bare, letter.data[: max(0, room - len(bare))]


def _head(letter: Unpublished, subject: str, header_lines: bytes) -> bytes:
    values = {
        "Subject": subject,
        "Stream": letter.stream,
        "Sequence": 0,
        "Group": letter.group,
        "Member": letter.member,
        "Partition": letter.partition,
        "Key": "",
        "Tries": 1,
    }
    message_id = f"unpublished {escaped(letter.message_id)}"
    original = b"NATS/1.0\r\n" + header_lines
    return letter_head(values, letter.error, message_id, dead_letter_stream(letter.stream), original)
