"""Turns the notes of a member into the columns of batches.

Owns what is read from a delivery, and when: `Journal.note` keeps references only, and this module does everything that
takes time, a batch at a time. It keeps no payload alive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from keylane.core.journal_record import Columns
from keylane.jetstream import Message
from keylane.journal.stream import journal_subject

_PIN = re.compile(rb"\r\nNats-Pin-Id: ?([^\r]*)\r\n")


class RecordOrigin(Protocol):
    """The instance of a member that has a message."""

    @property
    def stream(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def member(self) -> str: ...
    @property
    def instance(self) -> str: ...
    @property
    def revision(self) -> int: ...


class RecordPlace(Protocol):
    """The partition and key of a message."""

    @property
    def partition(self) -> int: ...
    @property
    def key(self) -> str: ...


class Handled(Protocol):
    """A group's message, as far as the journal reads it."""

    @property
    def delivery(self) -> Message: ...
    @property
    def place(self) -> RecordPlace: ...
    @property
    def origin(self) -> RecordOrigin: ...


Note = tuple[RecordOrigin, int, RecordPlace, int, bytes, bytes, int, int, int]
"""One try at one message, not read yet: origin, revision, place, sequence, ack subject, headers, outcome, start, end.

The revision is stored beside its origin because the origin's revision changes while the instance lives. A plain tuple,
because creating a named one would take longer than the rest of `Journal.note`.
"""


@dataclass(slots=True, eq=False)
class Line:
    """The batches of one instance, numbered from 1."""

    subject: str
    group: str
    member: str
    instance: str
    batches: int = 0
    dropped: int = 0
    """Records lost since the last numbered batch."""


class Lines:
    """All instances that a journal writes for: almost always one."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._lines: dict[tuple[str, str, str], Line] = {}
        # "<stream> <sequence> …": the server writes this when it copies a message into a group's queue. Compare the
        # name too: messages of a stream that is itself a copy carry the name of its own source.
        self._source = re.compile(rb"\r\nNats-Stream-Source: ?%b (\d+)" % re.escape(stream.encode()))

    def sort(self, notes: list[Note]) -> list[tuple[Line, list[Note]]]:
        """The notes of each instance, in their order."""
        origins = {id(note[0]): note[0] for note in notes}
        lines = {number: self.line_of(origin) for number, origin in origins.items()}
        distinct = list(dict.fromkeys(lines.values()))
        if len(distinct) == 1:
            return [(distinct[0], notes)]
        return [(line, [note for note in notes if lines[id(note[0])] is line]) for line in distinct]

    def with_dropped(self) -> list[Line]:
        """The lines whose next batch must report dropped records."""
        return [line for line in self._lines.values() if line.dropped]

    def columns(self, notes: list[Note]) -> Columns:
        """The columns of a batch with these notes."""
        _, revisions, places, sequences, replies, headers, outcomes, started, ended = zip(*notes, strict=True)
        return Columns(
            sequences=sequences,
            source_sequences=self._source_sequences(sequences, headers),
            started_ns=started,
            ended_ns=ended,
            keys=[place.key for place in places],
            partitions=[place.partition for place in places],
            delivered=_delivered(replies),
            tenures=list(zip(_pins(headers), revisions, strict=True)),
            outcomes=outcomes,
        )

    def line_of(self, origin: RecordOrigin) -> Line:
        names = origin.group, origin.member, origin.instance
        line = self._lines.get(names)
        if line is None:
            line = self._lines[names] = Line(journal_subject(self._stream, origin.group, origin.member), *names)
        return line

    def _source_sequences(self, sequences: Iterable[int], headers: Iterable[bytes]) -> list[int]:
        find = self._source.search
        return [
            sequence if (found := find(block)) is None else int(found[1])
            for sequence, block in zip(sequences, headers, strict=True)
        ]


def _delivered(replies: Iterable[bytes]) -> list[int]:
    """How often each was delivered: `$JS.ACK.<stream>.<consumer>.<delivered>.…`, with a domain two tokens further.

    Almost all begin with the same tokens, so comparing those is enough.
    """
    counts = []
    count, start = 0, b""
    for reply in replies:
        if not start or not reply.startswith(start):
            words = reply.split(b".")
            at = 4 if len(words) < 11 else 6
            count = int(words[at])
            start = b".".join(words[: at + 1]) + b"."
        counts.append(count)
    return counts


def _pins(headers: Iterable[bytes]) -> list[str]:
    """The pin of each delivery. The server writes it last, and it rarely changes, so comparing the ends is enough."""
    pins = []
    pin, tail = "", b""
    for block in headers:
        if not tail or not block.endswith(tail):
            found = _PIN.search(block)
            pin = found[1].decode("utf-8", "replace") if found else ""
            tail = found[0] + b"\r\n" if found else b""
        pins.append(pin)
    return pins
