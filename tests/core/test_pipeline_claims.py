"""A coordination log replayed in pieces and tasks, without Spark: the world that one reader has, on any prefix."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from keylane.core.claim_facts import LogRecord, Owner, Tenure, Verdict, gaps
from keylane.core.claim_records import HEARTBEAT, ReleaseGroup, decode, encode
from keylane.core.world import World, replay
from keylane.marshal.log import Bounds
from tests.core.claim_histories import INTERVAL_S, history, told_claim

pa = pytest.importorskip("pyarrow")

from keylane.spark.pipelines.claims_replay import (  # noqa: E402 - needs pyarrow  # noqa: E402 - needs pyarrow
    ENDS,
    ROWS,
    LogPiece,
    LogReader,
    Record,
    Replayer,
    Survey,
    first_trouble,
    measure,
)

Row = Mapping[str, Any]
Rows = list[dict[str, Any]]

SHUFFLED = pa.schema(
    [
        *((name, pa.int64()) for name in ("log_partition", "offset", "piece", "seen_ms", "partition", "task")),
        *((name, pa.string()) for name in ("kind", "group", "topic")),
        ("value", pa.binary()),
    ]
)
LONG_AGO_MS = 0
GAP_MS = 4000


# ---- what Spark does, in a few lines ----------------------------------------------------------------------


def read_in_pieces(dice: random.Random, records: list[LogRecord]) -> Rows:
    """As tasks read it: each some neighbours, in Arrow batches of any size."""
    found: Rows = []
    for piece in cut(dice, records, 4):
        batches = [
            pa.RecordBatch.from_pylist([dict(zip(ROWS.names, record, strict=True)) for record in batch], schema=ROWS)
            for batch in cut(dice, piece, 5)
        ]
        for table in LogReader()(batches):
            found += table.to_pylist()
    return found


def cut(dice: random.Random, things: list[Any], most: int) -> Iterable[list[Any]]:
    places = sorted(dice.randrange(len(things) + 1) for _ in range(dice.randrange(most)))
    return [things[low:high] for low, high in zip([0, *places], [*places, len(things)], strict=True)]


def pieces_of(rows: Rows, until_ms: int | None) -> list[LogPiece]:
    found = []
    for number, first in {(row["log_partition"], row["piece"]) for row in rows}:
        mine = [row for row in rows if (row["log_partition"], row["piece"]) == (number, first)]
        kept = [row for row in mine if until_ms is None or row["seen_ms"] <= until_ms]
        found.append(
            LogPiece(
                log_partition=number,
                first=min(row["offset"] for row in mine),
                last=max(row["offset"] for row in mine),
                records=len(mine),
                newest_ms=max(row["seen_ms"] for row in mine),
                first_ms=mine[0]["time_ms"],
                kept=len(kept),
                kept_last=max((row["offset"] for row in kept), default=None),
                kept_ms=max((row["seen_ms"] for row in kept), default=None),
                unreadable=sum(row["kind"] is None for row in kept),
            )
        )
    return found


def replay_in_tasks(dice: random.Random, rows: Rows, survey: Survey, partitions: int, since_ms: int) -> Rows:
    replayer = Replayer(
        interval_s=INTERVAL_S,
        partitions=partitions,
        placing="topic_partition",
        first_offset=0,
        extents=survey.extents,
        before=survey.before,
        since_ms=since_ms,
        gap_ms=GAP_MS,
    )
    tasks = dice.randint(1, 5)
    homes: dict[tuple[Any, ...], int] = {}
    by_task: list[Rows] = [[] for _ in range(tasks)]
    for row in rows:
        key = (row["log_partition"], row["group"], row["topic"], row["partition"])
        home = homes.setdefault(key, dice.randrange(tasks))
        for task in range(tasks) if row["kind"] == "ReleaseGroup" else [home] if row["kind"] else []:
            by_task[task].append({name: row.get(name, task) for name in Record._fields})
    found: Rows = []
    for mine in by_task:
        mine.sort(key=lambda row: (row["log_partition"], row["offset"]))
        batches = [pa.RecordBatch.from_pylist(batch, schema=SHUFFLED) for batch in cut(dice, mine, 4)]
        for table in replayer(batches):
            found += table.to_pylist()
    return found


def kind_of(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row["kind"] == kind]


# ---- what one reader says, in the same columns ------------------------------------------------------------


def told_tenure(tenure: Tenure) -> tuple[Any, ...]:
    return (
        *tenure.key, tenure.log_partition, *tenure.owner, tenure.token, tenure.began.value, tenure.since,
        tenure.since_ms, tenure.until, tenure.until_ms,
    )  # fmt: skip


SPAN = (
    "group", "topic", "partition", "log_partition", "client", "instance", "token", "began", "from_offset", "from_ms",
    "to_offset", "to_ms",
)  # fmt: skip


def rivals_of(world: World, records: list[LogRecord]) -> Counter[tuple[Any, ...]]:
    """Heartbeats that did not count while somebody else's claim held."""
    found: Counter[tuple[Any, ...]] = Counter()
    for record in records:
        verdict, message = world.apply(record), decode(record.value)
        if verdict is Verdict.IGNORED and type(message).__name__ == HEARTBEAT:
            key, writer = (message.group, message.topic, message.partition), Owner(message.client, message.instance)  # type: ignore[union-attr]
            if world.holds(*key):
                found[(*key, *writer)] += 1
    return found


