"""A coordination log replayed in tasks: each takes the records of some keys, and the rules of `core/world.py`.

What a record is worth depends on the records of its own key, on the pauses of its group, and on the log's time. So any
task can replay any keys by themselves: it applies their records and all pauses, each at the log's time, and before
them, where the log begins with somebody else's record, one that says nothing.

The log's time is the newest broker timestamp up to a record, in the whole partition of the log. A log is read in
pieces, so a record first gets the newest time of its piece (`LogReader`); the driver puts the pieces in order and says
how far the log is replayed (`measure`).

Owns nothing of the rules, and needs no Spark: from Arrow to Arrow. Memory is bounded by the number of keys and pauses.

`Pauses` are those of the groups in one partition of the log: every task has all of them, and one task reports them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from keylane.core.claim_facts import Claim, Ended, Key, LogRecord, Owner, Tenure, Verdict, gaps, overlaps
from keylane.core.claim_records import HEARTBEAT, RELEASE_GROUP, Placing, Unreadable, split, split_roughly, subject_for
from keylane.core.world import World
from keylane.marshal.log import Bounds
from keylane.spark.tasks import schema_of

# ---- reading the log ---------------------------------------------------------------------------------------------

ROWS_DDL = "log_partition INT, offset BIGINT, time_ms BIGINT, value BINARY, subject STRING"
"""A coordination log as a table, a `LogRecord` in each row; the rows of a task that are of one partition of the log
come in its order."""

RECORDS_DDL = f"{ROWS_DDL}, piece BIGINT, seen_ms BIGINT, kind STRING, group STRING, topic STRING, partition INT"
"""`piece`: the offset that a task's piece of the log begins with. `kind`: null if it is to be skipped, as none of the
five messages or on another key's subject."""

ROWS, _RECORDS = schema_of(ROWS_DDL), schema_of(RECORDS_DDL)
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

    @property
    def last(self) -> int:
        return self.stop - 1


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


# ---- replaying it -----------------------------------------------------------------------------------------------

FOREVER_MS: Final = 253_402_300_799_000
"""The last second of the year 9999: later times are reported as this."""
_TELLS = 0

IN_FORCE, PAUSE_EXPIRED, RESUMED, REPLACED = "in_force", "expired", "resumed", "replaced"


@dataclass(frozen=True, slots=True)
class _Rest:
    """One pause. `to_ms`: when it ended, or will."""

    by: Owner
    offset: int
    from_ms: int
    expiry_ms: int
    to_ms: int
    tells: bool


class Pauses:
    """Takes the `ReleaseGroup` records of one partition of the log in their order."""

    def __init__(self, log_partition: int, now_ms: int) -> None:
        self._number = log_partition
        self._now_ms = now_ms
        self._open: dict[str, _Rest] = {}
        self._times: dict[str, list[tuple[int, int]]] = {}

    def add(self, record: Record, time_ms: int) -> Iterator[dict[str, Any]]:
        """The row of the pause that ended here or before; the newest `ReleaseGroup` is the one that counts."""
        fields = split(record.value)
        assert not isinstance(fields, Unreadable), record
        expiry_ms = min(1000 * fields[6], FOREVER_MS)
        before = self._open.pop(record.group, None)
        if before is not None:
            cut_short = time_ms < before.expiry_ms
            how = (RESUMED if expiry_ms <= time_ms else REPLACED) if cut_short else PAUSE_EXPIRED
            yield from self._ended(record.group, replace(before, to_ms=min(time_ms, before.expiry_ms)), how)
        if expiry_ms > time_ms:
            writer = Owner(fields[2], fields[1])
            rest = _Rest(writer, record.offset, time_ms, expiry_ms, expiry_ms, record.task == _TELLS)
            self._open[record.group] = rest

    def finish(self) -> Iterator[dict[str, Any]]:
        """The rows of those that the newest record of their group began."""
        for group, rest in self._open.items():
            yield from self._ended(group, rest, IN_FORCE if self._now_ms < rest.expiry_ms else PAUSE_EXPIRED)
        self._open.clear()

    def within(self, group: str, from_ms: int, to_ms: int) -> int:
        """How long of a time the group was paused, in milliseconds. Ask before `finish`."""
        times = list(self._times.get(group, ()))
        if group in self._open:
            times.append((self._open[group].from_ms, self._open[group].to_ms))
        return sum(max(0, min(to_ms, end_ms) - max(from_ms, begin_ms)) for begin_ms, end_ms in times)

    def _ended(self, group: str, rest: _Rest, how: str) -> Iterator[dict[str, Any]]:
        self._times.setdefault(group, []).append((rest.from_ms, rest.to_ms))
        if rest.tells:
            yield {
                "kind": "pause",
                "log_partition": self._number,
                "group": group,
                **rest.by._asdict(),
                "ended": how,
                "from_offset": rest.offset,
                "from_ms": rest.from_ms,
                "to_ms": rest.to_ms,
                "expiry_ms": rest.expiry_ms,
                "rank": -rest.from_ms,
            }


