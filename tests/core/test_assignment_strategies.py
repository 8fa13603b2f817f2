"""The strategies of a fleet's leader: known answers, labels, and the figures that they must reach."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from keylane.core.assignment_strategies import (
    Assignment,
    AssignmentChange,
    LiveWorker,
    Strategy,
    assign,
    compare_assignments,
)
from keylane.core.fleet_partitions import Partition, hashed, listed
from keylane.errors import InvalidInput

STRATEGIES: list[Strategy] = ["consistent", "weighted", "sticky", "round_robin"]
KEEPING: list[Strategy] = ["consistent", "weighted", "sticky"]


def partitions(number: int, weights: Mapping[int, float] | None = None) -> tuple[Partition, ...]:
    return hashed(number, "orders.*", weights=weights).resolve().partitions


def workers(ids: Iterable[int], *labels: str) -> list[LiveWorker]:
    return [LiveWorker(worker, frozenset(labels)) for worker in ids]


def sizes(found: Assignment) -> Counter[int]:
    return Counter(dict.fromkeys(found.workers, 0)) + Counter(found.owners.values())


def wrong(value: object) -> Any:
    """A value of a type that the signature does not allow."""
    return value


# ---- figures ----------------------------------------------------------------------------------------


def scaled(
    strategy: Strategy, before: int, after: int, given: tuple[Partition, ...]
) -> tuple[AssignmentChange, AssignmentChange]:
    """How even it was, and what the change came to."""
    first = assign(given, workers(range(before)), strategy=strategy)
    then = assign(given, workers(range(after)), first, strategy=strategy)
    return (
        compare_assignments(None, first, given, workers(range(before))),
        compare_assignments(first, then, given, workers(range(after))),
    )


@pytest.mark.parametrize("strategy", KEEPING)
def test_one_worker_more_at_two_thousand_partitions(strategy: Strategy) -> None:
    before, change = scaled(strategy, 25, 26, partitions(2000))
    assert before.imbalance <= 1.15
    assert change.imbalance <= 1.15
    assert 60 <= change.moved <= 80
    assert change.moved_weight <= 0.04
    assert change.between_staying == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda source: source.uniform(1, 10), id="uniform"),
        pytest.param(lambda source: source.expovariate(1), id="exponential"),
        pytest.param(lambda source: min(source.paretovariate(1.2), 20), id="pareto"),
        pytest.param(lambda source: source.choice([1, 1, 1, 30]), id="few heavy"),
    ],
)
@pytest.mark.parametrize("strategy", ["weighted", "consistent"])
def test_ten_workers_more_by_weight(strategy: Strategy, draw: Callable[[random.Random], float], seed: int) -> None:
    source = random.Random(seed)  # noqa: S311 - not for security
    given = partitions(2000, {number: draw(source) for number in range(2000)})
    before, change = scaled(strategy, 100, 110, given)
    assert before.imbalance <= 1.2
    assert change.imbalance <= 1.2
    assert 0.05 <= change.moved_weight <= 0.15
    assert change.between_staying <= 5  # of a few heavy ones there is not always one that fits
    if strategy == "weighted":
        assert change.between_staying == 0


def test_a_hot_partition_is_the_only_thing_above_the_bound() -> None:
    given = partitions(100, {7: 60.0})
    found = assign(given, workers(range(10)), strategy="weighted")
    assert found.partitions_of(found.owners["7"]) == ("7",)
    assert max(size for worker, size in sizes(found).items() if worker != found.owners["7"]) == 11


@pytest.mark.parametrize("strategy", KEEPING)
def test_ten_thousand_partitions_take_well_under_a_second(strategy: Strategy) -> None:
    given, hundred = partitions(10_000), workers(range(100))
    started = time.process_time()
    first = assign(given, hundred, strategy=strategy)
    then = assign(given, workers(range(101)), first, strategy=strategy)
    assert time.process_time() - started < 1.5  # both together; 0.3 s where nothing else runs
    assert compare_assignments(first, then, given, workers(range(101))).moved <= 100


@pytest.mark.parametrize("strategy", KEEPING)
def test_only_what_a_lost_worker_had_moves(strategy: Strategy) -> None:
    given = partitions(2000)
    first = assign(given, workers(range(26)), strategy=strategy)
    left = [one for one in range(26) if one not in (3, 4, 17)]
    then = assign(given, workers(left), first, strategy=strategy)
    change = compare_assignments(first, then, given, workers(left))
    assert change.between_staying == 0
    assert change.moved == sum(sizes(first)[one] for one in (3, 4, 17))
    assert change.imbalance <= 1.15


@pytest.mark.parametrize("strategy", KEEPING)
def test_a_worker_that_comes_back_gets_its_own_partitions_back(strategy: Strategy) -> None:
    given = partitions(2000)
    first = assign(given, workers(range(25)), strategy=strategy)
    without = assign(given, workers(one for one in range(25) if one != 7), first, strategy=strategy)
    homes = dict.fromkeys(first.partitions_of(7), 7)
    assert assign(given, workers(range(25)), without, strategy=strategy, homes=homes) == first


def test_consistent_hashing_remembers_nearly_all_by_itself() -> None:
    given = partitions(2000)
    first = assign(given, workers(range(25)))
    returned = total = 0
    for worker in range(0, 25, 3):
        without = assign(given, workers(one for one in range(25) if one != worker), first)
        back = assign(given, workers(range(25)), without)
        had = first.partitions_of(worker)
        same = len({*had}.intersection(back.partitions_of(worker)))
        assert same >= 0.6 * len(had)
        returned, total = returned + same, total + len(had)
    assert returned >= 0.85 * total


def test_consistent_hashing_needs_no_assignment_before() -> None:
    given = partitions(2000)
    first = assign(given, workers(range(25)))
    grown = assign(given, workers(range(26)), first)
    anew = assign(given, workers(range(26)))
    assert sum(anew.owners[one] != owner for one, owner in grown.owners.items()) <= 0.06 * len(given)


# ---- the same everywhere ----------------------------------------------------------------------------


def test_known_answers() -> None:
    """These must never change: leaders of two versions would otherwise disagree about an empty fleet."""
    given, three = partitions(12), workers([0, 1, 5])
    found = {strategy: assign(given, three, strategy=strategy).owners.values() for strategy in STRATEGIES}
    assert {strategy: "".join(map(str, owners)) for strategy, owners in found.items()} == {
        "consistent": "051555000111",
        "weighted": "015015015015",
        "sticky": "015015015015",
        "round_robin": "015015015015",
    }


PROGRAM = """
import random, sys
from keylane.core.assignment_strategies import LiveWorker, assign
from keylane.core.fleet_partitions import hashed
source = random.Random(sys.argv[1])
given = list(hashed(300, "orders.*", weights={n: 1 + n % 7 for n in range(300)}).resolve().partitions)
there = [LiveWorker(n, frozenset("ab"[: n % 3]), 1 + n % 2) for n in range(9)]
source.shuffle(given); source.shuffle(there)
for strategy in ("consistent", "weighted", "sticky", "round_robin"):
    before = assign(given, sorted(there, key=lambda one: one.id)[:7], strategy=strategy)
    print(strategy, sorted(assign(given, there, before, strategy=strategy).owners.items()))
