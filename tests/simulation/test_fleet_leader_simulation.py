"""Random lives of a fleet, from a seed: versions only grow, and calm ends with every partition at a live worker."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from keylane.core.assignment_strategies import Strategy
from keylane.core.fleet_leader import AssignNow, LeaderState, NoChange
from keylane.core.fleet_partitions import Partition
from tests.core.fleet_model import CALM_S, WINDOWS, Fleet

EVENTS = 40
STRATEGIES: list[Strategy] = ["consistent", "weighted", "sticky"]


def partitions(count: int) -> tuple[Partition, ...]:
    """Every fifth one has a label, which workers with odd numbers have."""
    return tuple(
        Partition(str(number), f"{number}.>", 1 + number % 3, "gpu" if number % 5 == 0 else None)
        for number in range(count)
    )


class Life:
    """What happens to a fleet."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - the same seed lives the same life
        self.fleet = Fleet(partitions(20), self.chance.choice(STRATEGIES))
        self.elections = 0

    def live(self) -> None:
        for _ in range(EVENTS):
            kinds = [self.join] * 4 + [self.leave, self.expire] * 2
            kinds += [self.lose, self.forget, self.elect, self.repartition, self.trouble, self.recover]
            self.chance.choice(kinds)()
            self.fleet.run(self.chance.choice([0.0, 0.0, 0.1, 0.7, 2.0, 10.0, 40.0]))
        self.fleet.run(CALM_S)

    def somebody(self) -> list[int]:
        return self.chance.sample(sorted(self.fleet.live), min(1, len(self.fleet.live)))

    def join(self) -> None:
        worker = self.chance.randrange(8)
        if worker not in self.fleet.leaving:
            self.fleet.join(worker, labels=["gpu"] if worker % 2 else [])

    def leave(self) -> None:
        self.fleet.leave(*self.somebody())

    def expire(self) -> None:
        self.fleet.expire(*self.somebody())

    def lose(self) -> None:
        """Records disappear."""
        for worker in self.somebody():
            del self.fleet.live[worker]

    def trouble(self) -> None:
        self.fleet.troubled |= set(self.somebody())

    def recover(self) -> None:
        self.fleet.troubled.clear()

    def forget(self) -> None:
        self.fleet.is_stored = self.fleet.current is None

    def elect(self) -> None:
        fleet, self.elections = self.fleet, self.elections + 1
        reserved = fleet.current.reserved if fleet.current else {}
        fleet.state = LeaderState(epoch=fleet.state.epoch + 1, strategy=fleet.strategy, reserved=reserved)

    def repartition(self) -> None:
        self.fleet.partitions = partitions(self.chance.randrange(1, 40))


@pytest.mark.parametrize("seed", range(100))
def test_a_fleet_that_comes_to_rest_is_covered(seed: int) -> None:
    life = Life(seed)
    life.live()
    fleet = life.fleet
    written = [version for _, version in fleet.versions]
    assert written
    assert [one.version for one in written] == list(range(1, len(written) + 1))
    assert [one.epoch for one in written] == sorted(one.epoch for one in written)
    soon = sum(later - earlier < WINDOWS.min_interval_s for (earlier, _), (later, _) in pairwise(fleet.versions))
    assert soon <= life.elections  # a new leader does not know when the last version was written
    if not fleet.live:
        fleet.join(8)
        fleet.run(CALM_S)
    check_covered(fleet)
    assert isinstance(fleet.look(), NoChange)


def check_covered(fleet: Fleet) -> None:
    current = fleet.current
    assert isinstance(current, AssignNow)
    assert fleet.is_stored
    assert fleet.leaving == {}
    assert current.owners.keys() == {one.id for one in fleet.partitions}
    pool = {worker for worker in fleet.live if worker % 2}
    for one in fleet.partitions:
        owner = current.owners[one.id]
        assert owner in (pool if one.label and pool else fleet.live)
        assert current.workers[owner] == fleet.live[owner].instance
