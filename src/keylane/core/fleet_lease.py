"""The lease of one worker id: choosing it, taking it, renewing it, losing it, giving it up.

Theory of operation. A lease is a record that its holder writes again every lease_s / 3, each time by compare-and-set on
its own last revision. It ends by a write, of the holder (`left`) or of the leader (`expired`), and that write makes the
next renewal fail. The holder also stops by its own clock, before anybody may expire it: `HOLD_SHARE` of lease_s after
it *sent* the last renewal that was confirmed.

| phase | what happened | what follows |
| --- | --- | --- |
| SEEKING | the leases were read | take the id that was held last, else the lowest free one: TAKING |
| SEEKING | a lease of this worker's name is held, and not renewed since it was first seen | wait: see `predecessor` |
| SEEKING | no id is free | expire leases that were seen unchanged for lease_s, as a leader does |
| TAKING | confirmed | HELD |
| TAKING | conflict | SEEKING: somebody else was quicker |
| TAKING | unknown | read the record: mine: HELD; unchanged: take it again; else SEEKING |
| HELD | lease_s / 3 have passed | renew |
| HELD | confirmed | the deadline moves |
| HELD | unknown | read the record: mine: as if confirmed; else renew again |
| HELD | conflict | DOUBTED: start nothing, read the record |
| HELD | the deadline has passed | read the record: mine, as last confirmed: renew; else DOUBTED |
| HELD, DOUBTED | read: mine and ended, or taken later by another instance | LOST |
| HELD, DOUBTED | the deadline has passed, and read: held by another instance | LOST |
| DOUBTED | read: mine, and written by a renewal of mine | HELD |
| DOUBTED | read: absent, or older than this worker's | write it again; confirmed: HELD, and the store went back |
| HELD | nothing is owned any more, and the worker is to stop | write `left`; confirmed: LEFT |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from keylane.core.fleet_events import RecordEntry
from keylane.core.fleet_records import LeaseState, WorkerLease, worker_key
from keylane.core.fleet_requests import PendingWrite, StoreRequests
from keylane.core.fleet_view import FleetView, Sighting

HOLD_SHARE = 0.9
"""The holder gives up before others may: the difference is for clocks that run at different speeds."""
RENEW_SHARE = 1 / 3
HANDOVER_S = 0.05
"""Successors open what they get as standbys, while the worker that leaves goes on."""
_REMEMBERED_BEATS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who a worker is. `run` is random, and of this run of the process only."""

    run: str
    name: str = ""
    host: str = ""
    labels: tuple[str, ...] = ()

    def held_before(self, lease: WorkerLease) -> bool:
        """Whether the last holder of an id was this worker, as far as anybody can tell."""
        if self.name or lease.name:
            return self.name == lease.name
        return (self.host, self.labels) == (lease.host, lease.labels)


class LeasePhase(Enum):
    SEEKING = auto()
    TAKING = auto()
    HELD = auto()
    DOUBTED = auto()
    LOST = auto()
    LEFT = auto()


def choose_id(
    identity: WorkerIdentity, workers: Mapping[int, Sighting], pool: int, wall_ms: int, grace_s: float
) -> int | None:
    """The id to take; None: all are held or reserved.

    An id stays reserved for its last holder for `grace_s`. Wall clocks decide about that: if they are wrong, a worker
    gets another id, and nothing else happens.
    """
    ended = {
        worker: seen.lease
        for worker, seen in workers.items()
        if worker < pool and isinstance(seen.lease, WorkerLease) and not seen.lease.state.is_held
    }
    reserved = {worker: one for worker, one in ended.items() if wall_ms - one.ended_ms <= grace_s * 1000}
    own = [(-one.ended_ms, worker) for worker, one in reserved.items() if identity.held_before(one)]
    if own:
        return min(own)[1]
    taken = (workers.keys() - ended.keys()) | reserved.keys()
    return next((worker for worker in range(pool) if worker not in taken), None)


def predecessor(
    identity: WorkerIdentity, workers: Mapping[int, Sighting], pool: int, first_seen: Mapping[int, int]
) -> int | None:
    """The id that a worker of the same name holds, and has not renewed since its revision was `first_seen`.

    A worker that was killed and started again finds its own lease still held. Its id, and the partitions that are
    reserved for it, are free as soon as that lease is old. A holder that renews it is alive, and only has the same
    name: then another id is taken.
    """
    if not identity.name:
        return None
    return next(
        (
            worker
            for worker, seen in workers.items()
            if worker < pool
            and isinstance(seen.lease, WorkerLease)
            and seen.lease.state.is_held
            and identity.held_before(seen.lease)
            and first_seen.get(worker, seen.revision) == seen.revision
        ),
        None,
    )