"""


def test_the_same_in_every_process_and_in_any_order() -> None:
    def output(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, seed], env=environment, capture_output=True, text=True, check=True
        ).stdout

    first = output("1")
    assert len(first.splitlines()) == 4
    assert output("2") == first


# ---- labels, capacities, small cases ----------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_labelled_partition_goes_only_to_its_pool(strategy: Strategy) -> None:
    given = listed(
        [f"dc.{number}" for number in range(40)], labels={f"dc.{number}": "gpu" for number in range(10)}
    ).resolve()
    labelled = {one.id for one in given.partitions if one.label}
    found = assign(given.partitions, [*workers([0, 1], "gpu", "eu"), *workers([2, 3])], strategy=strategy)
    assert {found.owners[one] for one in labelled} == {0, 1}
    assert Counter(found.owners[one] for one in labelled).keys() == {0, 1}
    assert len(found.owners) == 40
    assert found.waiting == ()
    if strategy != "round_robin":
        assert max(sizes(found).values()) <= 11


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_partition_waits_for_its_pool_then_spills_and_goes_back(strategy: Strategy) -> None:
    given = (*partitions(5), Partition("5", "5.orders.*", label="gpu"))
    waiting = assign(given, workers([0, 1]), strategy=strategy)
    assert waiting.waiting == ("5",)
    assert sorted(waiting.owners) == ["0", "1", "2", "3", "4"]
    spilled = assign(given, workers([0, 1]), waiting, strategy=strategy, spilled=["gpu"])
    assert spilled.waiting == ()
    assert spilled.owners["5"] in (0, 1)
    back = assign(given, [*workers([0, 1]), *workers([2], "gpu")], spilled, strategy=strategy, spilled=["gpu"])
    assert back.owners["5"] == 2


def test_pools_do_not_disturb_each_other() -> None:
    given = tuple(Partition(str(number), f"{number}.>", label="ab"[number % 2]) for number in range(100))
    before = [*workers([0, 1], "a"), *workers([2, 3], "b")]
    for strategy in KEEPING:
        first = assign(given, before, strategy=strategy)
        then = assign(given, [*before, *workers([4], "a")], first, strategy=strategy)
        assert [one for one in given if one.label == "b" and then.owners[one.id] != first.owners[one.id]] == []
        assert sizes(then)[4] >= 15


@pytest.mark.parametrize("strategy", KEEPING)
def test_twice_the_capacity_carries_twice_as_much(strategy: Strategy) -> None:
    there = [LiveWorker(0, capacity=2.0), LiveWorker(1), LiveWorker(2, capacity=0.5)]
    found = sizes(assign(partitions(700), there, strategy=strategy))
    assert 370 <= found[0] <= 440
    assert 180 <= found[1] <= 220
    assert 90 <= found[2] <= 110


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_workers_than_partitions(strategy: Strategy) -> None:
    found = assign(partitions(3), workers(range(10)), strategy=strategy)
    assert found.workers == tuple(range(10))
    assert max(sizes(found).values()) == 1
    assert assign(partitions(3), workers(range(10)), found, strategy=strategy) == found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nobody_and_nothing(strategy: Strategy) -> None:
    assert assign(partitions(2), [], strategy=strategy) == Assignment({}, (), ("0", "1"))
    assert assign([], workers([0]), strategy=strategy) == Assignment({}, (0,))


def test_partitions_that_weigh_nothing_are_spread_too() -> None:
    found = assign(partitions(100, dict.fromkeys(range(100), 0.0)), workers(range(4)), strategy="weighted")
    assert set(sizes(found).values()) == {25}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: assign([], [], strategy=wrong("best")), "strategy 'best' is none: use one of consistent"),
        (lambda: assign([*partitions(1), *partitions(1)], []), "partition '0' is given twice"),
        (lambda: assign([], [*workers([3]), *workers([3])]), "worker 3 is given twice"),
        (lambda: assign([Partition("0", "a", -1)], []), "weight -1 of partition '0' is not a weight"),
        (lambda: assign([Partition("0", "a", float("nan"))], []), "is not a weight"),
        (lambda: assign([], [LiveWorker(1, capacity=0)]), "capacity 0 of worker 1 is too small"),
    ],
)
def test_bad_input_is_refused(given: Callable[[], Assignment], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        given()
