"""The five messages of a coordination log, as text in its records and as values.

Owns: the format (version 1 of the public Go implementation of Marshal), the rules for ids, and which partition of the
log coordinates what. Never decides what a message means: that is `core/claims.py`.

    Type/Version/unixSeconds/InstanceID/ClientID/GroupID/Topic/Partition[/number]

There is no escaping, so fields are counted exactly and no id may hold a `/`. Writing is strict. Reading refuses only
what cannot be read: an id that keylane would not write is still somebody's claim, and to skip it would give a
partition two owners. `unixSeconds` is the writer's clock; it is kept for people who look and used for nothing.

Versions 0 and 1 are read: the Go admin leaves the version of its `ReleaseGroup` at 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import md5
from typing import Final, Literal, TypeAlias, get_args

from keylane.core.subjects import describe_char, shown
from keylane.errors import InvalidInput

VERSION = 1

HEARTBEAT: Final = "Heartbeat"
CLAIMING_PARTITION: Final = "ClaimingPartition"
RELEASING_PARTITION: Final = "ReleasingPartition"
CLAIMING_MESSAGES: Final = "ClaimingMessages"
RELEASE_GROUP: Final = "ReleaseGroup"

Placing: TypeAlias = Literal["topic_partition", "topic"]
"""What is hashed to find the coordinating partition: topic and partition (the protocol document), or the topic alone
(the Go implementation). Everybody on one log uses the same: two hashes mean two owners."""

_FIELD_COUNTS = {
    HEARTBEAT: 9,
    CLAIMING_PARTITION: 8,
    RELEASING_PARTITION: 9,
    CLAIMING_MESSAGES: 9,
    RELEASE_GROUP: 9,
}
_KNOWN_VERSIONS = ("1", "0")
_NUMBERS_BELOW = 1 << 63
_PARTITIONS_BELOW = 1 << 31
_MOST_DIGITS = 19
_SHOWN_BYTES = 200
_CLAIM = CLAIMING_PARTITION.encode()
_NUMBERED = frozenset(kind.encode() for kind in (HEARTBEAT, RELEASING_PARTITION, CLAIMING_MESSAGES))
_UNWRITABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The owner lives, and `offset` is the next message that it will read."""

    instance: str
    client: str
    group: str
    topic: str
    partition: int
    offset: int
    seconds: int


@dataclass(frozen=True, slots=True)
class ClaimingPartition:
    """Somebody wants to own a partition."""

    instance: str
    client: str
    group: str
    topic: str
    partition: int
    seconds: int


@dataclass(frozen=True, slots=True)
class ReleasingPartition:
    """The owner gives a partition up; whoever comes next reads from `offset`."""

    instance: str
    client: str
    group: str
    topic: str
    partition: int
    offset: int
    seconds: int


@dataclass(frozen=True, slots=True)
class ClaimingMessages:
    """The owner takes all messages before `proposed`, for at most once: nobody else will be given them."""

    instance: str
    client: str
    group: str
    topic: str
    partition: int
    proposed: int
    seconds: int


@dataclass(frozen=True, slots=True)
class ReleaseGroup:
    """The whole group pauses until `expiry` (Unix seconds). An expiry in the past ends a pause."""

    instance: str
    client: str
    group: str
    expiry: int
    seconds: int


Message: TypeAlias = Heartbeat | ClaimingPartition | ReleasingPartition | ClaimingMessages | ReleaseGroup

