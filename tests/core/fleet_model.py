"""A fleet on a clock of its own: workers come, leave and die, and its leader looks only when it has asked for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from keylane.core.assignment_strategies import LiveWorker, Strategy
from keylane.core.fleet_leader import (
    AssignNow,
    FleetFacts,
    LeaderDecision,
    LeaderState,
    LeaderWindows,
    WaitUntil,
    step,
)
from keylane.core.fleet_partitions import Partition, hashed

WINDOWS = LeaderWindows()
CALM_S = 100.0
"""Long enough for every window and cooldown to be over."""


@dataclass
class Fleet:
    """A fleet, its leader and a clock. Every look is performed at once, and every assignment stored."""

    partitions: tuple[Partition, ...] = field(default_factory=lambda: hashed(60, "orders.*").resolve().partitions)
    strategy: Strategy = "consistent"
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        self.live: dict[int, LiveWorker] = {}
        self.leaving: dict[int, str] = {}
        self.ended: set[int] = set()
        self.troubled: set[int] = set()
        self.current: AssignNow | None = None
        self.is_stored = True
        self.highest_version = 0
        self.versions: list[tuple[float, AssignNow]] = []
        self.state = LeaderState(epoch=1, strategy=self.strategy)
        self.runs = 0

    def join(self, *ids: int, labels: Iterable[str] = ()) -> None:
        for worker in ids:
            self.runs += 1
            self.live[worker] = LiveWorker(worker, frozenset(labels), instance=f"run-{self.runs}")
            self.ended.discard(worker)

    def leave(self, *ids: int) -> None:
        """They want to go, and remain until nothing is theirs."""
        for worker in ids:
            self.leaving[worker] = self.live.pop(worker).instance

    def expire(self, *ids: int) -> None:
        for worker in ids:
            del self.live[worker]
            self.ended.add(worker)

    def dismiss(self) -> None:
        """Those that leave and own nothing are gone."""
        owning = set(self.current.owners.values()) if self.current else set()
        self.ended |= {worker for worker in self.leaving if worker not in owning}
        self.leaving = {worker: run for worker, run in self.leaving.items() if worker in owning}

    def facts(self) -> FleetFacts:
        return FleetFacts(
            live=tuple(self.live.values()),
            leaving=dict(self.leaving),
            troubled=frozenset(self.troubled),
            ended=frozenset(self.ended),
            partitions=self.partitions,
            current=self.current,
            is_stored=self.is_stored,
            highest_version=self.highest_version,
        )

    def look(self) -> LeaderDecision:
        """One look, and what follows from an assignment: it is stored, and those that left are gone."""
        self.dismiss()
        self.state, decision = step(self.state, self.facts(), self.now_s)
        if not isinstance(decision, AssignNow):
            return decision
        assert self.current is None or decision.version > self.current.version
        self.current, self.is_stored = decision, True
        self.versions.append((self.now_s, decision))
        after = self.look()
        assert not isinstance(after, AssignNow), "two versions at one moment"
        return decision

    def run(self, seconds: float) -> list[AssignNow]:
        """Let time pass, looking only when the leader asked for it; the versions of that time."""
        end_s, before = self.now_s + seconds, len(self.versions)
        decision = self.look()
        while True:
            if isinstance(decision, AssignNow):
                decision = self.look()
            if not isinstance(decision, WaitUntil) or decision.at_s > end_s:
                break
            assert decision.at_s > self.now_s
            self.now_s = decision.at_s
            decision = self.look()
        self.now_s = end_s
        return [version for _, version in self.versions[before:]]

    def owned(self, worker: int) -> set[str]:
        assert self.current is not None
        return {one for one, owner in self.current.owners.items() if owner == worker}


def started(workers: int = 5, strategy: Strategy = "consistent", partitions: int = 60) -> Fleet:
    """A fleet that has been calm for a while."""
    fleet = Fleet(hashed(partitions, "orders.*").resolve().partitions, strategy)
    fleet.join(*range(workers))
    assert [one.cause for one in fleet.run(CALM_S)] == ["start"]
    return fleet
