"""The rules of the audit against a dumb version of themselves, on random pasts: many small ones in one go."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import pytest
from pyspark.sql import Observation

from keylane.spark.pipelines import audit_rules as rules
from keylane.testing import Effect, judge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

CASES = 400
DDL = (
    "kind STRING, journal_sequence BIGINT, writer STRING, member STRING, instance STRING, batch BIGINT, row INT, "
    "pin STRING, revision BIGINT, sequence BIGINT, source_sequence BIGINT, key STRING, partition INT, delivered INT, "
    "started_ns BIGINT, ended_ns BIGINT, outcome STRING"
)


class Final(NamedTuple):
    """A final record, in an order that its line and its times agree on."""

    key: str
    sequence: int
    instance: str
    pin: str
    started: int
    ended: int
    batch: int
    row: int
    outcome: str = "done"

    @property
    def place(self) -> tuple[int, int]:
        return self.batch, self.row


def random_past(key: str, sequences: Iterable[int], seed: int) -> list[Final]:
    """A few instances do the messages of a key: mostly in order, mostly once."""
    chance = random.Random(seed)  # noqa: S311 - the same seed makes the same past
    done: list[tuple[int, str, str, int, int]] = []
    clock = chance.randrange(5)
    instance, pin = "i0", "p0"
    for sequence in sequences:
        if chance.random() < 0.15:
            continue
        if chance.random() < 0.2:
            instance, pin = f"i{chance.randrange(3)}", f"p{chance.randrange(3)}"
        started = max(0, clock + chance.randrange(-6 if chance.random() < 0.2 else 0, 3))
        ended = started + 1 + (chance.randrange(20) if chance.random() < 0.1 else 0)
        done.append((sequence, instance, pin, started, ended))
        clock = max(clock, started) + 2
        if chance.random() < 0.1:
            done.append((sequence, f"i{chance.randrange(3)}", pin, clock, clock + 1))
    finals = []
    rows: dict[str, count[int]] = defaultdict(count)
    in_order = sorted(done, key=lambda act: (act[4], act[1], act[0]))
    for place, (sequence, one, its_pin, started, ended) in enumerate(in_order):
        number = next(rows[one])
        # No two end at one moment: which of them is first would be anybody's choice.
        finals.append(
            Final(key, sequence, one, its_pin, 1000 * started, 1000 * ended + place, 1 + number // 3, number % 3)
        )
    return finals


# ---- the dumb version -----------------------------------------------------------------------------------


def firsts(finals: list[Final]) -> dict[int, Final]:
    found: dict[int, Final] = {}
    for one in finals:
        known = found.get(one.sequence)
        if known is None or one.ended < known.ended:
            found[one.sequence] = one
    return found


def dumb_order(finals: list[Final], tolerance: int) -> set[int]:
    first = firsts(finals)
    return {
        s.sequence
        for s in first.values()
        for t in first.values()
        if t.sequence > s.sequence
        and (t.place < s.place if t.instance == s.instance else t.ended + tolerance < s.ended)
    }


def dumb_tenures(finals: list[Final]) -> dict[tuple[str, str], list[Final]]:
    found: dict[tuple[str, str], list[Final]] = defaultdict(list)
    for one in finals:
        found[one.instance, one.pin].append(one)
    return found


def dumb_owners(finals: list[Final], tolerance: int) -> int:
    tenures = list(dumb_tenures(finals).items())
    pairs = 0
    for place, (a, of_a) in enumerate(tenures):
        for b, of_b in tenures[place + 1 :]:
            last_a, last_b = max(one.started for one in of_a), max(one.started for one in of_b)
            first_a, first_b = min(one.started for one in of_a), min(one.started for one in of_b)
            pairs += a[0] != b[0] and last_a - first_b > tolerance and last_b - first_a > tolerance
    return pairs


def dumb_late(finals: list[Final], tolerance: int) -> set[tuple[int, str, int]]:
    tenures = dumb_tenures(finals)
    late = set()
    for a, of_a in tenures.items():
        begun = min(one.started for one in of_a)
        successors = [
            min(one.ended for one in of_b)
            for b, of_b in tenures.items()
            if b[0] != a[0] and min(one.started for one in of_b) > begun
        ]
        if successors:
            late |= {
                (one.sequence, one.instance, one.ended)
                for one in of_a
                if one.started < min(successors) < one.ended - tolerance
            }
    return late


def is_flawless(finals: list[Final]) -> bool:
    """One after the other, by the clock and by every line, and no instance comes back."""
    in_order = sorted(finals, key=lambda one: one.sequence)
    return all(
        a.sequence < b.sequence and a.ended < b.started and (a.instance != b.instance or a.place < b.place)
        for a, b in itertools.pairwise(in_order)
    ) and len({(one.instance, one.pin) for one in finals}) == 1 + sum(
        (a.instance, a.pin) != (b.instance, b.pin) for a, b in itertools.pairwise(in_order)
    )


# ---- both -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerance", [0, 3000])
def test_rules_agree_with_a_dumb_version(spark: SparkSession, tolerance: int) -> None:
    cases = {f"k{number}": list(range(1 + 100 * number, 13 + 100 * number)) for number in range(CASES)}
    pasts = {key: random_past(key, sequences, seed) for seed, (key, sequences) in enumerate(cases.items())}
    # Two tenures that begin at one moment have no order: such cases prove nothing here.
    for key, finals in list(pasts.items()):
        begins = [min(one.started for one in of) for of in dumb_tenures(finals).values()]
        if len(set(begins)) < len(begins):
            del pasts[key]
    assert len(pasts) > CASES // 2
    final = rules.finals(rules.records(journal(spark, [one for past in pasts.values() for one in past]), copies=False))
    finals_seen = Observation()
    found_suspects = rules.of_suspects(final, rules.suspects(final, finals_seen))
    suspects = {row["key"] for row in found_suspects.select("key").distinct().collect()}
    assert finals_seen.get["finals"] == sum(map(len, pasts.values()))
    pairs = rules.successions(rules.tenures(final))
    ordered = rules.order(rules.effects(final), tolerance)
    found = rules.together(
        [
            rules.order_findings(ordered),
            rules.owner_findings(pairs, tolerance),
            rules.late_findings(final, pairs, tolerance),
        ]
    ).collect()
    got: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for row in found:
        got[row["kind"]].append((row["key"], row["sequence"], row["record"]["ended_ns"]))

    expected_order = {(key, sequence) for key, past in pasts.items() for sequence in dumb_order(past, tolerance)}
    assert {one[:2] for one in got[rules.ORDER]} == expected_order
    expected_late = {(key, one[0], one[2]) for key, past in pasts.items() for one in dumb_late(past, tolerance)}
    assert set(got[rules.LATE]) == expected_late
    owners = {key: dumb_owners(past, tolerance) for key, past in pasts.items()}
    counted: dict[str, int] = defaultdict(int)
    for key, _, _ in got[rules.OWNERS]:
        counted[key] += 1
    assert counted == {key: pairs for key, pairs in owners.items() if pairs}
    repeated = {
        (key, sequence)
        for key, past in pasts.items()
        for sequence in judge([], [Effect(one.key, one.sequence) for one in past]).duplicated
    }
    assert {one[:2] for one in got[rules.DUPLICATE]} == repeated
    assert {row["key"] for row in found} <= suspects, "what is told of a key must make it a suspect"
    assert not any(key in suspects for key, past in pasts.items() if is_flawless(past))
    assert all((expected_order, expected_late, counted, repeated)), (
        "the cases hold none of some kind: they test nothing"
    )
    if tolerance == 0:
        judged = {
            (key, sequence)
            for key, past in pasts.items()
            for sequence in judge([], [Effect(one.key, one.sequence) for one in past]).out_of_order
        }
        assert judged >= expected_order


def test_a_line_counts_by_its_notes_and_a_tenure_by_its_clock(spark: SparkSession) -> None:
    finals = [
        # Noted in the other order than the clock says.
        Final("noted", 1, "i0", "p0", 0, 10, 1, 1),
        Final("noted", 2, "i0", "p0", 10, 20, 1, 0),
        # A clock that was set back, within one line: that proves nothing.
        Final("set back", 1, "i0", "p0", 0, 20, 1, 2),
        Final("set back", 2, "i0", "p0", 5, 10, 1, 3),
        # The next one began while the first was still at work on an earlier message.
        Final("late", 1, "i0", "p0", 0, 30, 1, 4),
        Final("late", 2, "i1", "p1", 10, 20, 1, 0),
    ]
    final = rules.finals(rules.records(journal(spark, finals), copies=False))
    suspects = rules.of_suspects(final, rules.suspects(final, Observation()))
    assert {row["key"] for row in suspects.collect()} == {"noted", "late"}
    told = rules.order_findings(rules.order(rules.effects(final), 0)).collect()
    assert {(row["key"], row["sequence"], row["kind"]) for row in told} == {
        ("noted", 1, rules.ORDER),
        ("late", 1, rules.ORDER),
    }


def test_what_is_put_aside_is_not_lost_and_breaks_no_order(spark: SparkSession) -> None:
    def records(key: str, *told: tuple[int, str]) -> list[Final]:
        return [
            Final(key, sequence, "i0" if outcome != "retried" else "i1", "p", 10 * row, 10 * row + 5, 1, row, outcome)
            for row, (sequence, outcome) in enumerate(told)
        ]

    pasts = [
        *records("released", (1, "parked"), (2, "parked"), (1, "done"), (2, "done"), (3, "done")),
        *records("passed", (11, "parked"), (12, "done")),
        *records("too late", (21, "parked"), (22, "done"), (21, "done")),
        *records("retried", (31, "delayed"), (32, "done"), (31, "delayed"), (33, "done"), (31, "retried")),
        *records("given up", (41, "delayed"), (42, "done"), (41, "retried_dead")),
        *records("failed", (51, "failed"), (52, "done")),
    ]
    of = rules.records(journal(spark, pasts), copies=False)
    final = rules.finals(of)
    pairs = rules.successions(rules.tenures(final))
    told = rules.together(
        [
            rules.order_findings(rules.order(rules.effects(final), 0)),
            rules.owner_findings(pairs, 0),
            rules.late_findings(final, pairs, 0),
        ]
    ).collect()
    assert [(row["key"], row["sequence"], row["kind"]) for row in told] == [("too late", 21, rules.ORDER)]
    stored = spark.createDataFrame([(one,) for one in sorted({one.sequence for one in pasts})], "sequence BIGINT")
    assert [row["sequence"] for row in rules.unhandled(stored, of).collect()] == [51]


def journal(spark: SparkSession, finals: list[Final]) -> DataFrame:
    rows = [
        (
            "record", 1, "w", "m", one.instance, one.batch, one.row, one.pin, 1, one.sequence, one.sequence, one.key, 0,
            1, one.started, one.ended, one.outcome,
        )
        for one in finals
    ]  # fmt: skip
    return spark.createDataFrame(rows, DDL)