# ---- tests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_the_same_world_as_one_reader_has_on_any_prefix(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - dice of a test
    partitions, first = dice.choice([1, 1, 3]), dice.choice([0, 700])
    log = history(dice, dice.randint(1, 120), partitions, first=first, strays=dice.random() < 0.5)
    holes, begins = dice.choice([(False, first), (True, first), (True, 0)])
    bounds = {record.partition: Bounds(begins, record.offset + 1) for record in log}
    for _ in range(2):
        stops = {number: dice.randrange(first + 1, first + 150) for number in range(partitions)}
        until_ms = dice.choice([None, dice.choice(log).time_ms])
        part = [record for record in log if record.offset < stops[record.partition]]
        rows = read_in_pieces(dice, part)
        survey = measure(pieces_of(rows, until_ms), bounds, until_ms, holes=holes)
        found = replay_in_tasks(dice, rows, survey, partitions, LONG_AGO_MS)

        world = World(INTERVAL_S, partitions, keep_history=True)
        for number in survey.extents:
            world.begins(number, *bounds[number])
        prefix = up_to(part, until_ms)
        rivals = rivals_of(world, prefix)

        expected = [told_claim(claim, world.now_ms(claim.log_partition) or 0) for claim in world.claims()]
        claims = [{name: row[name] for name in expected[0]} for row in kind_of(found, "claim")] if expected else []
        assert by_key(claims) == by_key(expected)
        spans = [row for row in kind_of(found, "span") if not row["misplaced"]]
        tenures = world.tenures()
        assert sorted(tuple(row[name] for name in SPAN) for row in spans) == sorted(map(told_tenure, tenures))
        assert {row["ended"] for row in spans} <= set(ENDS)
        ended = [row for row in kind_of(found, "gap") if row["to_ms"] is not None]
        assert sorted(
            (row["group"], row["topic"], row["partition"], row["from_ms"], row["to_ms"]) for row in ended
        ) == [(*gap.key, gap.from_ms, gap.to_ms) for gap in gaps(tenures) if gap.to_ms - gap.from_ms > GAP_MS]
        assert kind_of(found, "overlap") == []
        counted = kind_of(found, "count")
        assert sum(row["times"] for row in counted if row["verdict"] == "misplaced") == world.misplaced
        assert sum(one.unreadable for one in survey.extents.values()) == world.unreadable
        assert sum(one.records for one in survey.extents.values()) == len(prefix)
        assert rivals == {
            tuple(row[name] for name in SPAN[:3] + SPAN[4:6]): row["heartbeats"] for row in kind_of(found, "rival")
        }
        in_force = [row for row in kind_of(found, "pause") if row["ended"] == "in_force"]
        assert sorted((row["group"], row["log_partition"], row["from_offset"]) for row in in_force) == sorted(
            (pause.group, pause.log_partition, pause.at) for pause in world.pauses()
        )


def up_to(records: list[LogRecord], until_ms: int | None) -> list[LogRecord]:
    """What `replay` applies."""
    applied: list[LogRecord] = []
    over: set[int] = set()
    for record in records:
        if until_ms is not None and record.time_ms > until_ms:
            over.add(record.partition)
        if record.partition not in over:
            applied.append(record)
    return applied