_WORDS = (
    "kind", "group", "topic", "client", "instance", "began", "ended", "freshness", "record", "verdict",
    "released_client", "released_instance", "owner_client", "owner_instance", "next_client",
)  # fmt: skip
_NUMBERS = (
    "token", "from_offset", "from_ms", "to_offset", "to_ms", "heartbeat_offset", "heartbeat_ms", "fresh_until_ms",
    "holds_until_ms", "next_offset", "taken_offset", "taken_to", "taken_token", "released_offset", "released_ms",
    "released_next", "expiry_ms", "gap_ms", "paused_ms", "heartbeats", "now_ms", "times", "rank",
)  # fmt: skip
REPLAYED_DDL = ", ".join(
    [
        "log_partition INT, partition INT, misplaced BOOLEAN",
        *(f"{name} STRING" for name in _WORDS),
        *(f"{name} BIGINT" for name in _NUMBERS),
    ]
)
"""`kind`: `span`, `claim` (a key as it is in the end), `gap`, `pause`, `rival` (heartbeats of somebody who is not the
owner), `overlap` (a span that began before the one before it had ended: no more than that there is one), `count`.
`rank`: what is shown first of its kind."""

_REPLAYED = schema_of(REPLAYED_DDL)

HELD, EXPIRED, PAUSED = "held", "expired", "paused"
ENDS = (HELD, EXPIRED, Ended.TAKEN.value, Ended.RELEASED.value, PAUSED, Ended.RECLAIMED.value, Ended.LAPSED.value)
"""How a span ended, besides the words of `Ended`: it still holds; it ran out and nobody has won it since; it was
released because its group was paused."""

_SAYS_NOTHING: Final = b""
_ROWS_A_BATCH = 10_000
_RIVALS_KEPT = 100_000

ReplayRow = dict[str, Any]


