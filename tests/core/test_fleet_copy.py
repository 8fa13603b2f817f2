"""What may be deleted from the copy of a stream: never what somebody still needs, never the newest message."""

from __future__ import annotations

import random

import pytest

from keylane.core.fleet_copy import ConsumerPosition, handled_floor, trim_before


@pytest.mark.parametrize("seed", range(200))
def test_nothing_that_is_not_handled_is_deleted(seed: int) -> None:
    """Against the messages themselves: partitions handle in any order while more is stored between two looks."""
    choose = random.Random(seed)  # noqa: S311 - the same seed makes the same run
    partitions = choose.randrange(1, 5)
    stored: list[int] = []
    open_messages: list[set[int]] = [set() for _ in range(partitions)]

    def store(count: int) -> None:
        for _ in range(count):
            stored.append(choose.randrange(partitions))
            open_messages[stored[-1]].add(len(stored))

    store(choose.randrange(1, 40))
    last = len(stored)
    positions = []
    for number in range(partitions):
        for one in list(open_messages[number]):
            if choose.random() < 0.6:
                open_messages[number].discard(one)
        mine = [at for at, owner in enumerate(stored, 1) if owner == number]
        handled = [at for at in mine if at < min(open_messages[number], default=len(stored) + 1)]
        positions.append(ConsumerPosition(max(handled, default=0), not open_messages[number]))
        store(choose.randrange(3))
    before = trim_before(last, handled_floor(last, positions))
    assert before <= last
    assert all(one >= before for waiting in open_messages for one in waiting)


def test_an_idle_partition_holds_nothing_back() -> None:
    idle, busy = ConsumerPosition(3, is_idle=True), ConsumerPosition(80, is_idle=False)
    assert trim_before(100, handled_floor(100, [idle, busy])) == 81
    assert trim_before(100, handled_floor(100, [idle, idle])) == 100, "the newest stays"
    assert trim_before(100, handled_floor(100, [idle, None])) == 1, "a partition without a consumer needs everything"
