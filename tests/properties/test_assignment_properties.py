"""What must hold for every fleet: partitions, workers, labels, weights, and any assignment before."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.core.assignment_strategies import Assignment, LiveWorker, Strategy, assign, compare_assignments
from keylane.core.fleet_partitions import Partition
from keylane.core.plans import Plan
from keylane.core.plans import sticky as sticky_plan

KEEPING: list[Strategy] = ["consistent", "weighted", "sticky"]
STRATEGIES = st.sampled_from([*KEEPING, "round_robin"])
LABELS = st.sampled_from(["a", "b"])
WEIGHTS = st.one_of(st.just(1.0), st.integers(0, 20), st.floats(0, 100))
MEMBERSHIPS = st.sets(st.integers(0, 12), min_size=1, max_size=9)
PARTITIONS = st.lists(st.tuples(WEIGHTS, st.sampled_from([None, None, "a", "b"])), max_size=25).map(
    lambda drawn: [Partition(str(at), f"{at}.>", weight, label) for at, (weight, label) in enumerate(drawn)]
)
WORKERS = st.dictionaries(
    st.integers(0, 12), st.tuples(st.frozensets(LABELS), st.sampled_from([1.0, 1.0, 2.0, 0.5])), max_size=8
).map(lambda drawn: [LiveWorker(worker, labels, capacity) for worker, (labels, capacity) in drawn.items()])
OWNERS = st.dictionaries(st.integers(0, 24).map(str), st.integers(0, 12), max_size=25)
EARLIER = st.one_of(
    st.none(),
    st.builds(
        lambda owners, more: Assignment(owners, tuple({*owners.values(), *more})), OWNERS, st.sets(st.integers(0, 12))
    ),
)
"""Any assignment, also of workers that are gone and partitions that are new."""


def even(count: int) -> list[Partition]:
    return [Partition(str(number), f"{number}.>") for number in range(count)]


def plain(workers: set[int]) -> list[LiveWorker]:
    return [LiveWorker(worker) for worker in workers]


@given(
    partitions=PARTITIONS,
    workers=WORKERS,
    previous=EARLIER,
    homes=OWNERS,
    strategy=STRATEGIES,
    spilled=st.frozensets(LABELS),
    chance=st.randoms(use_true_random=False),
)
def test_every_partition_has_one_worker_that_may_have_it(
    *,
    partitions: list[Partition],
    workers: list[LiveWorker],
    previous: Assignment | None,
    homes: dict[str, int],
    strategy: Strategy,
    spilled: frozenset[str],
    chance: random.Random,
) -> None:
    found = assign(partitions, workers, previous, strategy=strategy, homes=homes, spilled=spilled)

    labels = {worker.id: worker.labels for worker in workers}
    there = frozenset[str]().union(*labels.values())
    waiting = {one.id for one in partitions if not workers or (one.label and one.label not in there | spilled)}
    assert set(found.waiting) == waiting
    assert found.owners.keys() == {one.id for one in partitions} - waiting
    assert found.workers == tuple(sorted(labels))
    for one in partitions:
        if one.label in there and one.id in found.owners:
            assert one.label in labels[found.owners[one.id]]

    mixed = chance.sample(partitions, len(partitions)), chance.sample(workers, len(workers))
    assert assign(*mixed, previous, strategy=strategy, homes=homes, spilled=spilled) == found
    again = assign(partitions, workers, found, strategy=strategy, spilled=spilled)
    assert again == found


@given(EARLIER, st.integers(1, 60), MEMBERSHIPS)
def test_sticky_is_as_even_and_moves_as_few_as_the_plan_of_groups(
    previous: Assignment | None, count: int, members: set[int]
) -> None:
    partitions = even(count)
    if previous is not None:
        kept = {one: worker for one, worker in previous.owners.items() if int(one) < count}
        previous = Assignment(kept, previous.workers)
    found = assign(partitions, plain(members), previous, strategy="sticky")
    sizes = Counter(dict.fromkeys(members, 0))
    sizes.update(found.owners.values())
    assert max(sizes.values()) - min(sizes.values()) <= 1

    had: dict[str, list[int]] = {str(worker): [] for worker in (previous.workers if previous else ())}
    for partition, worker in (previous.owners if previous else {}).items():
        had[str(worker)].append(int(partition))
    plan = Plan(had)
    fewest = [move for move in sticky_plan(plan, map(str, members), count).moves_from(plan) if move.source is not None]
    moved = [one for one, worker in found.owners.items() if previous and previous.owners.get(one, worker) != worker]
    assert len(moved) == len(fewest)


@given(
    st.lists(WEIGHTS, min_size=1, max_size=40), st.lists(MEMBERSHIPS, min_size=1, max_size=4), st.sampled_from(KEEPING)
)
def test_nobody_carries_more_than_the_bound_unless_no_move_would_help(
    weights: list[float], memberships: list[set[int]], strategy: Strategy
) -> None:
    partitions = [Partition(str(number), f"{number}.>", weight) for number, weight in enumerate(weights)]
    if strategy == "sticky":
        partitions = [replace(one, weight=1.0) for one in partitions]
    found: Assignment | None = None
    for members in memberships:
        found = assign(partitions, plain(members), found, strategy=strategy)
        loads = dict.fromkeys(members, 0.0)
        for one in partitions:
            loads[found.owners[one.id]] += one.weight
        lowest = min(loads.values())
        mean = sum(loads.values()) / len(members)
        allowed = max(1.1 * mean, mean + sum(weights) / len(weights)) + 0.001
        for worker, load in loads.items():
            held = [one.weight for one in partitions if found.owners[one.id] == worker]
            assert load <= allowed or all(lowest + weight >= load - 0.001 for weight in held)


@given(st.integers(2, 8), st.integers(1, 5), st.integers(20, 40), st.sampled_from(KEEPING))
@settings(max_examples=50)
def test_workers_that_come_take_from_others_and_nothing_moves_between_those(
    before: int, more: int, each: int, strategy: Strategy
) -> None:
    partitions = even(each * (before + more))
    first = assign(partitions, plain(set(range(before))), strategy=strategy)
    workers = plain(set(range(before + more)))
    change = compare_assignments(first, assign(partitions, workers, first, strategy=strategy), partitions, workers)
    assert change.between_staying == 0
    assert change.moved <= each * more
    assert change.imbalance <= 1.15


@given(st.integers(2, 9), st.data(), st.integers(10, 30), st.sampled_from(KEEPING))
@settings(max_examples=50)
def test_those_that_leave_and_come_back_find_everything_as_it_was(
    count: int, data: st.DataObject, each: int, strategy: Strategy
) -> None:
    partitions, everybody = even(each * count), set(range(count))
    first = assign(partitions, plain(everybody), strategy=strategy)
    away = data.draw(st.sets(st.sampled_from(sorted(everybody)), max_size=count - 1))
    then = assign(partitions, plain(everybody - away), first, strategy=strategy)
    assert all(then.owners[one] == worker for one, worker in first.owners.items() if worker not in away)
    homes = {one: worker for one, worker in first.owners.items() if worker in away}
    assert assign(partitions, plain(everybody), then, strategy=strategy, homes=homes) == first
