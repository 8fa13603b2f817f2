"""What the leader assigns: `core/fleet_leader.py` as the planner that a fleet worker asks.

Keeps the leader's memory between two looks. What the next leader needs of it goes into the record of the assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keylane.core import fleet_leader
from keylane.core.assignment_strategies import Assignment, LiveWorker, Strategy, assign
from keylane.core.fleet_leader import AssignNow, FleetFacts, LeaderState, LeaderWindows, Reservation, WaitUntil
from keylane.core.fleet_leadership import AssignmentProposal, LeaderLook
from keylane.core.fleet_partitions import Partition
from keylane.core.fleet_records import LeaseState

_RESERVED = "reserved"


class FleetPlanner:
    """The planner of one worker. `clock_offset_s`: the wall clock less the clock of `now`."""

    def __init__(
        self,
        partitions: Callable[[], tuple[Partition, ...]],
        strategy: Strategy,
        windows: LeaderWindows,
        clock_offset_s: float,
    ) -> None:
        self._partitions = partitions
        self._clock_offset_s = clock_offset_s
        self._state = LeaderState(epoch=0, strategy=strategy, windows=windows)

    def __call__(self, look: LeaderLook, now: float) -> AssignmentProposal:
        if look.epoch != self._state.epoch:
            self._begin_term(look)
        facts = FleetFacts(
            live=_live(look),
            leaving={
                one.worker: one.instance
                for one in look.workers
                if one.state is LeaseState.LEAVING or one.worker in look.drained
            },
            drained=look.drained,
            troubled=frozenset(one.worker for one in look.workers if one.trouble),
            ended=look.ended,
            partitions=self._partitions(),
            current=look.assignment,
            inherited=_inherited(look),
            is_stored=look.is_stored,
            highest_version=look.highest_version,
        )
        self._state, decision = fleet_leader.step(self._state, facts, now)
        reserved = decision.reserved if isinstance(decision, AssignNow) else self._state.reserved
        extra = {_RESERVED: self._reserved_to_json(reserved)} if reserved else {}
        match decision:
            case AssignNow():
                return AssignmentProposal(
                    decision.owners, decision.reason, decision.cause, extra=extra, aside=decision.aside
                )
            case WaitUntil(at_s, reason):
                return AssignmentProposal(reason=reason, ask_again_at=at_s, extra=extra)
        return AssignmentProposal(reason=decision.reason, extra=extra)

    def successors(self, look: LeaderLook, leaving: int) -> Mapping[str, int]:
        """As the leader would assign what this worker has, if nothing else changed."""
        current = look.assignment
        if current is None:
            return {}
        stay = [one for one in _live(look) if one.id != leaving and current.workers.get(one.id) == one.instance]
        if not stay:
            return {}
        labels = next((one.labels for one in look.workers if one.worker == leaving), ())
        partitions = self._partitions()
        mine = [one for one in partitions if look.owners.get(one.id) == leaving]
        found = assign(
            partitions,
            stay,
            Assignment(look.owners, tuple(current.workers)),
            strategy=self._state.strategy,
            spilled={one.label for one in mine if one.label is not None and one.label not in labels},
        )
        return {one.id: found.owners[one.id] for one in mine if one.id in found.owners}

    def _begin_term(self, look: LeaderLook) -> None:
        """What was remembered of an earlier term is old; what the leader before has reserved is in its record."""
        reserved = look.assignment.extra.get(_RESERVED) if look.assignment is not None else None
        self._state = LeaderState(
            epoch=look.epoch,
            strategy=self._state.strategy,
            windows=self._state.windows,
            reserved=self._reserved_from_json(reserved),
        )

    def _reserved_to_json(self, reserved: Mapping[int, Reservation]) -> dict[str, Any]:
        return {
            str(worker): {
                "until_ms": round((one.until_s + self._clock_offset_s) * 1000),
                "partitions": sorted(one.partitions),
            }
            for worker, one in reserved.items()
        }

    def _reserved_from_json(self, found: object) -> dict[int, Reservation]:
        """What cannot be read is no reservation: then a worker that comes back gets other partitions."""
        try:
            return {
                int(worker): Reservation(one["until_ms"] / 1000 - self._clock_offset_s, frozenset(one["partitions"]))
                for worker, one in found.items()  # type: ignore[attr-defined]  # anything else is caught
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            return {}


def _live(look: LeaderLook) -> tuple[LiveWorker, ...]:
    return tuple(
        LiveWorker(one.worker, frozenset(one.labels), instance=one.instance)
        for one in look.workers
        if one.state is LeaseState.LIVE and one.worker not in look.drained
    )


def _inherited(look: LeaderLook) -> Mapping[str, int]:
    assigned = look.assignment.owners if look.assignment is not None else {}
    return {one: owner for one, owner in look.owners.items() if owner != assigned.get(one)}
