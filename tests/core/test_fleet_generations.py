"""Another number of partitions: the barrier between two numberings, and the steps of a change."""

from __future__ import annotations

import random

import pytest

from keylane.core.fleet_generations import (
    Barrier,
    ChangeFacts,
    ChangeStep,
    dropped,
    find_barrier,
    first_table,
    held,
    in_words,
    next_step,
    partitions_of,
    retired,
    split,
    wanted,
)
from keylane.core.fleet_partitions import hashed
from keylane.core.fleet_records import Generation, from_json, key_of, to_json
from keylane.core.partitions import Partitioning
from keylane.errors import FleetError

OLD, NEW = Partitioning("o.*", (1,), 10), Partitioning("o.*", (1,), 16)


def subject(key: str, numbering: Partitioning) -> str:
    return f"{numbering.partition(f'o.{key}')}.o.{key}"


@pytest.mark.parametrize("seed", range(300))
def test_the_barrier_lies_between_the_last_old_and_the_first_new_number(seed: int) -> None:
    """Also where most messages say nothing, and where old ones are gone because they were handled."""
    choose = random.Random(seed)  # noqa: S311 - tests
    low, high = choose.randrange(50), 100
    updated = choose.randrange(low, high + 1)
    keys = [f"k{choose.randrange(200)}" for _ in range(high + 1)]
    stored = [
        (at, subject(keys[at], OLD if at <= updated else NEW))
        for at in range(1, high + 1)
        if at > updated or choose.random() < 0.7
    ]
    found = find_barrier(stored, OLD, NEW, low, high)
    assert found.last == found.mixed_last
    assert low <= found.last <= high
    for at, one in stored:
        assert one == subject(keys[at], OLD if at <= found.last else NEW)


@pytest.mark.parametrize("seed", range(100))
def test_mixed_numbers_lie_between_two_barriers(seed: int) -> None:
    choose = random.Random(seed)  # noqa: S311 - tests
    stored, first_mixed, last_mixed = [], 40, 60
    for at in range(1, 101):
        is_old = at < first_mixed or (at <= last_mixed and choose.random() < 0.5)
        stored.append((at, subject(f"k{choose.randrange(200)}", OLD if is_old else NEW)))
    found = find_barrier(stored, OLD, NEW, 30, 100)
    for at, one in stored:
        key = one.split(".")[2]
        if at <= found.last:
            assert one == subject(key, OLD)
        if at > found.mixed_last:
            assert one == subject(key, NEW)


def test_subjects_without_a_number_say_nothing() -> None:
    assert find_barrier([(6, "other.k"), (7, "3.other.k")], OLD, NEW, 5, 9) == Barrier(9, 9)


def test_the_steps_of_a_change() -> None:
    table = first_table(10)
    assert next_step(table, ChangeFacts()) is ChangeStep.NOTHING
    assert wanted(table, 10) is table
    table = wanted(table, 16)
    assert next_step(table, ChangeFacts()) is ChangeStep.HOLD
    table = held(table, 100)
    assert next_step(table, ChangeFacts(numbered=16)) is ChangeStep.AWAIT_WORKERS
    assert next_step(table, ChangeFacts(followed=True, numbered=10)) is ChangeStep.UPDATE
    assert next_step(table, ChangeFacts(followed=True, numbered=16)) is ChangeStep.SPLIT
    table = split(table, Barrier(110, 110))
    assert table.generations == (Generation(0, 10, 0, 110), Generation(1, 16, 111))
    assert next_step(table, ChangeFacts()) is ChangeStep.AWAIT_MESSAGES
    assert next_step(table, ChangeFacts(handled=True)) is ChangeStep.RETIRE
    table = retired(table)
    assert next_step(table, ChangeFacts(handled=True)) is ChangeStep.AWAIT_OWNERS
    assert next_step(table, ChangeFacts(owned=False)) is ChangeStep.DROP
    table = dropped(table)
    assert table.generations == (Generation(1, 16, 111),)
    assert table.numbers == (10, 16)
    assert table.version == 5
    assert from_json(key_of(table), to_json(table)) == table


def test_mixed_numbers_make_a_generation_with_one_partition() -> None:
    table = split(held(wanted(first_table(10), 16), 100), Barrier(110, 120))
    front, mixed, last = table.generations
    assert (front.last, mixed.first, mixed.last, last.first) == (110, 111, 120, 121)
    [one] = partitions_of(hashed(10, "o.*"), mixed)
    assert (one.id, one.filter, one.first) == ("allg1", "*.o.*", 111)
    assert partitions_of(hashed(10, "o.*"), last)[15].id == "15g2"


def test_one_change_at_a_time() -> None:
    table = wanted(first_table(10), 16)
    assert wanted(table, 16) is table
    with pytest.raises(FleetError, match="a change to 16 partitions is under way"):
        wanted(table, 12)
    assert wanted(split(held(table, 5), Barrier(6, 6)), 12).target == 12, "it waits for the generation before"


def test_words() -> None:
    tables = [first_table(10)]
    tables.append(wanted(tables[-1], 16))
    tables.append(held(tables[-1], 100))
    tables.append(split(tables[-1], Barrier(110, 110)))
    said = [in_words(one) for one in tables]
    assert said == [
        None,
        "10 → 16 partitions: waits for the leader",
        "10 → 16 partitions: workers hold after sequence 100",
        "10 → 16 partitions: generation 0 is handled up to sequence 110, then the next one begins",
    ]
