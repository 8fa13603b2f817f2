"""Which acks are kept back around a reset."""

from __future__ import annotations

import pytest

from keylane.processing.message import GroupMessage, Place
from keylane.processing.settlement import Acks


class Delivery:
    """A delivery that remembers whether it was acked."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.settled = False

    def ack(self) -> None:
        assert not self.settled
        self.settled = True


def delivered(sequence: int, partition: int = 0) -> GroupMessage:
    nobody: None = None
    return GroupMessage(Delivery(sequence), Place.of(partition, "a", "a"), nobody)  # type: ignore[arg-type]


def acked(message: GroupMessage) -> bool:
    return message.delivery.settled


def test_in_quiet_times_there_is_nothing_to_ask() -> None:
    assert not Acks().in_doubt


def test_an_ack_during_a_reset_goes_with_the_next_delivery() -> None:
    acks, first, second = Acks(), delivered(1), delivered(1)
    with acks.around_reset(list):
        assert acks.in_doubt
        acks.done(first)
    assert not acked(first)
    assert acks.owes()
    acks.arrived([second])
    assert not acks.owes()
    assert not acks.in_doubt


def test_a_delivery_from_before_the_reset_is_void() -> None:
    acks, old, new = Acks(), delivered(1), delivered(1)
    with acks.around_reset(lambda: [1, 2]):
        pass
    acks.done(old)
    assert not acked(old)
    assert acks.owes()
    acks.arrived([new, delivered(2)])
    assert not acks.in_doubt
    acks.done(new)
    assert acked(new)


def test_what_came_again_before_it_was_done_is_acked_at_once() -> None:
    acks, new = Acks(), delivered(1)
    with acks.around_reset(lambda: [1, 2]):
        pass
    acks.arrived([new])
    assert acks.in_doubt
    acks.done(new)
    assert acked(new)
    assert not acks.owes()


def test_after_a_reset_that_failed_all_is_sent() -> None:
    acks, owed, during = Acks(), delivered(1), delivered(2)
    with acks.around_reset(lambda: [1]):
        pass
    acks.done(owed)

    def without_an_answer() -> None:
        with acks.around_reset(list):
            acks.done(during)
            raise OSError("no answer")

    with pytest.raises(OSError, match="no answer"):
        without_an_answer()
    assert acked(during)
    assert not acked(owed)
    assert acks.owes()


def test_what_is_owed_can_be_asked_by_partition() -> None:
    acks = Acks()
    with acks.around_reset(list):
        acks.done(delivered(1, partition=3))
    assert acks.owes(lambda message: message.partition == 3)
    assert not acks.owes(lambda message: message.partition == 4)
    acks.forget()
    assert not acks.owes()
    assert not acks.in_doubt