def by_key(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["group"], row["topic"], row["partition"]))


def test_the_prefix_at_a_time_is_that_of_replay() -> None:
    """`up_to` above is what the tests compare with: it is what the core does."""
    dice = random.Random(5)  # noqa: S311 - dice of a test
    log = history(dice, 100, 1, first=0, strays=False)
    for record in log[::7]:
        plain = replay(log, INTERVAL_S, until_ms=record.time_ms)
        assert plain.snapshot() == replay(up_to(log, record.time_ms), INTERVAL_S).snapshot()


def test_a_time_that_the_log_had_passed_before_a_piece_began() -> None:
    """A broker's clock went back: what follows the first record that is too young is not in the prefix."""
    log = [LogRecord(0, offset, time_ms, b"noise") for offset, time_ms in enumerate([1000, 5000, 4000, 4100])]
    rows = [row for part in (log[:2], log[2:]) for row in read_in_pieces(NoDice(), part)]
    survey = measure(pieces_of(rows, 4500), {0: Bounds(0, 4)}, 4500, holes=False)
    assert (survey.extents[0].stop, survey.extents[0].now_ms, survey.extents[0].records) == (1, 1000, 1)
    assert survey.before == {(0, 2): 5000}


class NoDice(random.Random):
    """Never cuts."""

    def randrange(self, *_: int) -> int:  # type: ignore[override]  # it is asked for one number at a time
        return 0


def told_pauses(*pauses: tuple[int, int]) -> list[tuple[Any, ...]]:
    """What becomes of pauses: each at a second, until a second. The log ends at second 100."""
    log = [
        LogRecord(0, offset, second * 1000, encode(ReleaseGroup("1", "admin", "g", until, second)))
        for offset, (second, until) in enumerate(pauses)
    ]
    log.append(LogRecord(0, len(log), 100_000, b"noise"))
    dice = random.Random(1)  # noqa: S311 - dice of a test
    rows = read_in_pieces(dice, log)
    survey = measure(pieces_of(rows, None), {0: Bounds(0, len(log))}, None, holes=False)
    found = kind_of(replay_in_tasks(dice, rows, survey, 1, LONG_AGO_MS), "pause")
    return sorted((row["from_ms"] // 1000, row["to_ms"] // 1000, row["ended"]) for row in found)


def test_how_pauses_end() -> None:
    assert told_pauses((10, 30)) == [(10, 30, "expired")]
    assert told_pauses((10, 30), (50, 60)) == [(10, 30, "expired"), (50, 60, "expired")]
    assert told_pauses((10, 30), (20, 0)) == [(10, 20, "resumed")]
    assert told_pauses((10, 30), (20, 200)) == [(10, 20, "replaced"), (20, 200, "in_force")]
    assert told_pauses((10, 1 << 62)) == [(10, 253_402_300_799, "in_force")]
    assert told_pauses((10, 0), (20, 20)) == []


def piece(first: int, last: int, records: int | None = None, *, number: int = 0) -> LogPiece:
    count = last - first + 1 if records is None else records
    return LogPiece(number, first, last, count, 0, 0, count, last, 0, 0)


@pytest.mark.parametrize(
    ("pieces", "trouble"),
    [
        ([piece(5, 9), piece(10, 19)], None),
        ([piece(10, 19), piece(5, 9)], None),
        ([piece(5, 9), piece(11, 19)], (0, 11)),
        ([piece(5, 9), piece(10, 18)], (0, 19)),
        ([piece(5, 9, 4), piece(10, 19)], (0, 5)),
        ([piece(5, 12), piece(10, 19)], (0, 10)),
        ([], (0, 20)),
    ],
)
def test_a_log_that_was_trimmed_while_it_was_read_is_noticed(
    pieces: list[LogPiece], trouble: tuple[int, int] | None
) -> None:
    assert first_trouble(pieces, {0: 20}, holes=False) == trouble


def test_a_log_of_kafka_may_have_holes_but_nothing_twice() -> None:
    assert first_trouble([piece(5, 9, 3), piece(12, 17)], {0: 20, 1: 9}, holes=True) is None
    assert first_trouble([piece(5, 9), piece(9, 17)], {0: 20}, holes=True) == (0, 9)
