"""The five messages of a coordination log, as text in its records and as values.

Owns: the format (version 1 of the public Go implementation of Marshal), the rules for ids, and which partition of the
log coordinates which key. Never decides what a message means: that is `core/claim_rules.py`.

    Type/Version/unixSeconds/InstanceID/ClientID/GroupID/Topic/Partition[/number]

There is no escaping, so fields are counted exactly and no id may contain a `/`. Writing is strict. Reading accepts what
the Go implementation accepts: an id that keylane would not write is still somebody's claim, and skipping it would give
a partition two owners. So any whole number is a version (the Go admin writes 0), and numbers may have a sign. Two
things are refused although Go reads them: ids that are not UTF-8, and partitions beyond 31 bits, which crash a Go
process. `unixSeconds` is the writer's clock; it is only for people who read the log.

A log with subjects has one for each key. A record on another key's subject is refused as well.
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
(the Go implementation). All consumers of one log must use the same: two hashes mean two owners."""

_FIELD_COUNTS = {
    HEARTBEAT: 9,
    CLAIMING_PARTITION: 8,
    RELEASING_PARTITION: 9,
    CLAIMING_MESSAGES: 9,
    RELEASE_GROUP: 9,
}
_NUMBERS_BELOW = 1 << 63
_PARTITIONS_BELOW = 1 << 31
_MOST_DIGITS = 19
_SHOWN_BYTES = 200
_CLAIM = CLAIMING_PARTITION.encode()
_NUMBERED = frozenset(kind.encode() for kind in (HEARTBEAT, RELEASING_PARTITION, CLAIMING_MESSAGES))
_INTEGER = re.compile(r"[+-]?0*([0-9]{1,19})")
_NOT_IN_TOKENS = re.compile(rb"[^-_A-Za-z0-9]")
_UNWRITABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The owner is alive, and `offset` is the next message that it will read."""

    instance: str
    client: str
    group: str
    topic: str
    partition: int
    offset: int
    seconds: int


@dataclass(frozen=True, slots=True)
class ClaimingPartition:
    """The writer wants to own a partition."""

    instance: str
    client: str
    group: str
    topic: str
    partition: int
    seconds: int


@dataclass(frozen=True, slots=True)
class ReleasingPartition:
    """The owner gives a partition up; the next owner reads from `offset`."""

    instance: str
    client: str
    group: str
    topic: str
    partition: int
    offset: int
    seconds: int


@dataclass(frozen=True, slots=True)
class ClaimingMessages:
    """The owner takes all messages before `proposed`, for at most once: nobody else gets them."""

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
"""type, instance, client, group, topic, partition, number (0 if there is none), seconds. As in Go, number and
seconds may be negative: a negative offset shows that its writer is alive, but not its position."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that is none of the five messages, or in the wrong place. It is counted and skipped."""

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
    """The message in a record. Never raises: a record that is not a message gives `Unreadable`.

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


def split(value: bytes, subject: str | None = None) -> Fields | Unreadable:
    """The fields of a record as a plain tuple. `subject`: where it was found, in a log that has subjects."""
    try:
        parts = value.decode().split("/")
    except UnicodeDecodeError:
        return Unreadable("not UTF-8", value[:_SHOWN_BYTES])
    found = _read(parts)
    if isinstance(found, str):
        return Unreadable(found, value[:_SHOWN_BYTES])
    if subject is not None and (own := subject_for(found[0], found[3], found[4], found[5])) != subject:
        return Unreadable(f"its subject is {subject}, and it belongs on {own}", value[:_SHOWN_BYTES])
    return found


def subject_for(kind: str, group: str, topic: str, partition: int) -> str:
    """The subject of a record in a log that has subjects, without the common prefix of the log's subjects.

    >>> subject_for("Heartbeat", "billing.eu", "orders", 3), subject_for("ReleaseGroup", "billing.eu", "", 0)
    ('claims.billing=2Eeu.orders.3', 'pauses.billing=2Eeu')
    """
    if kind == RELEASE_GROUP:
        return f"pauses.{_token(group)}"
    return f"claims.{_token(group)}.{_token(topic)}.{partition}"


def split_roughly(value: bytes) -> tuple[bytes, bytes, int] | None:
    """The type of a record, its identity as one piece, and its number; None for a `ReleaseGroup` or anything unusual.

    A log has a million records of few writers. A reader that already called `split` for a record with the same identity
    knows the rest. For such an identity, this returns the same as `split`.

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
    """Return an id or a topic unchanged, or raise `InvalidInput`: it is written between slashes without escaping."""
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


def _read(parts: list[str]) -> Fields | str:
    """The fields of a message, or the reason why it is not one."""
    kind = parts[0]
    count = _FIELD_COUNTS.get(kind)
    if count is None:
        return f"unknown type {shown(kind)}"
    if len(parts) != count:
        return f"{len(parts)} fields in a {kind}, not {count}"
    if _number(parts[1]) is None:
        return f"unknown version {shown(parts[1])}"
    partition, number = _number(parts[7]), _number(parts[8]) if count > 8 else 0
    seconds = _number(parts[2])
    if partition is None or number is None or seconds is None:
        return "a number is not written in digits, or is too large"
    if not 0 <= partition < _PARTITIONS_BELOW:
        return f"partition {partition} is negative, or too large"
    return kind, parts[3], parts[4], parts[5], parts[6], partition, number, seconds


def _number(text: str) -> int | None:
    """A whole number as Go reads one; None if it is not a number."""
    # int() alone would accept "1_000", " 7" and digits of other alphabets, and it reads thousands of digits slowly.
    found = _INTEGER.fullmatch(text)
    if found is None:
        return None
    size = int(found[1])
    number = -size if text[0] == "-" else size
    return number if -_NUMBERS_BELOW <= number < _NUMBERS_BELOW else None


def _token(text: str) -> str:
    """An id as one token of a subject: other characters than letters, digits, `-` and `_` become `=` and two digits."""
    return _NOT_IN_TOKENS.sub(lambda found: b"=%02X" % found[0][0], text.encode()).decode()