Fields: TypeAlias = tuple[str, str, str, str, str, int, int, int]
"""type, instance, client, group, topic, partition, number (0 where there is none), seconds"""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that is none of the five messages."""

    reason: str
    value: bytes
    """Its beginning."""


def encode(message: Message) -> bytes:
    """The bytes of a message, or `InvalidInput` if one of its values cannot be written.

    >>> encode(Heartbeat("9f1c", "worker-1", "billing", "orders", 3, 1200, 1700000000))
    b'Heartbeat/1/1700000000/9f1c/worker-1/billing/orders/3/1200'
    """
    check_id(message.instance, "instance id")
    check_id(message.client, "client id")
    check_id(message.group, "group id")
    check_number(message.seconds, "seconds")
    kind, number, topic, partition = type(message).__name__, "", "", 0
    if isinstance(message, ReleaseGroup):
        number = f"/{check_number(message.expiry, 'expiry')}"
    else:
        topic = check_id(message.topic, "topic")
        partition = check_number(message.partition, "partition", below=_PARTITIONS_BELOW)
    if isinstance(message, Heartbeat | ReleasingPartition):
        number = f"/{check_number(message.offset, 'offset')}"
    elif isinstance(message, ClaimingMessages):
        number = f"/{check_number(message.proposed, 'proposed offset')}"
    head = f"{kind}/{VERSION}/{message.seconds}/{message.instance}/{message.client}/{message.group}"
    return f"{head}/{topic}/{partition}{number}".encode()


def decode(value: bytes) -> Message | Unreadable:
    """The message in a record. Never raises: a record that is none is a value too.

    >>> decode(b"ClaimingPartition/1/1700000000/9f1c/worker-1/billing/orders/3")  # doctest: +ELLIPSIS
    ClaimingPartition(instance='9f1c', client='worker-1', group='billing', topic='orders', partition=3, seconds=...)
    >>> decode(b"Hello/1").reason
    "unknown type 'Hello'"
    """
    fields = split(value)
    if isinstance(fields, Unreadable):
        return fields
    kind, instance, client, group, topic, partition, number, seconds = fields
    if kind == HEARTBEAT:
        return Heartbeat(instance, client, group, topic, partition, number, seconds)
    if kind == CLAIMING_PARTITION:
        return ClaimingPartition(instance, client, group, topic, partition, seconds)
    if kind == RELEASING_PARTITION:
        return ReleasingPartition(instance, client, group, topic, partition, number, seconds)
    if kind == CLAIMING_MESSAGES:
        return ClaimingMessages(instance, client, group, topic, partition, number, seconds)
    return ReleaseGroup(instance, client, group, number, seconds)


def split(value: bytes) -> Fields | Unreadable:
    """The fields of a record as a plain tuple."""
    try:
        parts = value.decode().split("/")
    except UnicodeDecodeError:
        return Unreadable("not UTF-8", value[:_SHOWN_BYTES])
    try:
        numbers = [_number(text) for text in (parts[7], parts[8] if len(parts) > 8 else "0", parts[2])]
    except (IndexError, ValueError):
        numbers = []
    if reason := _problem(parts, numbers):
        return Unreadable(reason, value[:_SHOWN_BYTES])
    return parts[0], parts[3], parts[4], parts[5], parts[6], numbers[0], numbers[1], numbers[2]


def split_roughly(value: bytes) -> tuple[bytes, bytes, int] | None:
    """The type of a record, whose it is, undivided, and its number; None for a `ReleaseGroup` or anything odd.

    A log is a million records of few writers. A reader that `split` a record with the same identity before knows the
    rest. Whatever is answered here for such an identity, `split` reads the same from the value.

    >>> split_roughly(b"Heartbeat/1/1700000000/9f1c/worker-1/billing/orders/3/1200")
    (b'Heartbeat', b'9f1c/worker-1/billing/orders/3', 1200)
    """
    parts = value.split(b"/", 3)
    if len(parts) != 4 or parts[1] != b"1":
        return None
    kind, _, seconds, identity = parts
    if kind in _NUMBERED:
        identity, _, number = identity.rpartition(b"/")
    elif kind == _CLAIM:
        number = b"0"
    else:
        return None
    if seconds.isdigit() and number.isdigit() and len(seconds) < _MOST_DIGITS and len(number) < _MOST_DIGITS:
        return kind, identity, int(number)
    return None


def coordinating_partition(topic: str, partition: int, partitions: int, *, placing: Placing = "topic_partition") -> int:
    """Which of the log's `partitions` has the records about this partition of this topic.

    >>> coordinating_partition("orders", 3, 64), coordinating_partition("orders", 3, 64, placing="topic")
    (10, 18)
    """
    check_placing(placing)
    if partitions < 1:
        raise InvalidInput(f"a coordination log of {partitions} partitions: it has at least 1")
    text = topic if placing == "topic" else f"{topic}/{partition}"
    digest = md5(text.encode("utf-8", "surrogateescape"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") % partitions


def check_placing(placing: Placing) -> Placing:
    if placing not in get_args(Placing):
        raise InvalidInput(f"placing is {shown(placing)}: use one of {', '.join(get_args(Placing))}")
    return placing


def check_id(text: str, what: str) -> str:
    """Return an id or a topic unchanged, or raise `InvalidInput`: it goes between slashes, as it is."""
    if not isinstance(text, str):
        raise InvalidInput(f"{what} {shown(text)} is {type(text).__name__}, not text: give a str such as 'worker-1'")
    if not text:
        raise InvalidInput(f"{what} '' is empty: give at least one character")
    if "/" in text:
        raise InvalidInput(
            f"{what} {shown(text)} holds {describe_char(text, text.index('/'))}: a slash separates the fields of a "
            "record in the coordination log; use '.', '-' or '_' instead"
        )
    if found := _UNWRITABLE.search(text):
        raise InvalidInput(
            f"{what} {shown(text)} holds {describe_char(text, found.start())}: "
            f"a {what} holds no control characters and only what UTF-8 can write; drop it"
        )
    return text


def check_number(number: int, what: str, *, below: int = _NUMBERS_BELOW) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < below:
        raise InvalidInput(f"{what} is {shown(number)}: give a whole number from 0 to {below - 1}")
    return number


def _number(text: str) -> int:
    # int() alone would take "1_000", " 7" and digits of other alphabets, and it reads thousands of digits slowly.
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise ValueError(text)
    return int(text)


def _problem(parts: list[str], numbers: list[int]) -> str:
    """Why these are not the fields of a message; empty if they are. `numbers`: partition, number, seconds."""
    kind = parts[0]
    count = _FIELD_COUNTS.get(kind)
    if count is None:
        return f"unknown type {shown(kind)}"
    if len(parts) != count:
        return f"{len(parts)} fields in a {kind}, not {count}"
    if parts[1] not in _KNOWN_VERSIONS:
        return f"unknown version {shown(parts[1])}"
    if not numbers or max(numbers) >= _NUMBERS_BELOW or numbers[0] >= _PARTITIONS_BELOW:
        return "a number is not written in digits, or is too large"
    if kind == RELEASE_GROUP:
        return "a ReleaseGroup that names a topic or a partition" if parts[6] or numbers[0] else ""
    return "" if parts[6] else f"a {kind} without a topic"
