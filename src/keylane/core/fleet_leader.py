"""When the leader of a fleet writes an assignment, and which one.

Owns: `step`, from what the leader sees to what it does next. Never reads or writes a record, never expires a lease, and
looks at no clock: every look brings the time.

What a look finds, and how soon it is acted on (`LeaderWindows` has the times):

| what | cause | when |
| --- | --- | --- |
| no assignment yet | start | when no worker has come for `settle_s`, `cold_start_s` at most |
| the lease of an owner has ended, or its id has another holder | emergency | at once |
| an operator has drained an owner | drain | at once |
| an owner reports trouble (`core/fleet_relief.py`) | trouble | at once |
| partitions that nobody has | partitions | when nothing has changed for `settle_s`, `settle_most_s` at most |
| workers came, left or want to leave, partitions are gone, weights changed | scale | the same, after the cooldown |
| the store has lost the assignment, or has an older one | restore | at the second look |

- Between any two versions `min_interval_s` passes. The cooldown after a change of scale grows threefold with each one
  that follows, so churn that does not end makes a version every `cooldown_most_s`.
- Every version takes all workers and partitions there are, whatever its cause. What has gone back to what it was, such
  as a worker that came and went, makes none.
- A smaller world seen once is not believed. A worker without a record, or less than half of the workers or partitions
  of the current assignment, must be seen by a second look, `confirm_s` after the first.
- A worker that leaves names its successors, and they take over at once; the next version says the same, or better.
  Where it can name none it remains the owner, in state leaving, until a version takes its partitions away. What it
  had is reserved for `id_grace_s`: if its id comes back it gets the same partitions back.
- A partition whose label no worker has waits for `label_grace_s`, then goes to any worker.
- Without any worker the last assignment stands.

Perform an `AssignNow` by compare-and-set, and make no other look before its outcome is known. Then look again with what
is stored: that look tells the state that the version is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from keylane.core.assignment_strategies import Assignment, LiveWorker, Strategy, assign
from keylane.core.fleet_partitions import Partition
from keylane.core.fleet_relief import Relief, relieve
from keylane.core.plans import ranges

Cause = Literal["start", "emergency", "drain", "trouble", "partitions", "scale", "restore"]

_COOLDOWN_GROWTH = 3
_FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderWindows:
    """How long the leader waits for what."""

    cold_start_s: float = 5.0
    settle_s: float = 1.0
    settle_most_s: float = 5.0
    cooldown_s: float = 4.0
    cooldown_most_s: float = 15.0
    min_interval_s: float = 0.5
    confirm_s: float = 1.0
    id_grace_s: float = 30.0
    label_grace_s: float = 30.0
    relief_s: float = 60.0
    relief_again_s: float = 300.0


class CurrentAssignment(Protocol):
    """What the leader needs to know of an assignment that was written."""

    @property
    def epoch(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def owners(self) -> Mapping[str, int]:
        """The worker of every partition."""

    @property
    def workers(self) -> Mapping[int, str]:
        """The instance of every worker that was considered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """What one look shows. A worker of the current assignment that is in none of the first three has no record."""

    live: tuple[LiveWorker, ...]
    leaving: Mapping[int, str] = field(default_factory=dict)
    """Workers that want to leave, with their instances."""
    drained: frozenset[int] = frozenset()
    """Those of them that an operator has drained."""
    troubled: frozenset[int] = frozenset()
    """Live workers that report trouble."""
    aside: frozenset[int] = frozenset()
    """Workers that `step` has set aside for that: it counts them as leaving."""
    ended: frozenset[int] = frozenset()
    """Ids whose records say that the lease has ended: the worker left, or the lease expired."""
    partitions: tuple[Partition, ...]
    current: CurrentAssignment | None
    """The newest assignment that anybody has seen."""
    inherited: Mapping[str, int] = field(default_factory=dict)
    """Partition -> the worker that has it, from one that left since."""
    is_stored: bool = True
    """False: the store has no assignment, or an older one than `current`."""
    highest_version: int = 0
    """The highest that any worker has seen."""

    @property
    def owners(self) -> Mapping[str, int]:
        assigned = self.current.owners if self.current is not None else {}
        return {**assigned, **self.inherited} if self.inherited else assigned


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignNow:
    """Write this assignment."""

    epoch: int
    version: int
    owners: Mapping[str, int]
    workers: Mapping[int, str]
    waiting: tuple[str, ...]
    """Partitions that wait for a worker with their label."""
    reserved: Mapping[int, Reservation]
    aside: frozenset[int]
    """Live workers that are given nothing, for the trouble that they report."""
    cause: Cause
    reason: str
    """For people: `worker 3 expired; 2 workers joined`."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Look again at this time, or when something has changed."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class NoChange:
    """Look again when something has changed."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepDown:
    """Another leader has written with a higher epoch: write nothing."""

    reason: str


