"""Which delivery commits the prefix of a partition, and which must never be acked."""

from __future__ import annotations

import pytest

from keylane.core.lanes import Lanes
from keylane.processing.message import GroupMessage, Place
from keylane.processing.partition_progress import PartitionProgress


class Delivery:
    """A delivery that remembers what was said about it."""

    def __init__(self, sequence: int, count: int) -> None:
        self.sequence = sequence
        self.consumer_sequence = count
        self.said: list[str] = []

    def ack(self) -> None:
        self.said.append("ack")

    def in_progress(self) -> None:
        self.said.append("in progress")


class Ground:
    """Lanes, the progress of their partition, and everything that was delivered."""

    def __init__(self) -> None:
        self.lanes: Lanes[GroupMessage] = Lanes(max_tries=None, backoff=lambda _: 1.0, remember=100)
        self.may_commit = True
        self.resets = 0
        self.progress = PartitionProgress(self.lanes, commits=True, may_commit=lambda: self.may_commit)
        self.progress.redelivered = self._redelivered
        self.count = 0

    def _redelivered(self) -> None:
        self.resets += 1

    def deliver(self, *sequences: int) -> list[Delivery]:
        deliveries = []
        for sequence in sequences:
            self.count += 1
            deliveries.append(Delivery(sequence, self.count))
        messages = [GroupMessage(one, Place.of(0, "a", str(one.sequence)), None) for one in deliveries]  # type: ignore[arg-type]
        self.progress.arrived(messages)
        for message in messages:
            self.lanes.arrive(message.delivery_sequence, message.place.lane, message)
        return deliveries

    def handle(self, *sequences: int) -> None:
        wanted = set(sequences)
        for _ in range(len(self.lanes)):
            entry = self.lanes.take()
            if entry is None:
                break
            if entry.sequence in wanted:
                self.lanes.finished(entry)
            else:
                self.lanes.postponed(entry, 0.0, 0.0)
        self.lanes.due(1.0)
        self.progress.commit()


@pytest.fixture
def ground() -> Ground:
    return Ground()


def said(deliveries: list[Delivery]) -> list[str]:
    return [" ".join(one.said) for one in deliveries]


def test_a_batch_that_is_handled_whole_costs_one_ack(ground: Ground) -> None:
    batch = ground.deliver(2, 5, 7)
    ground.handle(2, 5, 7)
    assert said(batch) == ["", "", "ack"]


def test_what_is_undone_holds_back_what_is_above_it(ground: Ground) -> None:
    batch = ground.deliver(2, 5, 7)
    ground.handle(5, 7)
    assert said(batch) == ["", "", ""]
    ground.handle(2)
    assert said(batch) == ["", "", "ack"]


def test_what_was_dropped_holds_it_back_until_it_came_again(ground: Ground) -> None:
    batch = ground.deliver(2, 5, 7)
    ground.lanes.forget(lambda one: one.delivery_sequence == 5)
    ground.handle(2, 7)
    assert said(batch) == ["ack", "", ""]
    with ground.progress.around_reset():
        ground.count = 0
    batch = ground.deliver(5, 7)
    ground.handle(5)
    assert said(batch) == ["", "ack"]


def test_nothing_from_before_a_reset_is_acked(ground: Ground) -> None:
    old = ground.deliver(2, 5, 7)
    with ground.progress.around_reset():
        ground.handle(2)
        ground.count = 0
    ground.handle(5)
    assert ground.progress.owes, "2 and 5 are handled, and the server does not know"
    new = ground.deliver(2, 5, 7)
    ground.handle()
    assert said(old) == ["", "", ""]
    assert said(new) == ["", "ack", ""]
    assert not ground.progress.owes


def test_a_consumer_that_somebody_else_has_reset(ground: Ground) -> None:
    old = ground.deliver(2, 5)
    ground.count = 0
    new = ground.deliver(2, 5)
    ground.handle(2, 5)
    assert (said(old), said(new)) == (["", ""], ["", "ack"])


def test_a_redelivery_within_a_run_asks_for_a_reset_and_nothing_is_committed_before(ground: Ground) -> None:
    ground.deliver(2, 5)
    late = ground.deliver(2, 7)
    assert ground.resets == 1
    ground.handle(2, 5, 7)
    more = ground.deliver(9)
    ground.handle(9)
    assert said(late + more) == ["", "", ""]


def test_without_a_sure_lease_nothing_is_committed(ground: Ground) -> None:
    batch = ground.deliver(2)
    ground.may_commit = False
    ground.handle(2)
    assert said(batch) == [""]
    ground.may_commit = True
    ground.progress.commit()
    assert said(batch) == ["ack"]


def test_what_waits_and_what_is_handled_above_it_is_kept_alive(ground: Ground) -> None:
    batch = ground.deliver(2, 5)
    ground.handle(5)
    ground.progress.keep_alive()
    assert said(batch) == ["", ""], "they are new"
    ground.progress.keep_alive()
    assert said(batch) == ["in progress", "in progress"]


def test_the_position_is_known_without_commits_too(ground: Ground) -> None:
    ground.deliver(2, 5, 7)
    ground.handle(2, 7)
    assert ground.progress.advance() == 4
