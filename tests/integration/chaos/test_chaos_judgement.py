"""The arithmetic of a chaos run: made-up evidence gets the verdict and the times that it deserves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import pytest

from chaos import __main__ as command
from chaos import evidence, rebalance, timing
from chaos.evidence import Handled, Happening
from chaos.load import Load
from chaos.rebalance import Outcome, Settings
from chaos.timing import Change
from keylane.core.partitions import partition_number
from keylane.core.plans import Plan

PARTITIONS = 10
SETTINGS = Settings(seconds=6, seed=1, rate=10)
BEFORE = Plan({"a": [0, 1], "b": [2]})
AFTER = Plan({"a": [0], "b": [1, 2], "c": []})
ADD = Change(10.0, "add", "c", BEFORE, AFTER)


def at(at_s: float, partition: int, by: str, sequence: int = 0) -> Handled:
    return Handled(at_s, f"k{partition}", partition, sequence, by)


class Sent:
    """What a load remembers."""

    longest_gap_s = 0.0

    def __init__(self, keys: dict[int, str]) -> None:
        self.keys = keys


def judged(handled: list[Handled], sent: int, changes: list[Change]) -> Outcome:
    source = cast("Load", Sent(dict.fromkeys(range(1, sent + 1), "k1")))
    return rebalance.judged(SETTINGS, source, handled, changes, (9.0, 20.0, 0.0))


def walk(seed: int, steps: int) -> list[tuple[str, str]]:
    chance = random.Random(seed)  # noqa: S311 - the same seed makes the same run
    present = list(rebalance.NAMES[:3])
    made: list[tuple[str, str]] = []
    for _ in range(steps):
        verb, member = rebalance.choose(chance, present)
        if verb == "add":
            present.append(member)
        else:
            present.remove(member)
        assert rebalance.FEWEST <= len(present) <= len(rebalance.NAMES)
        made.append((verb, member))
    return made


def test_the_seed_decides_the_changes() -> None:
    assert walk(5, 200) == walk(5, 200)
    assert walk(5, 200) != walk(6, 200)
    assert {verb for verb, _ in walk(5, 200)} == {"add", "drop"}
    assert {member for _, member in walk(5, 200)} == set(rebalance.NAMES)


def test_evidence_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "evidence"
    file.write_bytes(b"ready\n1500000000 orders.k7 3 a\n2500000000 orders.k7 4 a\n2600000000 orders.k")
    place = partition_number("k7", PARTITIONS)
    assert evidence.read(file, "a#1", PARTITIONS) == [
        Handled(1.5, "k7", place, 3, "a#1"),
        Handled(2.5, "k7", place, 4, "a#1"),
    ]


def test_logs_are_merged_by_time_and_keep_each_members_order() -> None:
    one = [at(1.0, 0, "a", 1), at(3.0, 0, "a", 3), at(3.0, 0, "a", 2)]
    two = [at(2.0, 1, "b", 4)]
    assert [entry.sequence for entry in evidence.merged([one, two])] == [1, 4, 3, 2]


def test_a_moved_partition_waits_for_its_new_owner() -> None:
    handled = [at(9.9, 1, "a"), at(10.1, 1, "a"), at(10.4, 1, "b"), at(10.5, 1, "b")]
    (wait,) = timing.waits([ADD], handled)
    assert (wait.verb, wait.partition) == ("add", 1)
    assert wait.seconds == pytest.approx(0.4)


def test_a_partition_that_moves_again_waits_for_whoever_owns_it_then() -> None:
    back = Change(13.0, "drop", "c", AFTER, BEFORE)
    handled = [at(9.9, 1, "a"), at(13.5, 1, "a")]
    assert [wait.seconds for wait in timing.waits([ADD, back], handled)] == [
        pytest.approx(3.5),
        pytest.approx(0.5),
    ]


def test_a_partition_that_nobody_takes_has_no_time() -> None:
    waits = timing.waits([ADD], [at(9.9, 1, "a"), at(10.2, 1, "a")])
    assert [wait.seconds for wait in waits] == [None]
    assert timing.summary([wait.seconds for wait in waits])["never"] == 1


def test_gaps_are_of_partitions_that_stayed_until_the_next_change() -> None:
    steady = [at(9.9 + step / 10, 2, "b") for step in range(22)]
    halting = [at(9.9, 0, "a"), at(10.1, 0, "a"), at(10.9, 0, "a"), at(11.95, 0, "a")]
    found = {gap.partition: gap for gap in timing.gaps([ADD], evidence.merged([steady, halting]), 12.0)}
    assert set(found) == {0, 2}, "partition 1 moved"
    assert found[0].seconds == pytest.approx(1.05)
    assert found[2].seconds == pytest.approx(0.1)
    assert not found[0].untouched, "a lost a partition"


def test_a_partition_still_waiting_for_an_earlier_change_is_no_gap_of_this_one() -> None:
    stay = Change(10.0, "add", "c", BEFORE, BEFORE)
    assert timing.gaps([stay], [at(9.9, 0, "b"), at(11.0, 0, "a")], 12.0) == []


def test_members_that_lose_and_gain_nothing_are_told_apart() -> None:
    change = Change(1.0, "drop", "c", Plan({"a": [0], "b": [1], "c": [2]}), Plan({"a": [0], "b": [1, 2]}))
    assert change.untouched == {"a"}
    assert change.moved == {2}


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [timing.percentile(values, share) for share in (0.5, 0.95, 1.0)] == [50.0, 95.0, 100.0]
    assert timing.percentile([7.0], 0.5) == 7.0


@pytest.mark.parametrize(
    ("handled", "fault"),
    [
        ([1, 2, 3], None),
        ([1, 3], "lost: 2 of key k1: nobody"),
        ([1, 2, 2, 3], "duplicated: 2 of key k1: a at 1.500 s, a at 2.000 s; after add c at 1.000 s"),
        ([1, 3, 2], "out of order: 2 of key k1: a at 2.000 s; after add c at 1.000 s"),
        ([1, 2, 3, 4], "unknown: 4 of key ?: a at 2.500 s; after add c at 1.000 s"),
    ],
)
def test_every_fault_fails_the_run_and_is_explained(
    handled: list[int], fault: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [at(10.0 + 0.5 * number, 1, "a", sequence) for number, sequence in enumerate(handled)]

    async def made_up(settings: Settings, say: object) -> Outcome:
        return judged(lines, 3, [ADD])

    monkeypatch.setattr(rebalance, "run", made_up)
    assert command.main(["rebalance"]) == (0 if fault is None else 1)
    assert (fault or "lost 0, duplicated 0, out of order 0") in capsys.readouterr().out


def test_only_the_first_faults_are_explained() -> None:
    found = evidence.verdict(range(1, 1001), [])
    lines = evidence.explained(found, [], {}, [Happening(1.0, "add c")], 0.0)
    assert len(lines) == evidence.MOST_EXPLAINED


@pytest.mark.parametrize(
    "arguments",
    [("--rate", "0"), ("--every", "-1"), ("--seconds", "3", "--every", "2"), ("--peer", "rust"), ("--seed", "x")],
)
def test_bad_arguments_are_refused_at_once(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(["rebalance", *arguments])
    assert refused.value.code == 2
    assert "error:" in capsys.readouterr().err
