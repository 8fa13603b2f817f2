"""The records of a coordination log as a task reads them, and the log's time at each of them.

The log's time is the newest broker timestamp up to a record, in the whole partition of the log. A log is read in
pieces, so a record first gets the newest time of its piece (`LogReader`); the driver puts the pieces in order and says
how far the log is replayed (`measure`). Pure, from Arrow to Arrow: needs no Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.core.claim_records import RELEASE_GROUP, Unreadable, split, split_roughly, subject_for
from keylane.marshal.log import Bounds

ROWS_DDL = "log_partition INT, offset BIGINT, time_ms BIGINT, value BINARY, subject STRING"
"""A coordination log as a table, a `LogRecord` in each row; the rows of a task that are of one partition of the log
come in its order."""

RECORDS_DDL = f"{ROWS_DDL}, piece BIGINT, seen_ms BIGINT, kind STRING, group STRING, topic STRING, partition INT"
"""`piece`: the offset that a task's piece of the log begins with. `kind`: null if it is to be skipped, as none of the
five messages or on another key's subject."""

ROWS = pa.schema(
    [
        ("log_partition", pa.int32()),
        ("offset", pa.int64()),
        ("time_ms", pa.int64()),
        ("value", pa.binary()),
        ("subject", pa.string()),
    ]
)
_RECORDS = pa.schema(
    [
        *ROWS,
        ("piece", pa.int64()),
        ("seen_ms", pa.int64()),
        ("kind", pa.string()),
        ("group", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
    ]
)
_IDENTITIES_KEPT = 100_000

_Key = tuple[str, str, int]


class LogReader:
    """Reads what each record is about, and the newest time of its piece so far."""

    def __call__(self, tables: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        known: dict[bytes, tuple[_Key, str]] = {}
        number, last, piece, seen_ms = -1, -1, -1, 0
        for table in tables:
            found: list[tuple[Any, ...]] = []
            for there, offset, time_ms, stored, subject in zip(
                *(table.column(name).to_pylist() for name in ROWS.names), strict=True
            ):
                if there != number or offset <= last:
                    number, piece, seen_ms = there, offset, time_ms
                elif time_ms > seen_ms:
                    seen_ms = time_ms
                last = offset
                value = stored or b""  # a record of Kafka may have none
                about = _about(value, subject, known)
                found.append((there, offset, time_ms, value, subject, piece, seen_ms, *about))
            columns = zip(*found, strict=True) if found else ((),) * len(_RECORDS)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _RECORDS, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=_RECORDS)


def _about(value: bytes, subject: str | None, known: dict[bytes, tuple[_Key, str]]) -> tuple[Any, ...]:
    """kind, group, topic, partition"""
    rough = split_roughly(value)
    if rough is not None and (found := known.get(rough[1])) is not None and subject in (None, found[1]):
        return rough[0].decode(), *found[0]
    fields = split(value, subject)
    if isinstance(fields, Unreadable):
        return (None,) * 4
    kind, _, _, group, topic, partition, _, _ = fields
    if kind == RELEASE_GROUP:
        return kind, group, None, None
    if rough is not None:
        if len(known) >= _IDENTITIES_KEPT:
            known.clear()
        known[rough[1]] = (group, topic, partition), subject_for(kind, group, topic, partition)
    return kind, group, topic, partition


# ---- the log's time -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogPiece:
    """What one task has read of a partition of the log; `kept` is of the records that are not too young."""

    log_partition: int
    first: int
    last: int
    records: int
    newest_ms: int
    first_ms: int
    kept: int
    kept_last: int | None
    kept_ms: int | None
    unreadable: int
    """Of those kept."""


@dataclass(frozen=True, slots=True)
class LogExtent:
    """The part of a partition of the log that is replayed: from its first record to the one before `stop`.

    `begins`: the first offset that it still has, which in Kafka may be before its first record. `end`: where it ended
    when that was asked; `World.begins` says what for.
    """

    log_partition: int
    begins: int
    first: int
    first_ms: int
    end: int
    stop: int
    now_ms: int
    records: int
    unreadable: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What of the log is replayed. `before`: the log's time before a piece, for all but the first of a partition."""

    extents: dict[int, LogExtent]
    before: dict[tuple[int, int], int]

    @property
    def now_ms(self) -> int:
        """The newest time of any partition of the log."""
        return max(one.now_ms for one in self.extents.values())

    @property
    def first_ms(self) -> int:
        return min(one.first_ms for one in self.extents.values())


def measure(pieces: Iterable[LogPiece], bounds: Mapping[int, Bounds], until_ms: int | None, *, holes: bool) -> Survey:
    """Put the pieces in order. `until_ms`: stop before the first record of a partition that is younger.

    `bounds`: as they were before it was read. Where offsets have no `holes`, it may have lost its head since.

    A record comes before the first younger one if the log's time at it is not beyond `until_ms`: that of its piece and
    that before its piece.
    """
    extents: dict[int, LogExtent] = {}
    before: dict[tuple[int, int], int] = {}
    for number, in_order in _by_partition(pieces).items():
        newest_ms: int | None = None
        kept: list[LogPiece] = []
        for piece in in_order:
            if newest_ms is not None:
                before[number, piece.first] = newest_ms
            if piece.kept and (until_ms is None or newest_ms is None or newest_ms <= until_ms):
                kept.append(piece)
            newest_ms = piece.newest_ms if newest_ms is None else max(newest_ms, piece.newest_ms)
        if kept:
            extents[number] = LogExtent(
                log_partition=number,
                begins=bounds[number].first if holes else kept[0].first,
                first=kept[0].first,
                first_ms=kept[0].first_ms,
                end=bounds[number].end,
                stop=max(piece.kept_last or 0 for piece in kept) + 1,
                now_ms=max(piece.kept_ms or 0 for piece in kept),
                records=sum(piece.kept for piece in kept),
                unreadable=sum(piece.unreadable for piece in kept),
            )
    return Survey(extents, before)


def first_trouble(pieces: Iterable[LogPiece], stops: Mapping[int, int], *, holes: bool) -> tuple[int, int] | None:
    """The partition of the log and the offset near which records are missing; None if there are all up to `stops`.

    `holes`: offsets may be missing between two records, as in Kafka.
    """
    found = _by_partition(pieces)
    for number, stop in stops.items():
        expected: int | None = None
        for piece in found.get(number, ()):
            missing = piece.first - (piece.first if expected is None else expected)
            inside = piece.last - piece.first + 1 - piece.records
            if missing < 0 or (not holes and (missing or inside)):
                return number, piece.first
            expected = piece.last + 1
        if not holes and expected != stop:
            return number, expected or stop
    return None


def _by_partition(pieces: Iterable[LogPiece]) -> dict[int, Sequence[LogPiece]]:
    found: dict[int, list[LogPiece]] = {}
    for piece in sorted(pieces, key=lambda one: (one.log_partition, one.first)):
        found.setdefault(piece.log_partition, []).append(piece)
    return dict(found)
