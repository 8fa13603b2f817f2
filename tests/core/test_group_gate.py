"""Which deliveries may start while partitions move."""

from __future__ import annotations

from typing import Any

from keylane.groups.gate import Gate
from keylane.groups.message import GroupMessage, Place
from keylane.jetstream.message import Message


def delivery(partition: int, count: int) -> GroupMessage:
    nobody: Any = None
    reply = f"$JS.ACK.Q.c.1.{100 + count}.{count}.1700000000000000000.0".encode()
    return GroupMessage(Message(nobody, b"%d.a" % partition, reply, b"", b""), Place(partition, "a", "a"))


def passed(gate: Gate, *deliveries: tuple[int, int]) -> list[tuple[int, int]]:
    good = gate.passing([delivery(*one) for one in deliveries])
    return [(one.partition, one.delivery.delivery.consumer_sequence) for one in good]


def some(*partitions: int) -> frozenset[int]:
    return frozenset(partitions)


def test_it_is_open_at_first() -> None:
    gate = Gate()
    assert gate.is_open
    assert passed(gate, (0, 1), (1, 2)) == [(0, 1), (1, 2)]


def test_shunned_partitions_do_not_pass() -> None:
    gate = Gate()
    gate.shun(some(1, 2))
    assert not gate.is_open
    assert passed(gate, (0, 1), (1, 2), (2, 3), (3, 4)) == [(0, 1), (3, 4)]
    gate.shun_no_more(some(1))
    assert passed(gate, (1, 5), (2, 6)) == [(1, 5)]
    gate.shun_no_more()
    assert gate.is_open


def test_gained_partitions_wait_for_the_beginning() -> None:
    gate = Gate()
    gate.hold(some(5))
    assert passed(gate, (0, 7), (5, 8)) == [(0, 7)]
    gate.expect_beginning()
    assert passed(gate, (5, 9), (0, 10), (0, 1), (5, 2)) == [(0, 10), (0, 1), (5, 2)]
    assert gate.is_open


def test_a_beginning_that_is_not_expected_is_an_older_one() -> None:
    """The reset of a moment before makes a count of 1 too, and it is not at the start of the queue."""
    gate = Gate()
    gate.hold(some(5))
    assert passed(gate, (5, 1), (5, 2)) == []
    gate.expect_beginning()
    assert passed(gate, (5, 3)) == []
    assert passed(gate, (5, 1)) == [(5, 1)]


def test_a_takeover_holds_everything() -> None:
    gate = Gate()
    gate.hold_all()
    assert passed(gate, (0, 1), (9, 2)) == []
    gate.expect_beginning()
    assert passed(gate, (3, 1), (0, 2)) == [(3, 1), (0, 2)]
    assert gate.is_open


def test_what_was_not_gained_after_all_leaves_earlier_gains_held() -> None:
    gate = Gate()
    gate.hold(some(1))
    gate.expect_beginning()
    gate.hold(some(2))
    gate.hold_no_more(some(2))
    assert passed(gate, (1, 4), (2, 5)) == [(2, 5)]
    assert passed(gate, (1, 1)) == [(1, 1)]


def test_once_shut_nothing_passes() -> None:
    gate = Gate()
    gate.shut()
    gate.expect_beginning()
    assert gate.is_shut
    assert passed(gate, (0, 1), (1, 2)) == []
