"""Leading a fleet: becoming the leader, staying it, expiring leases, writing assignments.

Theory of operation. The leader is a worker that also holds the record `leader`, under the rules of any lease: renewed
every lease_s / 3, taken by compare-and-set when it was seen unchanged for lease_s, with an epoch that only grows. It
does two things, both by compare-and-set on what it has read: it writes leases `expired` that it has seen unchanged for
lease_s, and it writes the assignment that its planner proposes. Workers refuse an assignment of an epoch that they know
to be over, and a new leader writes a new version first, so that nothing of the leader before can land any more. Without
a leader nobody's work changes.

| role | what happened | what follows |
| --- | --- | --- |
| FOLLOWER | read: no leader, a leader that left, or one unchanged for lease_s | write the next epoch: CANDIDATE |
| CANDIDATE | confirmed | LEADER |
| CANDIDATE | conflict | FOLLOWER |
| CANDIDATE | unknown | read: mine: LEADER; else FOLLOWER |
| LEADER | lease_s / 3 have passed | renew |
| LEADER | conflict, unknown | read: mine: go on; a lower epoch or none: write the next epoch; else FOLLOWER |
| LEADER | the deadline has passed | read: another's of a higher epoch: FOLLOWER; else write the next epoch |
| LEADER | leases name a higher epoch | renew with an epoch above it |
| LEADER | leases were read | expire, then plan |
| LEADER | the assignment: conflict, unknown | read it, then plan |
| LEADER | the worker leaves and owns nothing | write `left`: FOLLOWER |

A leader that is not sure of its lease, and one whose store went back a moment ago, expires and assigns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Protocol

from keylane.core.fleet_events import RecordEntry
from keylane.core.fleet_lease import HOLD_SHARE, RENEW_SHARE
from keylane.core.fleet_records import (
    ASSIGNMENT,
    HISTORY_LENGTH,
    LEADER,
    FleetAssignment,
    HistoryEntry,
    LeaderLease,
    LeaseState,
    WorkerLease,
    history_key,
    moves_between,
)
from keylane.core.fleet_requests import PendingWrite, StoreRequests
from keylane.core.fleet_view import FleetView


@dataclass(frozen=True, slots=True)
class AssignmentProposal:
    """What a planner wants. `owners` None: leave everything as it is."""

    owners: Mapping[str, int] | None = None
    reason: str = ""
    cause: str = ""
    ask_again_at: float | None = None
    """When to ask again, if nothing else happens before."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else to store with the assignment, for the planner of the next leader: JSON."""
    aside: frozenset[int] = frozenset()
    """Live workers that it does not count with: they are not named, as one that has not joined yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderLook:
    """What the leader knows of its fleet after a look."""

    epoch: int
    workers: tuple[WorkerLease, ...]
    """Who holds an id, by number. Those in the state `leaving` are to lose their partitions."""
    drained: frozenset[int]
    """Those of them that an operator has drained: they are to own nothing."""
    ended: frozenset[int]
    """Ids whose records say that the lease has ended. A worker in neither of the two has lost its record."""
    assignment: FleetAssignment | None
    """The newest that this worker has seen."""
    owners: Mapping[str, int]
    """Who is to own what: as assigned, or as workers that left have handed it over since."""
    is_stored: bool
    """The store has it. If not it is written again, whatever the planner says."""
    highest_version: int
    """The highest that any worker has seen."""


class AssignmentPlanner(Protocol):
    """Decides when and what to assign.

    Asked after every look of the leader, about twice in lease_s / 3, and never while an assignment is being written.
    """

    def __call__(self, look: LeaderLook, now: float) -> AssignmentProposal: ...

    def successors(self, look: LeaderLook, leaving: int) -> Mapping[str, int]:
        """Who takes over what a worker has that leaves: partition -> a worker that is live and in the assignment.

        Asked of any worker that leaves, not only of the leader.
        """
        ...


class LeaderRole(Enum):
    FOLLOWER = auto()
    CANDIDATE = auto()
    LEADER = auto()


@dataclass(slots=True)
class Leadership:
    """Of one worker, under one lease of its own."""

    view: FleetView
    requests: StoreRequests
    planner: AssignmentPlanner
    worker: int
    instance: str
    role: LeaderRole = LeaderRole.FOLLOWER
    lease: LeaderLease | None = None
    revision: int = 0
    deadline: float = 0.0
    renew_at: float = 0.0
    plan_at: float | None = None
    resigned: bool = False
    _sent: dict[tuple[int, ...], float] = field(default_factory=dict)
    _planned: dict[tuple[int, ...], HistoryEntry] = field(default_factory=dict)
    """For the history, once the assignment is known to be stored."""
    _notes: dict[str, HistoryEntry] = field(default_factory=dict)
    """Of assignments that are stored: not known to be in the history yet."""

    def is_leading(self, now: float) -> bool:
        return self.role is LeaderRole.LEADER and now < self.deadline

    # ---- the leader's lease --------------------------------------------------------------------------------

    def stand(self, now: float) -> None:
        """Become a candidate if there is no leader. To be called after a read, while the own lease is sure."""
        if self.role is not LeaderRole.FOLLOWER or self.resigned or self.requests.is_writing(LEADER):
            return
        seen = self.view.leader
        if not self.view.leader_read:
            return
        if seen is not None and seen.lease.state.is_held and seen.unchanged_for() < self.view.lease_s:
            return
        self.role, self.lease = LeaderRole.CANDIDATE, None
        self.revision = self.view.leader_revision
        self._write(self._next_epoch(), now)

    def _next_epoch(self) -> LeaderLease:
        seen = self.view.leader
        before = seen.lease.epoch if seen is not None and isinstance(seen.lease, LeaderLease) else 0
        epoch = max(before, self.view.highest_epoch) + 1
        return LeaderLease(worker=self.worker, instance=self.instance, epoch=epoch, beat=1)

    def renew(self, now: float) -> None:
        if self.role is not LeaderRole.LEADER or self.lease is None or self.requests.is_writing(LEADER):
            return
        if not self.is_leading(now):
            self.requests.look(LEADER)  # another may lead by now, with the revision of before in a store that went back
            self.renew_at = now + self.view.lease_s * RENEW_SHARE / 2
        elif self.view.highest_epoch > self.lease.epoch:
            self._write(self._next_epoch(), now)
        else:
            beats = [rank[1] for rank in self._sent if rank[0] == self.lease.epoch]
            self._write(replace(self.lease, beat=max(self.lease.beat, *beats, 0) + 1), now)

    def resign(self, now: float) -> bool:
        """Whether the leader's lease is given up, or was never held."""
        if self.role is LeaderRole.FOLLOWER:
            self.resigned = True
            return True
        if self.role is LeaderRole.LEADER and not self.is_leading(now):
            return True  # another worker may lead by now
        if self.role is LeaderRole.LEADER and self.lease is not None and not self.requests.is_writing(LEADER):
            self.resigned = True
            self._write(replace(self.lease, beat=self.lease.beat + 1, state=LeaseState.LEFT), now)
        return False

    def _write(self, lease: LeaderLease, now: float) -> None:
        lease = replace(lease, version=self.view.highest_version)
        self._sent = {rank: sent for rank, sent in self._sent.items() if now - sent < 4 * self.view.lease_s}
        self._sent[lease.rank] = now
        self.renew_at = now + self.view.lease_s * RENEW_SHARE
        self.requests.write(lease, self.revision, now)

    def confirmed(self, write: PendingWrite, revision: int, now: float) -> None:
        match write.record:
            case LeaderLease():
                self._adopt(write.record, revision, write.sent_at)
                self.plan(now)
            case FleetAssignment():
                self.view.assignment_revision, self.view.stored_assignment = revision, write.record
                self.view.remember(write.record)
                self.view.follow(write.record)
                self.renew(now)  # tells everybody that there is another version
                self._note_history(now)
            case HistoryEntry():
                self._noted(write.record)
            case _:
                pass  # an expired lease: the next look shows it

    def _adopt(self, lease: LeaderLease, revision: int, sent_at: float) -> None:
        self.lease, self.revision = lease, revision
        self.deadline = max(self.deadline, sent_at + HOLD_SHARE * self.view.lease_s)
        self.view.remember(lease)
        self.role = LeaderRole.LEADER if lease.state.is_held else LeaderRole.FOLLOWER

    def conflicted(self, write: PendingWrite) -> None:
        match write.record:
            case LeaderLease():
                if self.role is LeaderRole.CANDIDATE:
                    self.role = LeaderRole.FOLLOWER
                self.deadline = 0.0
                self.requests.read(LEADER)
            case FleetAssignment():
                self.requests.read(ASSIGNMENT)
            case _:
                pass

    def unknown(self, write: PendingWrite) -> None:
        match write.record:
            case LeaderLease():
                self.requests.read(LEADER)
            case FleetAssignment():
                self.requests.read(ASSIGNMENT)
            case _:
                pass

    def _note_history(self, now: float) -> None:
        """Take the newest version into the history, once the store has it; look after notes that were not confirmed.

        Up to version 100 its place in the history is empty. Later one from long ago is there, and must be read first.
        """
        if self._notes:
            self.requests.look(*(key for key in self._notes if not self.requests.is_writing(key)))
        stored = self.view.stored_assignment
        note = self._planned.get(stored.rank) if stored is not None else None
        if note is None:
            return
        self._planned = {rank: one for rank, one in self._planned.items() if rank > note.rank}
        key = history_key(note.version)
        self._notes[key] = note
        if note.version <= HISTORY_LENGTH and not self.requests.is_writing(key):
            self.requests.write(note, 0, now)
        else:
            self.requests.look(key)

    def _noted(self, note: HistoryEntry) -> None:
        key = history_key(note.version)
        if key in self._notes and self._notes[key].rank <= note.rank:
            del self._notes[key]

    def found_history(self, key: str, entry: RecordEntry | None, now: float) -> None:
        """What the history has in the place of a note: that note, or one to write over."""
        note = self._notes.get(key)
        if note is None or self.requests.is_writing(key):
            return
        found = self.view.parse(key, entry) if entry is not None else None
        if isinstance(found, HistoryEntry) and found.rank >= note.rank:
            self._noted(found)
        else:
            self.requests.write(note, entry.revision if entry is not None else 0, now)

    def found(self, entry: RecordEntry | None, now: float) -> None:
        """The leader's record, as a read shows it: perhaps a stale one. The view has taken it already."""
        if self.role is LeaderRole.FOLLOWER or self.requests.is_writing(LEADER):
            return
        lease = self.view.parse(LEADER, entry) if entry is not None else None
        revision = entry.revision if entry is not None else 0
        if isinstance(lease, LeaderLease) and self._has_sent(lease):
            self._adopt(lease, revision, self._sent[lease.rank])
            if self.role is LeaderRole.LEADER and now >= self.deadline:
                self._write(self._next_epoch(), now)
        elif self.role is LeaderRole.CANDIDATE or self._is_replaced(lease):
            self.role = LeaderRole.FOLLOWER
        elif now >= self.deadline:
            # Also as it was: another may have led meanwhile. If the read is stale, this write fails.
            self.revision = revision
            self._write(self._next_epoch(), now)

    def _has_sent(self, found: LeaderLease) -> bool:
        """Whether it is of this leader, and not from before its last confirmed write: then the read is stale."""
        is_stale = self.lease is not None and found.rank < self.lease.rank
        return found.instance == self.instance and found.rank in self._sent and not is_stale

    def _is_replaced(self, found: object) -> bool:
        return self.lease is None or (isinstance(found, LeaderLease) and found.rank > self.lease.rank)

    # ---- what a leader does --------------------------------------------------------------------------------

    def act(self, now: float) -> None:
        """After a look. Only while the leader is sure of its own lease, too."""
        if self.is_leading(now) and not self.view.is_recovering(now):
            self._expire(now)
            self.plan(now)

    def _expire(self, now: float) -> None:
        for worker, seen in self.view.workers.items():
            lease = seen.lease
            if not isinstance(lease, WorkerLease) or not lease.state.is_held or worker in self.view.absent:
                continue
            # Not only another's: a write that took an id may land when this worker has already taken another id.
            if seen.unchanged_for() >= self.view.lease_s and worker != self.worker:
                self.requests.expire(worker, seen, now)

    def plan(self, now: float) -> None:
        """Write another assignment if the planner wants one, or if the stored one is not of this leader."""
        view = self.view
        self._note_history(now)
        if not self.is_leading(now) or view.is_recovering(now) or not view.assignment_read:
            return
        if self.requests.is_writing(ASSIGNMENT) or self.lease is None or self.lease.epoch < view.highest_epoch:
            return
        look = self.look()
        proposal = self.planner(look, now)
        self.plan_at = proposal.ask_again_at
        present = view.assignment
        unnamed = look.drained | proposal.aside
        instances = {lease.worker: lease.instance for lease in look.workers if lease.worker not in unnamed}
        cause = proposal.cause
        if proposal.owners is not None:
            owners, reason, extra = proposal.owners, proposal.reason, proposal.extra
        elif present is None or (look.is_stored and self._is_current(present, instances)):
            return
        else:
            owners, reason, cause = look.owners, "another leader, or a worker that came back", "leader"
            extra = proposal.extra or present.extra
            instances = self._named(owners, present, instances)
        assignment = FleetAssignment(
            epoch=self.lease.epoch,
            version=view.highest_version + 1,
            owners=owners,
            workers=instances,
            reason=reason,
            extra=extra,
        )
        self._planned[assignment.rank] = HistoryEntry(
            epoch=assignment.epoch,
            version=assignment.version,
            at_ms=view.wall_ms(now),
            cause=cause,
            reason=reason,
            moves=moves_between(present.owners if present is not None else {}, owners),
        )
        self.requests.write(assignment, view.assignment_revision, now)

    def _named(
        self, owners: Mapping[str, int], present: FleetAssignment, instances: Mapping[int, str]
    ) -> dict[int, str]:
        """The workers of an assignment that the planner has not made: those of the present one, and all owners.

        An owner that is gone stays named, and a worker that has just come is not: the planner must see both.
        """
        owning = set(owners.values())
        named = {**present.workers, **{one: instances[one] for one in owning & instances.keys()}}
        return {one: instance for one, instance in named.items() if one in owning or one in instances}

    def look(self) -> LeaderLook:
        view = self.view
        stored, present = view.stored_assignment, view.assignment
        live = sorted(view.live_leases(), key=lambda lease: lease.worker)
        ended = (number for number, seen in view.workers.items() if not seen.lease.state.is_held)
        return LeaderLook(
            epoch=self.lease.epoch if self.lease is not None else 0,
            workers=tuple(live),
            drained=frozenset(lease.worker for lease in live if view.is_drained(lease)),
            ended=frozenset(ended),
            assignment=present,
            owners=view.owners(),
            is_stored=present is not None and stored is not None and stored.rank == present.rank,
            highest_version=view.highest_version,
        )

    def _is_current(self, assignment: FleetAssignment, instances: Mapping[int, str]) -> bool:
        """It is this leader's, and means the instances that hold the ids of its owners now."""
        assert self.lease is not None
        owners = set(assignment.owners.values()) & instances.keys()
        return assignment.epoch == self.lease.epoch and all(
            assignment.workers.get(owner) == instances[owner] for owner in owners
        )
