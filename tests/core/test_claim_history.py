"""The history of a coordination log, row by row: the world that one reader has, on any prefix."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from keylane.core.claim_facts import LogRecord, Owner, Tenure, Verdict, gaps
from keylane.core.claim_history import ENDS, HistoryScope, LogHistory
from keylane.core.claim_records import HEARTBEAT, ReleaseGroup, decode, encode
from keylane.core.world import World, replay
from tests.core.claim_histories import INTERVAL_S, history, told_claim

Row = Mapping[str, Any]
Rows = list[dict[str, Any]]

GAP_MS = 4000


def rows_of(
    records: list[LogRecord], bounds: Mapping[int, tuple[int, int]], partitions: int = 1, *, group: str | None = None
) -> tuple[Rows, list[LogHistory]]:
    """What the histories of all partitions say, and the histories."""
    rows: Rows = []
    histories = []
    for number in sorted({record.partition for record in records}):
        begins, end = bounds[number]
        one = LogHistory(
            INTERVAL_S,
            number,
            HistoryScope(since_ms=0, gap_ms=GAP_MS, group=group),
            partitions=partitions,
            placing="topic_partition",
            first_offset=0,
            begins=begins,
            end=end,
        )
        for record in records:
            if record.partition == number:
                rows += one.apply(record)
        rows += one.finish()
        histories.append(one)
    return rows, histories


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
    bounds = {record.partition: (dice.choice([first, 0]), record.offset + 1) for record in log}
    for _ in range(2):
        stops = {number: dice.randrange(first + 1, first + 150) for number in range(partitions)}
        until_ms = dice.choice([None, dice.choice(log).time_ms])
        prefix = up_to([record for record in log if record.offset < stops[record.partition]], until_ms)
        found, histories = rows_of(prefix, bounds, partitions)

        world = World(INTERVAL_S, partitions, keep_history=True)
        for one in histories:
            world.begins(one.number, *bounds[one.number])
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
        assert len(kind_of(found, "unreadable")) == world.unreadable
        assert sum(one.records for one in histories) == len(prefix)
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


def told_pauses(*pauses: tuple[int, int]) -> list[tuple[Any, ...]]:
    """What becomes of pauses: each at a second, until a second. The log ends at second 100."""
    log = [
        LogRecord(0, offset, second * 1000, encode(ReleaseGroup("1", "admin", "g", until, second)))
        for offset, (second, until) in enumerate(pauses)
    ]
    log.append(LogRecord(0, len(log), 100_000, b"noise"))
    found = kind_of(rows_of(log, {0: (0, len(log))})[0], "pause")
    return sorted((row["from_ms"] // 1000, row["to_ms"] // 1000, row["ended"]) for row in found)


def test_how_pauses_end() -> None:
    assert told_pauses((10, 30)) == [(10, 30, "expired")]
    assert told_pauses((10, 30), (50, 60)) == [(10, 30, "expired"), (50, 60, "expired")]
    assert told_pauses((10, 30), (20, 0)) == [(10, 20, "resumed")]
    assert told_pauses((10, 30), (20, 200)) == [(10, 20, "replaced"), (20, 200, "in_force")]
    assert told_pauses((10, 1 << 62)) == [(10, 253_402_300_799, "in_force")]
    assert told_pauses((10, 0), (20, 20)) == []


def test_one_group_of_many() -> None:
    """The rows of a group are those that a report on all groups has of it."""
    for seed in range(20):
        log = history(random.Random(seed), 120, 1, first=0, strays=False)  # noqa: S311 - dice of a test
        bounds = {0: (0, len(log))}
        everything, _ = rows_of(log, bounds)
        groups = {row["group"] for row in kind_of(everything, "claim")}
        for group in groups:
            mine, _ = rows_of(log, bounds, group=group)
            assert [row for row in mine if "group" in row] == [row for row in everything if row.get("group") == group]
        assert len(groups) > 1
