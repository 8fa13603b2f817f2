"""What the leader assigns: `core/fleet_leader.py` as the planner that a fleet worker asks.

Keeps the leader's memory between two looks. Nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from keylane.core import fleet_leader
from keylane.core.assignment_strategies import LiveWorker, Strategy
from keylane.core.fleet_leader import AssignNow, FleetFacts, LeaderState, LeaderWindows, WaitUntil
from keylane.core.fleet_leadership import AssignmentProposal, PlannerFacts
from keylane.core.fleet_partitions import Partition
from keylane.core.fleet_records import LeaseState


class FleetPlanner:
    """The planner of one worker, for the time that it leads."""

    def __init__(
        self, partitions: Callable[[], tuple[Partition, ...]], strategy: Strategy, windows: LeaderWindows
    ) -> None:
        self._partitions = partitions
        self._state = LeaderState(epoch=0, strategy=strategy, windows=windows)

    def __call__(self, facts: PlannerFacts, now: float) -> AssignmentProposal:
        if facts.epoch != self._state.epoch:  # another term: what was remembered of the one before is old
            self._state = LeaderState(epoch=facts.epoch, strategy=self._state.strategy, windows=self._state.windows)
        held = {one.worker for one in facts.workers}
        seen = FleetFacts(
            live=tuple(
                LiveWorker(one.worker, frozenset(one.labels), instance=one.instance)
                for one in facts.workers
                if one.state is LeaseState.LIVE
            ),
            leaving={one.worker: one.instance for one in facts.workers if one.state is LeaseState.LEAVING},
            # A record that a read lacks counts as held until it is surely gone: whoever is missing here has ended.
            ended=frozenset(facts.assignment.workers.keys() - held) if facts.assignment is not None else frozenset(),
            partitions=self._partitions(),
            current=facts.assignment,
            highest_version=facts.highest_version,
        )
        self._state, decision = fleet_leader.step(self._state, seen, now)
        match decision:
            case AssignNow():
                return AssignmentProposal(decision.owners, decision.workers, decision.reason)
            case WaitUntil(at_s, reason):
                return AssignmentProposal(reason=reason, ask_again_at=at_s)
        return AssignmentProposal(reason=decision.reason)