@dataclass(slots=True)
class IdLease:
    """The lease of this worker."""

    view: FleetView
    requests: StoreRequests
    identity: WorkerIdentity
    pool: int
    grace_s: float
    joins: int = 1
    phase: LeasePhase = LeasePhase.SEEKING
    lease: WorkerLease | None = None
    """As last confirmed; while TAKING, as it is to be."""
    revision: int = 0
    deadline: float = 0.0
    renew_at: float = 0.0
    leaving: bool = False
    table: int = 0
    """The version of the partition table that this worker follows."""
    successors: Mapping[str, int] = field(default_factory=dict)
    """Of this worker's partitions, once it leaves."""
    handed_over_at: float | None = None
    """When the first of them were sent, once the store has them."""
    went_back: bool = False
    """A lost record was written again: the store went back. Whoever reads it clears it."""
    trouble: str = ""
    """For the leader, with the next renewal."""
    seen_again: int = 0
    """How often a doubtful record was read with the revision of before."""
    _sent: dict[int, float] = field(default_factory=dict)
    """Beat -> when it was sent, of renewals whose outcome may still become known."""
    _first_seen: dict[int, int] = field(default_factory=dict)
    """Worker -> the revision of its lease when this worker began to seek."""

    @property
    def instance(self) -> str:
        return f"{self.identity.run}.{self.joins}"

    @property
    def worker(self) -> int | None:
        return self.lease.worker if self.lease is not None and self.phase is not LeasePhase.SEEKING else None

    @property
    def is_held(self) -> bool:
        return self.phase in (LeasePhase.HELD, LeasePhase.DOUBTED)

    def is_sure(self, now: float) -> bool:
        """Nobody can have expired it yet."""
        return self.phase is LeasePhase.HELD and now < self.deadline

    def is_late(self, now: float) -> bool:
        """Others may have expired it, and given the id away."""
        return self.is_held and now >= self.deadline

    def _key(self) -> str:
        assert self.lease is not None
        return worker_key(self.lease.worker)

    # ---- taking an id ----------------------------------------------------------------------------------------

    def seek(self, now: float) -> None:
        """The leases were read: take an id, if there is one."""
        if self.awaited() is not None:
            self._expire_unused(now)
            return
        wall_ms = self.view.wall_ms(now)
        worker = choose_id(self.identity, self.view.workers, self.pool, wall_ms, self.grace_s)
        if worker is None:
            self._expire_unused(now)
        if worker is None or self.requests.is_writing(worker_key(worker)):
            return
        seen = self.view.workers.get(worker)
        before = seen.lease.taken if seen is not None and isinstance(seen.lease, WorkerLease) else 0
        self.lease = WorkerLease(
            worker=worker,
            instance=self.instance,
            taken=max(before + 1, wall_ms),
            name=self.identity.name,
            host=self.identity.host,
            labels=self.identity.labels,
        )
        known = seen.revision if seen is not None else 0
        self.revision = self.view.deleted.get(worker, known)
        self.phase = LeasePhase.TAKING
        self._write(replace(self.lease, beat=1), now)

    def awaited(self) -> int | None:
        """The id whose lease this worker waits for to end."""
        stored = {worker: seen for worker, seen in self.view.workers.items() if worker not in self.view.absent}
        for worker, seen in stored.items():
            self._first_seen.setdefault(worker, seen.revision)
        return predecessor(self.identity, stored, self.pool, self._first_seen)

    def _expire_unused(self, now: float) -> None:
        """Who waits cannot lead, and if all holders are dead nobody else expires their leases."""
        for worker, seen in self.view.workers.items():
            if seen.lease.state.is_held and seen.unchanged_for() >= self.view.lease_s:
                self.requests.expire(worker, seen, now)

    # ---- renewing ----------------------------------------------------------------------------------------------

    def renew(self, now: float) -> None:
        """Write the next beat, unless one is under way. One that is late is read first: `found` goes on."""
        if self.is_late(now):
            self.look_again(now)
        else:
            self._renew(now)

    def _renew(self, now: float) -> None:
        if not self.is_held or self.lease is None or self.requests.is_writing(self._key()):
            return
        state = LeaseState.LEAVING if self.leaving else LeaseState.LIVE
        self._write(replace(self.lease, beat=self._next_beat(), state=state), now)

    def hand_over(self, successors: Mapping[str, int]) -> None:
        """Name successors, with the next renewal, which is due now."""
        self.successors = {**self.successors, **successors}
        self.renew_at = 0.0

    def is_handed_over(self, now: float) -> bool:
        """The store has the successors, and they had a moment to get ready."""
        return self.handed_over_at is not None and now >= self.handed_over_at + HANDOVER_S

    def leave(self, now: float) -> None:
        """Everything is released: end the lease."""
        if self.is_sure(now) and self.lease is not None and not self.requests.is_writing(self._key()):
            ended_ms = self.view.wall_ms(now)
            self._write(replace(self.lease, beat=self._next_beat(), state=LeaseState.LEFT, ended_ms=ended_ms), now)

    def _next_beat(self) -> int:
        assert self.lease is not None
        return max(self.lease.beat, *self._sent, 0) + 1

    def _write(self, lease: WorkerLease, now: float) -> None:
        lease = replace(
            lease,
            highest_token=self.view.highest_token,
            highest_version=self.view.highest_version,
            highest_epoch=self.view.highest_epoch,
            trouble=self.trouble,
            table=self.table,
            successors=self.successors,
        )
        self._sent[lease.beat] = now
        for beat in sorted(self._sent)[:-_REMEMBERED_BEATS]:
            del self._sent[beat]
        self.renew_at = now + self.view.lease_s * RENEW_SHARE
        self.requests.write(lease, self.revision, now)

    # ---- answers -----------------------------------------------------------------------------------------------

    def confirmed(self, write: PendingWrite, revision: int) -> None:
        assert isinstance(write.record, WorkerLease)
        self.went_back = self.went_back or self.phase is LeasePhase.DOUBTED
        self._adopt(write.record, revision, write.sent_at)

    def _adopt(self, lease: WorkerLease, revision: int, sent_at: float) -> None:
        self.lease, self.revision = lease, revision
        if lease.successors and self.handed_over_at is None:
            self.handed_over_at = sent_at
        self.deadline = max(self.deadline, sent_at + HOLD_SHARE * self.view.lease_s)
        self.phase = LeasePhase.LEFT if lease.state is LeaseState.LEFT else LeasePhase.HELD
        self.seen_again = 0
        self._sent = {beat: sent for beat, sent in self._sent.items() if beat > lease.beat}

    def conflicted(self, _write: PendingWrite) -> None:
        if not self.is_held and self.phase is not LeasePhase.TAKING:
            return
        self.requests.read(self._key())
        if self.phase is LeasePhase.TAKING:
            self._seek_again()
        else:
            self.phase = LeasePhase.DOUBTED

    def unknown(self, _write: PendingWrite) -> None:
        if self.is_held or self.phase is LeasePhase.TAKING:
            self.requests.read(self._key())

    def found(self, entry: RecordEntry | None, now: float) -> None:
        """This worker's own record, as a read shows it: perhaps a stale one."""
        assert self.lease is not None
        if self.requests.is_writing(self._key()):
            return  # the answer tells more
        record = self.view.parse(self._key(), entry) if entry is not None else None
        lease = record if isinstance(record, WorkerLease) else None
        revision = entry.revision if entry is not None else 0
        if self.phase is LeasePhase.TAKING:
            self._found_taking(lease, revision, now)
        elif self.is_held:
            self._found_held(lease, revision, now)

    def _found_taking(self, lease: WorkerLease | None, revision: int, now: float) -> None:
        assert self.lease is not None
        if lease is not None and lease.instance == self.instance:
            self._found_held(lease, revision, now)
        elif revision == self.revision:
            self._write(replace(self.lease, beat=self._next_beat()), now)
        else:
            self._seek_again()

    def _found_held(self, lease: WorkerLease | None, revision: int, now: float) -> None:
        assert self.lease is not None
        if lease is not None and lease.instance == self.instance:
            self._found_mine(lease, revision, now)
        elif lease is not None and (lease.taken > self.lease.taken or (lease.state.is_held and self.is_late(now))):
            self.phase = LeasePhase.LOST
        elif self._is_doubted(now):
            self._restore(revision, now)

    def _found_mine(self, lease: WorkerLease, revision: int, now: float) -> None:
        assert self.lease is not None
        is_late = self.phase is LeasePhase.HELD and self.is_late(now)
        if lease.state is LeaseState.EXPIRED:
            self.phase = LeasePhase.LOST
        elif lease.beat in self._sent:
            self._adopt(lease, revision, self._sent[lease.beat])
            if self.phase is LeasePhase.HELD and self.is_late(now):
                self._renew(now)
        elif (is_late and lease.beat == self.lease.beat) or (
            self._is_doubted(now) and self._is_no_stale_read(revision)
        ):
            self._restore(revision, now)

    def _is_doubted(self, now: float) -> bool:
        """Of one that is late no refused renewal is needed: its record is not what was last confirmed."""
        if self.is_late(now):
            self.phase = LeasePhase.DOUBTED
        return self.phase is LeasePhase.DOUBTED

    def _is_no_stale_read(self, revision: int) -> bool:
        """A store that went back gives revisions again: the one of before, seen twice, is not stale but stored."""
        self.seen_again = self.seen_again + 1 if revision == self.revision else 0
        return self.seen_again != 1

    def look_again(self, now: float) -> None:
        """The read of a doubtful record failed, or was stale."""
        if not self.requests.is_writing(self._key()):
            self.renew_at = now + self.view.lease_s * RENEW_SHARE / 2
            self.requests.read(self._key())

    def _restore(self, revision: int, now: float) -> None:
        """Absent, or older than mine. A stale read makes this write fail, and the record is read again."""
        self.revision = revision
        self._renew(now)

    def _seek_again(self) -> None:
        self.phase, self.lease = LeasePhase.SEEKING, None
        self._sent.clear()
        self._first_seen.clear()

    def rejoin(self) -> None:
        """After the end of all handlers: another instance, as if the process had been started again."""
        self.joins += 1
        self.successors, self.handed_over_at = {}, None
        self._seek_again()
        self.deadline = self.renew_at = 0.0
