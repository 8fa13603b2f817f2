"""Which deliveries may start while partitions move."""

from __future__ import annotations

from typing import Any

from keylane.groups.gate import Gate
from keylane.groups.message import GroupMessage, Place


def passed(gate: Gate, *partitions: int) -> list[int]:
    nothing: Any = None
    messages = [GroupMessage(nothing, Place.of(partition, "a", "a"), nothing) for partition in partitions]
    return [one.partition for one in gate.passing(messages)[0]]


def some(*partitions: int) -> frozenset[int]:
    return frozenset(partitions)


def test_it_is_open_at_first() -> None:
    gate = Gate()
    assert gate.is_open
    assert passed(gate, 0, 1, 0) == [0, 1, 0]


def test_shunned_partitions_do_not_pass() -> None:
    gate = Gate()
    gate.shun(some(1, 2))
    assert not gate.is_open
    assert passed(gate, 0, 1, 2, 3) == [0, 3]
    gate.shun_no_more(some(1))
    assert passed(gate, 1, 2) == [1]
    assert gate.shunned == some(2)
    gate.shun_no_more()
    assert gate.shunned == some()


def test_gained_partitions_wait_for_the_rewinding() -> None:
    gate = Gate()
    gate.hold(some(5))
    assert passed(gate, 0, 5, 0) == [0, 0]
    gate.release()
    assert gate.is_open
    assert passed(gate, 5, 0) == [5, 0]


def test_a_takeover_holds_everything() -> None:
    gate = Gate()
    gate.hold_all()
    assert passed(gate, 0, 9) == []
    gate.release()
    assert passed(gate, 3, 0) == [3, 0]


def test_what_was_not_gained_after_all_leaves_earlier_gains_held() -> None:
    gate = Gate()
    gate.hold(some(1))
    gate.hold(some(2))
    gate.hold_no_more(some(2))
    assert passed(gate, 1, 2) == [2]


def test_what_came_while_it_was_held_keeps_its_partition_held_until_the_rewinding() -> None:
    gate = Gate()
    gate.hold(some(1, 2))
    assert passed(gate, 2, 3) == [3]
    assert not gate.hold_no_more(some(1, 2))
    assert gate.held == some(2)
    assert passed(gate, 1, 2) == [1]
    gate.release()
    gate.hold(some(2))
    assert gate.hold_no_more(some(2))
    assert gate.is_open


def test_a_release_does_not_open_what_is_shunned_or_shut() -> None:
    gate = Gate()
    gate.shun(some(1))
    gate.hold(some(2))
    gate.release()
    assert passed(gate, 1, 2) == [2]
    gate.shut()
    gate.release()
    assert gate.is_shut
    assert passed(gate, 0, 1) == []
