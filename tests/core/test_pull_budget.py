"""The budget of a worker over its partitions: kept, fair, without starvation, and in step with the handlers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from keylane.core.pull_budget import FIRST_BATCH, PullBudget, PullShare
from keylane.core.pulls import PullWindow

LARGE = 1 << 30


@dataclass
class Reader:
    """One partition as a feed reads it: what the server was asked for, and what is here."""

    share: PullShare
    window: PullWindow
    here: int = 0

    @property
    def held(self) -> int:
        return self.window.asked + self.here

    def refill(self, now: float = 0.0) -> None:
        self.share.holds(self.held)
        self.window.max_messages = self.share.size(self.window.largest, now)
        if self.window.ask(self.here, 0) is not None:
            self.share.holds(self.held)

    def deliver(self, count: int, size: int = 100, now: float = 0.0) -> None:
        count = min(count, self.window.asked)
        if count:
            self.window.delivered(count, size)
            self.here += count
            self.share.delivered()
        self.refill(now)

    def finish(self, count: int, now: float = 0.0) -> None:
        self.here -= min(count, self.here)
        if self.here <= self.window.low_water:
            self.refill(now)

    def expire(self) -> None:
        self.window.asked = 0
        self.share.fell_quiet()
        self.refill()


def readers(budget: PullBudget, count: int) -> list[Reader]:
    made = [Reader(budget.share(), PullWindow(1, LARGE)) for _ in range(count)]
    for one in made:
        one.refill()
    return made


def run_for(all_readers: list[Reader], busy: list[Reader], seconds: float, step_s: float = 0.01) -> None:
    """All that is asked of busy partitions comes, and is handled at once."""
    for tick in range(int(seconds / step_s)):
        for one in busy:
            one.deliver(one.window.asked, now=tick * step_s)
            one.finish(one.here, now=tick * step_s)
    assert all(one.held for one in all_readers)


@pytest.mark.parametrize("seed", range(60))
def test_the_budget_is_never_exceeded_and_nobody_starves(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - no secret
    limit, count = rng.choice([1, 2, 7, 50, 500, 1000]), rng.choice([1, 2, 3, 10, 80])
    budget = PullBudget(limit, LARGE)
    partitions = readers(budget, count)
    most = max(limit, int(limit * 0.8) + count)
    now = 0.0
    for _ in range(300):
        one = rng.choice(partitions)
        now += rng.choice([0.0, 0.001, 0.1])
        match rng.randrange(4):
            case 0 | 1:
                one.deliver(rng.randint(1, 1 + one.window.asked), now=now)
            case 2:
                one.finish(rng.randint(1, 1 + one.here), now=now)
            case _:
                one.expire()
        assert sum(each.held for each in partitions) <= most, budget
        assert budget.held >= sum(each.held for each in partitions)
        assert all(each.held for each in partitions), "a partition has neither a message nor an open pull"


def test_idle_partitions_ask_for_next_to_nothing() -> None:
    budget = PullBudget(500, LARGE)
    assert {one.held for one in readers(budget, 80)} == {1}


def test_a_single_busy_partition_gets_what_is_not_reserved() -> None:
    budget = PullBudget(500, LARGE)
    partitions = readers(budget, 10)
    run_for(partitions, partitions[:1], 1.0)
    assert partitions[0].held == 400 + 10
    assert budget.held == 500


def test_busy_partitions_share_evenly_also_with_one_that_came_late() -> None:
    budget = PullBudget(1000, LARGE)
    partitions = readers(budget, 4)
    run_for(partitions, partitions[:1], 1.0)
    run_for(partitions, partitions, 1.0)
    held = [one.held for one in partitions]
    assert max(held) <= 2 * min(held)
    assert sum(held) > 500


def test_a_partition_that_has_fallen_quiet_gives_its_share_back() -> None:
    budget = PullBudget(1000, LARGE)
    partitions = readers(budget, 4)
    run_for(partitions, partitions, 1.0)
    for one in partitions[1:]:
        one.expire()
    run_for(partitions, partitions[:1], 1.0)
    assert partitions[0].held >= 800


def test_a_slow_partition_does_not_hoard() -> None:
    budget = PullBudget(1000, LARGE)
    (one,) = readers(budget, 1)
    for tick in range(100):
        one.deliver(one.window.asked, now=tick * 0.1)
        one.finish(1, now=tick * 0.1)
    assert one.held <= 200 + FIRST_BATCH


def test_a_blocked_partition_leaves_the_others_their_reserve() -> None:
    budget = PullBudget(100, LARGE)
    blocked, other = readers(budget, 2)
    for tick in range(50):
        blocked.deliver(blocked.window.asked, now=tick * 0.01)
    before = blocked.here
    run_for([blocked, other], [other], 1.0)
    assert other.held >= 10
    assert blocked.here == before


def test_partitions_that_come_later_add_one_each_to_a_full_budget() -> None:
    budget = PullBudget(40, LARGE)
    [first] = readers(budget, 1)
    for tick in range(20):
        first.deliver(first.window.asked, now=tick * 0.01)
    assert budget.held == 40
    assert [one.held for one in readers(budget, 7)] == [1] * 7
    assert budget.held == 47


def test_large_messages_make_small_shares() -> None:
    budget = PullBudget(1000, 1_000_000)
    partitions = readers(budget, 2)
    for one in partitions:
        one.deliver(1, size=100_000)
        one.finish(1)
    run_for(partitions, partitions, 0.5)
    one = partitions[0]
    one.window.asked = one.here = 0
    one.window.largest = 100_000
    assert one.share.size(100_000, 1.0) == 5
    assert one.share.size(10_000_000, 1.0) == 1


def test_a_partition_that_leaves_gives_everything_back() -> None:
    budget = PullBudget(100, LARGE)
    one, other = readers(budget, 2)
    one.deliver(5)
    one.share.close()
    assert (budget.active, budget.taken, budget.held, budget.reserve) == (0, 0, other.held, 20)