class Record(NamedTuple):
    """A row of `RECORDS_DDL`, as far as it is needed; `task` says where: pauses are in every task."""

    log_partition: int
    offset: int
    piece: int
    seen_ms: int
    value: bytes
    kind: str
    group: str
    topic: str
    partition: int
    task: int

    @property
    def key(self) -> Key:
        return Key(self.group, self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class Replayer:
    """Replays the records of some keys, sorted by partition of the log and offset, with all pauses among them.

    Tells of what did not end before `since_ms`, and of gaps longer than `gap_ms`.
    """

    interval_s: float
    partitions: int
    placing: Placing
    first_offset: int
    extents: Mapping[int, LogExtent]
    before: Mapping[tuple[int, int], int]
    since_ms: int
    gap_ms: int

    def __call__(self, tables: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        waiting: list[ReplayRow] = []
        for row in self._rows(tables):
            waiting.append(row)
            if len(waiting) >= _ROWS_A_BATCH:
                yield pa.RecordBatch.from_pylist(waiting, schema=_REPLAYED)
                waiting = []
        if waiting:
            yield pa.RecordBatch.from_pylist(waiting, schema=_REPLAYED)

    def _rows(self, tables: Iterable[pa.RecordBatch]) -> Iterator[ReplayRow]:
        for number, records in groupby(_records_of(tables), key=attrgetter("log_partition")):
            extent = self.extents.get(number)
            if extent is None:
                continue
            replay = _PartitionReplay(self, extent)
            for record in records:
                if record.offset < extent.stop:
                    yield from replay.apply(record)
            yield from replay.finish()

    def new_world(self, partitions: int) -> World:
        return World(
            self.interval_s, partitions, placing=self.placing, first_offset=self.first_offset, keep_history=True
        )


def _records_of(tables: Iterable[pa.RecordBatch]) -> Iterator[Record]:
    for table in tables:
        yield from map(Record, *(table.column(name).to_pylist() for name in Record._fields))


class _Strand:
    """A world that is given some records of one partition of the log, and when the log begins."""

    def __init__(self, world: World, number: int, extent: LogExtent) -> None:
        self.world = world
        self.number = number
        self._extent = extent
        self._is_begun = False
        world.begins(number, extent.begins, extent.end)

    def apply(self, offset: int, time_ms: int, value: bytes) -> Verdict:
        if not self._is_begun:
            self._is_begun = True
            if offset > self._extent.first:
                self.world.apply(LogRecord(self.number, self._extent.first, self._extent.first_ms, _SAYS_NOTHING))
        return self.world.apply(LogRecord(self.number, offset, time_ms, value))


class _PartitionReplay:
    """One partition of the log in one task.

    `astray` is the world as those see it who look for a key where it does not belong: by another hash, or with another
    number of partitions. It makes nobody an owner, but it tells whom two hashes have made one.
    """

    def __init__(self, replayer: Replayer, extent: LogExtent) -> None:
        self._replayer = replayer
        self._number = extent.log_partition
        self._now_ms = extent.now_ms
        self._right = _Strand(replayer.new_world(replayer.partitions), extent.log_partition, extent)
        self._astray = _Strand(replayer.new_world(1), 0, extent)
        self._pauses = Pauses(extent.log_partition, extent.now_ms)
        self._last: dict[Key, tuple[Tenure, str]] = {}
        self._rivals: dict[tuple[Key, Owner], ReplayRow] = {}
        self._counts: Counter[tuple[str, Verdict]] = Counter()

    def apply(self, record: Record) -> Iterable[ReplayRow]:
        time_ms = max(record.seen_ms, self._replayer.before.get((self._number, record.piece), record.seen_ms))
        verdict = self._right.apply(record.offset, time_ms, record.value)
        if record.kind == RELEASE_GROUP:
            self._astray.apply(record.offset, time_ms, record.value)
            return self._shown(self._pauses.add(record, time_ms))
        self._counts[record.kind, verdict] += 1
        if verdict is Verdict.MISPLACED:
            self._astray.apply(record.offset, time_ms, record.value)
            ended = self._astray.world.take_ended(0)
            return self._shown(row for one in ended for row in self._span(self._astray.world, one, misplaced=True))
        if verdict is Verdict.IGNORED:
            return self._rival(record, time_ms) if record.kind == HEARTBEAT else ()
        ended = self._right.world.take_ended(self._number)
        return self._shown(row for one in ended for row in self._span(self._right.world, one)) if ended else ()

    def finish(self) -> Iterator[ReplayRow]:
        for strand in (self._right, self._astray):
            for tenure in strand.world.tenures():
                yield from self._shown(self._span(strand.world, tenure, misplaced=strand is self._astray))
        for tenure, ended in self._last.values():
            if ended != HELD:
                yield from self._shown(self._gap(tenure, ended, None))
        yield from self._shown(self._pauses.finish())
        yield from self._rivals.values()
        for claim in self._right.world.claims():
            yield self._claim(claim)
        for (kind, verdict), times in self._counts.items():
            yield {"kind": "count", "record": kind, "verdict": verdict.value, "times": times}

    def _shown(self, rows: Iterable[ReplayRow]) -> Iterable[ReplayRow]:
        since_ms = self._replayer.since_ms
        return [row for row in rows if row["to_ms"] is None or row["to_ms"] >= since_ms]

    # ---- rows ---------------------------------------------------------------------------------------

    def _span(self, world: World, tenure: Tenure, *, misplaced: bool = False) -> Iterator[ReplayRow]:
        ended = self._how_ended(world, tenure)
        yield {
            "kind": "span",
            "log_partition": self._number,
            **tenure.key._asdict(),
            **tenure.owner._asdict(),
            "misplaced": misplaced,
            "token": tenure.token,
            "began": tenure.began.value,
            "ended": ended,
            "from_offset": tenure.since,
            "from_ms": tenure.since_ms,
            "to_offset": tenure.until,
            "to_ms": tenure.until_ms,
            "now_ms": self._now_ms,
            "rank": -tenure.since_ms,
        }
        if misplaced:
            return
        if tenure.key in self._last:
            before, before_ended = self._last[tenure.key]
            yield from self._gap(before, before_ended, tenure)
            if any(overlaps((before, tenure))):
                yield {"kind": "overlap", "to_ms": tenure.until_ms}
        self._last[tenure.key] = tenure, ended

    def _how_ended(self, world: World, tenure: Tenure) -> str:
        """Asked at once after a tenure ended, so pauses in force are those that were in force then."""
        if tenure.ended is None:
            return HELD if self._now_ms <= tenure.until_ms else EXPIRED
        if tenure.ended is Ended.RELEASED and any(one.by != tenure.owner for one in world.pauses(tenure.key.group)):
            return PAUSED
        return tenure.ended.value

    def _gap(self, before: Tenure, ended: str, after: Tenure | None) -> Iterator[ReplayRow]:
        """The time between two spans, or since the last one, if it is long."""
        from_ms, to_ms = before.until_ms, self._now_ms
        if after is not None:
            found = next(gaps((before, after)), None)
            to_ms = from_ms if found is None else found.to_ms
        if to_ms - from_ms > self._replayer.gap_ms:
            yield {
                "kind": "gap",
                "log_partition": self._number,
                **before.key._asdict(),
                "client": before.owner.client,
                "next_client": None if after is None else after.owner.client,
                "ended": ended,
                "from_ms": from_ms,
                "to_ms": None if after is None else to_ms,
                "gap_ms": to_ms - from_ms,
                "paused_ms": self._pauses.within(before.key.group, from_ms, to_ms),
                "rank": from_ms - to_ms,
            }

    def _rival(self, record: Record, time_ms: int) -> Iterable[ReplayRow]:
        """A heartbeat that did not count is a rival's if somebody else's claim holds."""
        claim = self._right.world.claim_of(*record.key)
        if claim is None or claim.owner is None or not claim.holds(time_ms) or time_ms < self._replayer.since_ms:
            return ()
        fields = split(record.value)
        assert not isinstance(fields, Unreadable), record
        writer = Owner(fields[2], fields[1])
        full = list(self._rivals.values()) if len(self._rivals) >= _RIVALS_KEPT else []
        if full:
            self._rivals.clear()
        row = self._rivals.setdefault(
            (record.key, writer),
            {
                "kind": "rival",
                "log_partition": self._number,
                **record.key._asdict(),
                **writer._asdict(),
                "owner_client": claim.owner.client,
                "owner_instance": claim.owner.instance,
                "from_offset": record.offset,
                "from_ms": time_ms,
                "heartbeats": 0,
            },
        )
        heartbeats = row["heartbeats"] + 1
        row |= {"heartbeats": heartbeats, "to_offset": record.offset, "to_ms": time_ms, "rank": -heartbeats}
        return full

    def _claim(self, claim: Claim) -> ReplayRow:
        owner, taken, released = claim.owner, claim.messages, claim.released
        freshness = claim.freshness(self._now_ms)
        return {
            "kind": "claim",
            "log_partition": claim.log_partition,
            **claim.key._asdict(),
            "client": owner.client if owner else None,
            "instance": owner.instance if owner else None,
            "token": claim.token,
            "freshness": freshness.value if freshness else None,
            "from_ms": claim.since_ms,
            "heartbeat_offset": claim.heartbeat_at,
            "heartbeat_ms": claim.heartbeat_ms,
            "fresh_until_ms": claim.fresh_until_ms,
            "holds_until_ms": claim.holds_until_ms,
            "next_offset": claim.offset,
            "taken_offset": taken.at if taken else None,
            "taken_to": taken.proposed if taken else None,
            "taken_token": taken.token if taken else None,
            "released_client": released.owner.client if released else None,
            "released_instance": released.owner.instance if released else None,
            "released_offset": released.at if released else None,
            "released_ms": released.time_ms if released else None,
            "released_next": released.offset if released else None,
            "now_ms": self._now_ms,
            "rank": 0,
        }
