"""What one worker knows of its fleet: the records as it last read them, and the highest numbers it has ever seen.

Owns: when each lease was first seen as it is, whether a record that is missing counts as gone, whether the store went
back, and the next fencing token. Decides nothing about the worker itself.

Four rules keep a store that lies from doing harm:
- A lease ends by a write (`left`, `expired`), never because a read lacks it. A record that is gone counts as gone only
  when two reads at least 2 lease_s apart lacked it.
- A lease is old when it is unchanged for lease_s, and the store has answered looks without a gap for as long. After an
  outage of the store everybody has the whole lease_s to renew.
- The growing number of a record (`rank`) says which of two is the newer one, not the store's revision.
- A token exceeds the one before, every token that this worker has seen, and the wall clock in milliseconds. So it grows
  also where the store and every worker that remembers have gone; then only as well as the clocks of the machines agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from keylane.core.fleet_events import RecordEntry
from keylane.core.fleet_records import (
    ASSIGNMENT,
    DRAINS,
    LEADER,
    DrainedWorkers,
    FleetAssignment,
    FleetClaim,
    FleetRecord,
    FleetSpec,
    LeaderLease,
    PartitionTable,
    WorkerLease,
    WorkerPositions,
    from_json,
    worker_key,
)
from keylane.errors import BrokenFleetRecord

LONGEST_GAP_SHARE = 2 / 3
"""Looks that are further apart than this share of lease_s: the store did not answer, or this worker stood still."""


@dataclass(slots=True)
class Sighting:
    """A lease as it was last read."""

    revision: int
    lease: WorkerLease | LeaderLease
    since: float
    """When this revision was first seen: no earlier than its holder sent it."""
    checked: float
    """When a read last showed it."""

    def unchanged_for(self) -> float:
        return self.checked - self.since

    def seen_again(self, now: float, steady_since: float) -> None:
        """A read shows it as it was. While nobody could look, nobody could renew it either: such a time is not held
        against its holder."""
        self.since = max(self.since, steady_since)
        self.checked = now


@dataclass(slots=True)
class FleetView:
    """The records, and what was remembered of them. Mutable: a fleet may have thousands."""

    lease_s: float
    clock_offset_s: float
    created: str | None = None
    highest_revision: int = 0
    highest_token: int = 0
    highest_version: int = 0
    highest_epoch: int = 0
    workers: dict[int, Sighting] = field(default_factory=dict)
    absent: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Worker -> the first and the last read of its key that found nothing."""
    deleted: dict[int, int] = field(default_factory=dict)
    """Worker -> the revision that a write of its absent record must expect: that of a delete marker, or 0."""
    leader: Sighting | None = None
    leader_read: bool = False
    """A read has told about the leader in this store."""
    leader_revision: int = 0
    """What a write of the leader's record must expect."""
    assignment: FleetAssignment | None = None
    """The newest that was ever seen: what this worker follows."""
    inherited: dict[str, int] = field(default_factory=dict)
    """Partition -> the worker that has it from one that left, under this assignment."""
    handovers: int = 0
    """How often `inherited` has changed."""
    stored_assignment: FleetAssignment | None = None
    assignment_revision: int = 0
    assignment_read: bool = False
    drained: Mapping[int, str] = field(default_factory=dict)
    """Workers that are to own nothing, with their instances."""
    recovering_until: float = 0.0
    losses: int = 0
    """How often the store went back."""
    broken: dict[str, str] = field(default_factory=dict)
    looked_at: float = -math.inf
    steady_since: float = -math.inf
    """Since then the store has answered looks without a gap."""
    _heard: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    """Key of a lease -> the last renewal that a hint told of, and when."""

    # ---- numbers that only grow ----------------------------------------------------------------------------

    def wall_ms(self, now: float) -> int:
        return int((now + self.clock_offset_s) * 1000)

    def next_token(self, previous: int, now: float) -> int:
        return max(previous + 1, self.highest_token + 1, self.wall_ms(now))

    def remember(self, record: FleetRecord) -> None:
        match record:
            case WorkerLease():
                self.highest_token = max(self.highest_token, record.highest_token)
                self.highest_version = max(self.highest_version, record.highest_version)
                self.highest_epoch = max(self.highest_epoch, record.highest_epoch)
            case LeaderLease():
                self.highest_epoch = max(self.highest_epoch, record.epoch)
            case FleetAssignment():
                self.highest_epoch = max(self.highest_epoch, record.epoch)
                self.highest_version = max(self.highest_version, record.version)
            case FleetClaim():
                self.highest_token = max(self.highest_token, record.token)
            case FleetSpec() | PartitionTable() | WorkerPositions():
                pass

    # ---- reads ---------------------------------------------------------------------------------------------

    def parse(self, key: str, entry: RecordEntry) -> FleetRecord | None:
        """The record of an entry; None if there is none, or none that can be read."""
        self.broken.pop(key, None)
        self.highest_revision = max(self.highest_revision, entry.revision)
        if entry.value is None:
            return None
        try:
            record = from_json(key, entry.value)
        except BrokenFleetRecord as error:
            self.broken[key] = str(error)
            return None
        self.remember(record)
        return record

    def looked(self, now: float) -> None:
        """The store has answered a look, at whatever."""
        if now - self.looked_at > LONGEST_GAP_SHARE * self.lease_s:
            self.steady_since = now
        self.looked_at = now

    def next_expiry(self, now: float, *, of_workers: bool = True) -> float:
        """When the next lease is old, if nobody renews it: a look at that moment loses no time."""
        leases = [*(self.workers.values() if of_workers else ()), *([self.leader] if self.leader is not None else [])]
        due = (one.since + self.lease_s for one in leases if one.lease.state.is_held)
        return min((at for at in due if at > now), default=math.inf)

    def heard(self, key: str, value: bytes, now: float) -> None:
        """A renewal was announced: if a read shows it later, it was seen now."""
        if key not in self._heard or self._heard[key][0] != value:
            self._heard[key] = (value, now)

    def is_led(self, now: float, overdue_s: float) -> bool:
        """Whether a read or a hint has shown within `overdue_s` that somebody leads."""
        if self.leader is None or not self.leader.lease.state.is_held:
            return False
        _, heard_at = self._heard.get(LEADER, (b"", -math.inf))
        return now < max(self.leader.since, heard_at) + overdue_s

    def read_worker(self, worker: int, entry: RecordEntry | None, now: float) -> None:
        seen = self.workers.get(worker)
        if entry is None or entry.value is None:
            first, _ = self.absent.get(worker, (now, now))
            self.absent[worker] = (first, now)
            self.deleted[worker] = entry.revision if entry is not None else 0
            return
        self.absent.pop(worker, None)
        self.deleted.pop(worker, None)
        if seen is not None and seen.revision == entry.revision:
            seen.seen_again(now, self.steady_since)
            return
        if self._is_stale(seen, entry, now):
            return
        lease = self.parse(worker_key(worker), entry)
        if isinstance(lease, WorkerLease):
            self.workers[worker] = self._sighting(worker_key(worker), entry, lease, now)
            self._inherit(lease)

    def read_leader(self, entry: RecordEntry | None, now: float) -> None:
        seen, self.leader_read = self.leader, True
        if entry is not None and seen is not None and seen.revision == entry.revision:
            seen.seen_again(now, self.steady_since)
            return
        if self._is_stale(seen, entry, now):
            return
        lease = self.parse(LEADER, entry) if entry is not None else None
        if entry is not None and isinstance(lease, LeaderLease):
            self.leader_revision = entry.revision
            self.leader = self._sighting(LEADER, entry, lease, now)
        else:
            self.leader_revision = entry.revision if entry is not None else 0
            self.leader = None

    def read_assignment(self, entry: RecordEntry | None) -> bool:
        """Whether there is another one to follow."""
        self.assignment_read = True
        if entry is not None and entry.revision == self.assignment_revision and self.stored_assignment is not None:
            return False
        record = self.parse(ASSIGNMENT, entry) if entry is not None else None
        self.assignment_revision = entry.revision if entry is not None else 0
        self.stored_assignment = record if isinstance(record, FleetAssignment) else None
        return self.follow(self.stored_assignment)

    def read_drains(self, entry: RecordEntry | None) -> None:
        record = self.parse(DRAINS, entry) if entry is not None else None
        self.drained = record.workers if isinstance(record, DrainedWorkers) else {}

    def is_drained(self, lease: WorkerLease) -> bool:
        return self.drained.get(lease.worker) == lease.instance

    def follow(self, assignment: FleetAssignment | None) -> bool:
        """Take an assignment if it is newer than the one that is followed, and not of a leader that was replaced."""
        if assignment is None or assignment.epoch < self.highest_epoch:
            return False
        if self.assignment is not None and assignment.rank <= self.assignment.rank:
            return False
        self.assignment = assignment
        self.inherited = {}
        self.handovers += 1
        for seen in self.workers.values():
            if isinstance(seen.lease, WorkerLease):
                self._inherit(seen.lease)
        return True

    # ---- who is to own what ----------------------------------------------------------------------------------

    def owners(self) -> Mapping[str, int]:
        """The worker of every partition: as it is assigned, or as a worker that left has handed it over."""
        assigned = self.assignment.owners if self.assignment is not None else {}
        return {**assigned, **self.inherited} if self.inherited else assigned

    def partitions_of(self, worker: int, instance: str) -> frozenset[str]:
        if self.assignment is None or self.assignment.workers.get(worker) != instance:
            return frozenset()
        return frozenset(partition for partition, owner in self.owners().items() if owner == worker)

    def _inherit(self, lease: WorkerLease) -> None:
        """Take note of the successors that a worker has named. They stay known also when its id is taken again."""
        if self.assignment is None or not lease.successors:
            return
        for partition in lease.successors:
            owner = self.inherited.get(partition, self.assignment.owners.get(partition))
            if owner == lease.worker and (heir := self._heir(partition, owner)) != owner:
                self.inherited[partition] = heir
                self.handovers += 1

    def _heir(self, partition: str, owner: int) -> int:
        """The successor may have left too, and have named another one."""
        assert self.assignment is not None
        passed = {owner}
        while True:
            seen = self.workers.get(owner)
            lease = seen.lease if seen is not None else None
            if not isinstance(lease, WorkerLease) or self.assignment.workers.get(owner) != lease.instance:
                return owner
            heir = lease.successors.get(partition)
            if heir is None or heir in passed:
                return owner
            passed.add(heir)
            owner = heir

    def _is_stale(self, seen: Sighting | None, entry: RecordEntry | None, now: float) -> bool:
        """A lower revision than a moment ago comes from a replica that lags. If it stays, the store went back."""
        return (
            seen is not None
            and entry is not None
            and entry.revision < seen.revision
            and now - seen.checked < self.lease_s
        )

    def _sighting(self, key: str, entry: RecordEntry, lease: WorkerLease | LeaderLease, now: float) -> Sighting:
        value, at = self._heard.get(key, (b"", now))
        since = max(at, self.steady_since) if value == entry.value else now
        return Sighting(entry.revision, lease, since, now)

    # ---- what follows from them ----------------------------------------------------------------------------

    def live_leases(self) -> Iterator[WorkerLease]:
        """Workers that hold their id, as far as is known; what is missing since a moment ago still counts."""
        for worker, seen in self.workers.items():
            if isinstance(seen.lease, WorkerLease) and seen.lease.state.is_held and not self.is_gone(worker):
                yield seen.lease

    def all_follow(self, version: int) -> bool:
        """Whether every worker that may handle something follows this version of the partition table, or a later one.

        An assignment gives partitions only to workers whose leases its leader has seen, and a worker reads the table
        after the assignment: whoever joins later follows a later version.
        """
        named = self.assignment.workers if self.assignment is not None else {}
        unseen = [worker for worker in named if worker not in self.workers and not self.is_gone(worker)]
        return not unseen and all(lease.table >= version for lease in self.live_leases())

    def is_gone(self, worker: int) -> bool:
        first, last = self.absent.get(worker, (0.0, 0.0))
        return last - first >= 2 * self.lease_s

    def has_ended(self, worker: int, instance: str, claim_revision: int, claim_since: float = math.inf) -> bool:
        """Whether the holder of a claim has lost its lease for good, so that it handles nothing any more.

        Another instance under the same id proves it only if it came after the claim: a stale read may show the
        instance before. A claim can also land late, when another instance has come and gone: an id that has ended for
        twice lease_s since the claim was first seen (`claim_since`) is nobody's.
        """
        seen = self.workers.get(worker)
        if self.is_gone(worker):
            return True
        if seen is None or not isinstance(seen.lease, WorkerLease) or worker in self.absent:
            return False
        if seen.lease.instance == instance:
            return not seen.lease.state.is_held
        if not seen.lease.state.is_held and seen.checked - max(seen.since, claim_since) >= 2 * self.lease_s:
            return True
        return seen.revision > claim_revision

    # ---- a store that went back ----------------------------------------------------------------------------

    def is_recovering(self, now: float) -> bool:
        return now < self.recovering_until

    def went_back(self, now: float) -> None:
        """The store lost records. Give everybody the time to notice and to write theirs again."""
        self.recovering_until = now + 2 * self.lease_s
        self.losses += 1
        self.highest_revision = 0
        for seen in (*self.workers.values(), *([self.leader] if self.leader is not None else [])):
            seen.since = seen.checked = now
            seen.revision = -1
        self.absent = dict.fromkeys(self.workers, (now, now))
        self.deleted.clear()
        self.stored_assignment, self.assignment_revision = None, 0
        self.leader_read = self.assignment_read = False