LeaderDecision = AssignNow | WaitUntil | NoChange | StepDown


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a worker had when it left, and until when it gets that back."""

    until_s: float
    partitions: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Pending:
    """Differences that wait for a window: since when there are any, and when they last changed."""

    what: frozenset[tuple[str, int | str]] = frozenset()
    since_s: float = 0.0
    changed_s: float = 0.0

    def seen(self, what: frozenset[tuple[str, int | str]], now_s: float) -> _Pending:
        if what == self.what:
            return self
        return _Pending(what, self.since_s if self.what and what else now_s, now_s)

    def settled_s(self, windows: LeaderWindows, most_s: float) -> float:
        return min(self.changed_s + windows.settle_s, self.since_s + most_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """What a leader remembers between two looks. A new leader starts with its epoch alone, or with what the record
    of the assignment says is reserved."""

    epoch: int
    strategy: Strategy = "consistent"
    windows: LeaderWindows = LeaderWindows()
    reserved: Mapping[int, Reservation] = field(default_factory=dict)
    version: int = 0
    """The newest that it has seen."""
    assigned_s: float = -math.inf
    """When it saw its own newest version written."""
    scaled_s: float = -math.inf
    scaled_in_a_row: int = 0
    proposed: AssignNow | None = None
    proposed_partitions: tuple[Partition, ...] | None = None
    proposed_workers: frozenset[LiveWorker] | None = None
    assigned_partitions: tuple[Partition, ...] | None = None
    assigned_workers: frozenset[LiveWorker] | None = None
    start: _Pending = _Pending()
    scale: _Pending = _Pending()
    uncovered: _Pending = _Pending()
    absent: Mapping[int, float] = field(default_factory=dict)
    """Workers without a record, since when."""
    small_s: float | None = None
    """Since when more than half is gone."""
    unstored_s: float | None = None
    absent_labels: Mapping[str, float] = field(default_factory=dict)
    relieved: Mapping[int, Relief] = field(default_factory=dict)


def step(state: LeaderState, facts: FleetFacts, now_s: float) -> tuple[LeaderState, LeaderDecision]:
    """What to do after a look at the fleet."""
    current = facts.current
    if current is not None and current.epoch > state.epoch:
        return state, StepDown(f"the assignment is of epoch {current.epoch}, and this leader's is {state.epoch}")
    state, facts = _set_aside(_adopt(state, current, now_s), facts, now_s)
    state = _remember(state, facts, now_s)
    if not facts.live:
        return state, NoChange("no worker is live: the last assignment stands")
    if current is None:
        return _cold_start(state, facts, now_s)
    need = _need(state, facts, now_s)
    state = replace(
        state,
        scale=state.scale.seen(need.scale, now_s),
        uncovered=state.uncovered.seen(need.uncovered, now_s),
    )
    timers = _second_looks(state, facts, now_s)
    due_s, cause = _due(state, need)
    if cause is not None:
        if now_s >= due_s:
            return _propose(state, facts, now_s, cause, _words(state, need))
        timers.append((due_s, f"{cause}: {_words(state, need)}"))
    if timers:
        return state, WaitUntil(*min(timers))
    return state, NoChange("every partition has a worker")


# ---- what a look shows ------------------------------------------------------------------------------


def _adopt(state: LeaderState, current: CurrentAssignment | None, now_s: float) -> LeaderState:
    """Take note of a version that was not seen before."""
    if current is None or current.version <= state.version:
        return state
    state = replace(state, version=current.version)
    proposed = state.proposed
    if proposed is None or (proposed.epoch, proposed.owners) != (current.epoch, current.owners):
        return state
    state = replace(
        state,
        reserved=proposed.reserved,
        assigned_s=now_s,
        assigned_partitions=state.proposed_partitions,
        assigned_workers=state.proposed_workers,
        proposed=None,
        proposed_partitions=None,
        proposed_workers=None,
        start=_Pending(),
        scale=_Pending(),
        uncovered=_Pending(),
    )
    if proposed.cause != "scale":
        return state
    follows = now_s - state.scaled_s <= 2 * state.windows.cooldown_most_s
    return replace(state, scaled_s=now_s, scaled_in_a_row=state.scaled_in_a_row + 1 if follows else 1)


def _set_aside(state: LeaderState, facts: FleetFacts, now_s: float) -> tuple[LeaderState, FleetFacts]:
    """Without the workers that are to get nothing because of their trouble."""
    if not facts.troubled and not state.relieved:
        return state, facts
    windows = state.windows
    relieved, aside = relieve(
        state.relieved,
        facts.live,
        facts.troubled,
        relief_s=windows.relief_s,
        relief_again_s=windows.relief_again_s,
        now_s=now_s,
    )
    facts = replace(
        facts,
        live=tuple(worker for worker in facts.live if worker.id not in aside),
        leaving={**facts.leaving, **{worker: relieved[worker].instance for worker in aside}},
        aside=aside,
    )
    return replace(state, relieved=relieved), facts


def _remember(state: LeaderState, facts: FleetFacts, now_s: float) -> LeaderState:
    """Since when workers have no record, half of the fleet is gone, the store is behind, labels have no worker."""
    current = facts.current
    there = {*(worker.id for worker in facts.live), *facts.leaving, *facts.ended}
    absent = [worker for worker in (current.workers if current else ()) if worker not in there]
    labels = {label for worker in facts.live for label in worker.labels}
    without = _labels(facts) - labels
    spilled = _spilled_before(facts) if without else frozenset()
    is_small = current is not None and _is_small(facts, current)
    is_behind = current is not None and not facts.is_stored
    return replace(
        state,
        absent={worker: state.absent.get(worker, now_s) for worker in absent},
        small_s=_since(state.small_s, now_s) if is_small else None,
        unstored_s=_since(state.unstored_s, now_s) if is_behind else None,
        absent_labels={
            label: -math.inf if label in spilled else state.absent_labels.get(label, now_s) for label in sorted(without)
        },
        reserved=_reserve_left(state, facts, now_s) if facts.inherited else state.reserved,
        assigned_partitions=facts.partitions if state.assigned_partitions is None else state.assigned_partitions,
        assigned_workers=frozenset(facts.live) if state.assigned_workers is None else state.assigned_workers,
    )


def _spilled_before(facts: FleetFacts) -> frozenset[str]:
    """Labels with a partition that lives with a worker that lacks it: a new leader does not take it away again."""
    current = facts.current
    if current is None:
        return frozenset()
    live = {worker.id: worker for worker in facts.live if current.workers.get(worker.id) == worker.instance}
    owned = facts.owners
    owners = ((one.label, live.get(owned.get(one.id, -1))) for one in facts.partitions)
    return frozenset(label for label, owner in owners if label and owner and label not in owner.labels)


def _since(before_s: float | None, now_s: float) -> float:
    return now_s if before_s is None else before_s


def _is_small(facts: FleetFacts, current: CurrentAssignment) -> bool:
    """Whether more than half of the workers or of the partitions of the assignment are gone."""
    ids = {one.id for one in facts.partitions}
    kept = sum(one in ids for one in current.owners)
    return 2 * len(facts.live) < len(current.workers) or 2 * kept < len(current.owners)


@dataclass(frozen=True, slots=True)
class _Need:
    """What differs between a look and the current assignment."""

    lost: tuple[int, ...]
    """Owners whose lease has ended, whose id has another holder, or whose record is gone for good."""
    drained: tuple[int, ...]
    """Owners that an operator has drained."""
    aside: tuple[int, ...]
    """Owners that report trouble."""
    uncovered: frozenset[tuple[str, int | str]]
    scale: frozenset[tuple[str, int | str]]


def _need(state: LeaderState, facts: FleetFacts, now_s: float) -> _Need:
    current = facts.current
    assert current is not None
    live = {worker.id: worker for worker in facts.live}
    holders = {**facts.leaving, **{worker.id: worker.instance for worker in facts.live}}
    owners = facts.owners
    owning = set(owners.values())
    lost = [
        worker
        for worker in owning
        if (
            worker in facts.ended
            or holders.get(worker, current.workers.get(worker)) != current.workers.get(worker)
            or worker not in current.workers
            or (worker in state.absent and now_s >= state.absent[worker] + state.windows.confirm_s)
        )
    ]
    spilled = _spilled(state, now_s)
    pools = {label: {one.id for one in facts.live if label in one.labels} for label in _labels(facts)}
    uncovered: set[tuple[str, int | str]] = set()
    scale: set[tuple[str, int | str]] = set()
    for one in facts.partitions:
        pool = pools.get(one.label) if one.label is not None else None
        owner = owners.get(one.id)
        if owner is None:
            if one.label is None or pool or one.label in spilled:
                uncovered.add(("new", one.id))
        elif pool and owner in live and owner not in pool:
            scale.add(("label", one.id))
    ids = {one.id for one in facts.partitions}
    scale |= {("removed", one) for one in current.owners if one not in ids}
    scale |= {
        ("joined", worker.id)
        for worker in facts.live
        if current.workers.get(worker.id) != worker.instance and worker.id not in owning
    }
    at_once = facts.drained | facts.aside
    scale |= {("leaving", worker) for worker in facts.leaving if worker in owning and worker not in at_once}
    scale |= {("left", current.owners[one]) for one in facts.inherited if one in current.owners}
    if _weighs_otherwise(state, facts, current):
        scale.add(("weights", 0))
    drained, aside = (tuple(sorted(some & owning)) for some in (facts.drained, facts.aside))
    return _Need(tuple(sorted(lost)), drained, aside, frozenset(uncovered), frozenset(scale))


def _weighs_otherwise(state: LeaderState, facts: FleetFacts, current: CurrentAssignment) -> bool:
    """Whether partitions that are assigned have other weights or labels, or workers other capacities or labels."""
    if facts.partitions != state.assigned_partitions:
        before = {one.id: one for one in state.assigned_partitions or ()}
        if any(one != before.get(one.id, one) for one in facts.partitions if one.id in current.owners):
            return True
    before_workers = {(one.id, one.instance): one for one in state.assigned_workers or ()}
    return any(one != before_workers.get((one.id, one.instance), one) for one in facts.live)


def _labels(facts: FleetFacts) -> set[str]:
    return {one.label for one in facts.partitions if one.label is not None}


def _spilled(state: LeaderState, now_s: float) -> frozenset[str]:
    grace_s = state.windows.label_grace_s
    return frozenset(label for label, since_s in state.absent_labels.items() if now_s >= since_s + grace_s)


# ---- when -------------------------------------------------------------------------------------------


def _cold_start(state: LeaderState, facts: FleetFacts, now_s: float) -> tuple[LeaderState, LeaderDecision]:
    if not facts.partitions:
        return state, NoChange("the source has no partitions")
    found = frozenset[tuple[str, int | str]](("joined", worker.id) for worker in facts.live)
    state = replace(state, start=state.start.seen(found, now_s))
    due_s = state.start.settled_s(state.windows, state.windows.cold_start_s)
    workers = _count(len(facts.live), "worker")
    if now_s < due_s:
        return state, WaitUntil(due_s, f"start: {workers} so far")
    return _propose(state, facts, now_s, "start", workers)


def _due(state: LeaderState, need: _Need) -> tuple[float, Cause | None]:
    """When the next version is due, and the most urgent cause of it; no cause: nothing is to be done."""
    windows = state.windows
    causes: list[tuple[float, Cause]] = []
    if need.lost:
        causes.append((-math.inf, "emergency"))
    if need.drained:
        causes.append((-math.inf, "drain"))
    if need.aside:
        causes.append((-math.inf, "trouble"))
    if state.unstored_s is not None:
        causes.append((state.unstored_s + windows.confirm_s, "restore"))
    if need.uncovered:
        causes.append((state.uncovered.settled_s(windows, windows.settle_most_s), "partitions"))
    if need.scale:
        cooldown_s = 0.0
        if state.scaled_in_a_row:
            grown_s = windows.cooldown_s * _COOLDOWN_GROWTH ** min(state.scaled_in_a_row - 1, 20)
            cooldown_s = min(grown_s, windows.cooldown_most_s)
        settled_s = state.scale.settled_s(windows, windows.settle_most_s)
        causes.append((max(settled_s, state.scaled_s + cooldown_s), "scale"))
    if not causes:
        return math.inf, None
    due_s, cause = min(causes, key=lambda one: one[0])
    confirmed_s = -math.inf if state.small_s is None else state.small_s + windows.confirm_s
    return max(due_s, state.assigned_s + windows.min_interval_s, confirmed_s), cause


def _second_looks(state: LeaderState, facts: FleetFacts, now_s: float) -> list[tuple[float, str]]:
    """When to look again at what is not believed yet, and when labels spill."""
    windows = state.windows
    timers = []
    for worker, since_s in state.absent.items():
        if now_s < since_s + windows.confirm_s:
            timers.append((since_s + windows.confirm_s, f"worker {worker} has no record: look again"))
    if state.small_s is not None and now_s < state.small_s + windows.confirm_s:
        timers.append((state.small_s + windows.confirm_s, "more than half of the fleet is gone: look again"))
    waiting = {one.label for one in facts.partitions if facts.current and one.id not in facts.current.owners}
    for label, since_s in state.absent_labels.items():
        if label in waiting and now_s < since_s + windows.label_grace_s:
            timers.append((since_s + windows.label_grace_s, f"partitions wait for a worker with label {label}"))
    for worker in facts.aside:
        since_s = state.relieved[worker].since_s
        timers.append((since_s + windows.relief_s, f"worker {worker} has trouble, and is tried again then"))
    return timers


# ---- what -------------------------------------------------------------------------------------------


def _propose(
    state: LeaderState, facts: FleetFacts, now_s: float, cause: Cause, reason: str
) -> tuple[LeaderState, LeaderDecision]:
    current = facts.current
    live = {worker.id: worker.instance for worker in facts.live}
    previous = Assignment(facts.owners, tuple(current.workers)) if current else None
    kept = {worker: one for worker, one in state.reserved.items() if one.until_s > now_s}
    homes = {one: worker for worker, held in sorted(kept.items()) for one in held.partitions}
    found = assign(
        facts.partitions,
        facts.live,
        previous,
        strategy=state.strategy,
        homes=homes,
        spilled=_spilled(state, now_s),
    )
    if current and found.owners == current.owners and live == current.workers and cause != "restore":
        # Weights that move nothing. What was judged is remembered, or every look would judge it again.
        state = replace(state, assigned_partitions=facts.partitions, assigned_workers=frozenset(facts.live))
        return state, NoChange("the assignment is right as it is")
    decision = AssignNow(
        epoch=state.epoch,
        version=max(state.version, facts.highest_version, current.version if current else 0) + 1,
        owners=found.owners,
        workers=live,
        waiting=found.waiting,
        reserved=_reserve(state, facts.owners, live, kept, now_s),
        aside=facts.aside,
        cause=cause,
        reason=reason,
    )
    state = replace(
        state,
        proposed=decision,
        proposed_partitions=facts.partitions,
        proposed_workers=frozenset(facts.live),
    )
    return state, decision


def _reserve_left(state: LeaderState, facts: FleetFacts, now_s: float) -> Mapping[int, Reservation]:
    """What workers had that have handed it over since the current version."""
    assert facts.current is not None
    had: dict[int, set[str]] = {}
    for partition in facts.inherited:
        had.setdefault(facts.current.owners.get(partition, -1), set()).add(partition)
    until_s = now_s + state.windows.id_grace_s
    left = {worker: Reservation(until_s, frozenset(held)) for worker, held in had.items()}
    return {**left, **{worker: one for worker, one in state.reserved.items() if one.until_s > now_s}}


def _reserve(
    state: LeaderState,
    owners: Mapping[str, int],
    live: Mapping[int, str],
    kept: Mapping[int, Reservation],
    now_s: float,
) -> dict[int, Reservation]:
    """What those that are not there any more get back. A partition belongs to the first that left."""
    reserved = {worker: one for worker, one in kept.items() if worker not in live}
    taken = {one for held in reserved.values() for one in held.partitions}
    had: dict[int, set[str]] = {}
    for partition, worker in owners.items():
        if worker not in live and worker not in reserved and partition not in taken:
            had.setdefault(worker, set()).add(partition)
    until_s = now_s + state.windows.id_grace_s
    return reserved | {worker: Reservation(until_s, frozenset(held)) for worker, held in had.items()}


# ---- words ------------------------------------------------------------------------------------------


def _words(state: LeaderState, need: _Need) -> str:
    kinds: dict[str, list[int | str]] = {}
    for kind, what in sorted(need.scale | need.uncovered, key=str):
        kinds.setdefault(kind, []).append(what)
    found = []
    if need.lost:
        found.append(f"{_named('worker', need.lost)} lost")
    if need.drained:
        found.append(f"{_named('worker', need.drained)} drained")
    if need.aside:
        found.append(f"{_named('worker', need.aside)} in trouble")
    for kind, noun, verb in (
        ("left", "worker", "left"),
        ("leaving", "worker", "leaving"),
        ("joined", "worker", "joined"),
        ("new", "partition", "without a worker"),
        ("removed", "partition", "removed"),
        ("label", "partition", "back to the workers with its label"),
    ):
        if kind in kinds:
            found.append(f"{_named(noun, kinds[kind])} {verb}")
    if "weights" in kinds:
        found.append("weights changed")
    if state.unstored_s is not None:
        found.append("the store had lost the assignment")
    return "; ".join(found)


def _named(noun: str, which: Iterable[int | str]) -> str:
    """`worker 3`, `workers 1-3,7`, or their number where names would be long."""
    listed = list(which)
    numbers = [one for one in listed if isinstance(one, int)]
    if len(numbers) == len(listed) and len(text := ranges(sorted(numbers))) <= 40:
        return f"{noun} {text}" if len(listed) == 1 else f"{noun}s {text}"
    if len(listed) <= _FEW:
        return f"{noun}{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
    return _count(len(listed), noun)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
