"""One worker of a fleet, from its first read to its end: a state machine without I/O.

How to use it:

    worker = FleetWorker(spec=…, identity=WorkerIdentity(run=random_token, host=…), planner=…, clock_offset_s=…)
    for action in step(worker, FleetSignal.TIMER, now):
        …perform it (core/fleet_events.py says how), and report what came of it: step(worker, event, now)

    token = worker.token_of(partition, now, pin_confirmed_at)   # before every start of a message; None: do not start

`step` changes the worker and returns actions; each is performed once, in order. The first step, with any event, begins.
`clock_offset_s` is the wall clock less the clock of `now`, read once at the start.

Theory of operation. The worker looks at the leader and at all leases every lease_s / 6; at rest at the leader alone,
and half as often (`_needs_leases`). It acts on what it sees:
- its id and lease: `core/fleet_lease.py`;
- the partitions that the newest assignment gives to it: `core/fleet_claims.py`;
- the fleet, while it is the leader: `core/fleet_leadership.py`;
- what it knows of the store, and whether that can be true: `core/fleet_view.py`.

What may be handled when:

| the lease | the store | a message of an owned partition starts |
| --- | --- | --- |
| renewed within 0.9 lease_s | answers | yes |
| older | does not answer (state `degraded: store unreachable`) | only while the server confirms the pin, see below |
| renewed, but was older | answers | the same, until all that is owned was claimed again |
| in doubt: a renewal was refused | answers | no, until the record was read |
| lost | | no: everything stops, and the worker joins again as another instance |

While the store does not answer, a message starts only within `pin_trust_s` after the server was asked for the pin of
its partition, if it named the one that this worker had while its lease was sure. Whoever takes a partition over without
a release clears the pin first, and waits as long after the answer before it starts. The last answer that named the old
owner was given before the pin was cleared, and was asked for even earlier: so the old owner has stopped when the new
one starts. A fleet goes on without its store, and still has one owner for each partition.

A store that went back (wiped, made anew, rolled back) shows in one of these: another creation time, a renewal or a
claim that had to be written again, a revision that was used before. Then, for twice lease_s, nobody claims, expires or
assigns anything; each worker writes its own lease and claims again and goes on (state `degraded: recovering`). A
confirmation of a write from before that moment counts as no answer: what was written may be lost. Revisions come a
second time then, so that a comparison with one proves nothing after a time without answers: a lease that is late is
read before it is renewed. Nor does a late renewal prove that nobody else had the partitions meanwhile, as the store may
have lost that the lease was expired: what is owned is claimed again, with new tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from keylane.core.fleet_claims import Ownership
from keylane.core.fleet_events import (
    FleetAction,
    FleetEvent,
    FleetSignal,
    PartitionDrained,
    PartitionPinned,
    PartitionUnpinned,
    ReadFailed,
    RecordEntry,
    RecordHint,
    RecordsRead,
    ReportState,
    SetTimer,
    SpecRefused,
    StopEverything,
    TableFollowed,
    WorkerEnded,
    WorkerState,
    WriteConfirmed,
    WriteConflict,
    WriteUnknown,
)
from keylane.core.fleet_leadership import AssignmentPlanner, LeaderRole, Leadership
from keylane.core.fleet_lease import HANDOVER_S, RENEW_SHARE, IdLease, LeasePhase, WorkerIdentity
from keylane.core.fleet_records import (
    ASSIGNMENT,
    DRAINS,
    LEADER,
    SPEC,
    WORKERS,
    FleetAssignment,
    FleetClaim,
    FleetSpec,
    HistoryEntry,
    LeaderLease,
    LeaseState,
    WorkerLease,
    from_json,
    partition_of,
    worker_key,
    worker_of,
)
from keylane.core.fleet_requests import StoreRequests
from keylane.core.fleet_view import FleetView
from keylane.errors import BrokenFleetRecord

LOOKS_PER_LEASE = 6
LOOKS_AT_REST = 2
"""A look at the leader alone takes the place of so many."""
LOOKS_PER_AUDIT = 20
"""Every so many looks the worker also reads the claims that it holds, the assignment and the spec. While the fleet
recovers it does so with every look: two workers may have started with claims of which one was lost."""
OVERDUE_SHARE = RENEW_SHARE * 2
"""A leader that has not renewed its lease for this share of lease_s may be gone."""
ID_GRACE_S = 30.0
_ENDS = tuple(f'"{state.value}"'.encode() for state in LeaseState if state is not LeaseState.LIVE)
"""In a lease that is about to end, or has ended."""
_READ_AGAIN_S = 0.01
_MOST_READS = 5


@dataclass(slots=True)
class Announcement:
    """A record that a hint has told of: it may not be readable yet, or its write may have been refused."""

    rank: tuple[int, ...]
    reads: int = 0
    read_at: float = math.inf


@dataclass(slots=True, kw_only=True)
class FleetWorker:
    """The state of one worker."""

    spec: FleetSpec
    identity: WorkerIdentity
    planner: AssignmentPlanner
    clock_offset_s: float
    id_grace_s: float = ID_GRACE_S
    view: FleetView = field(init=False)
    requests: StoreRequests = field(init=False)
    lease: IdLease = field(init=False)
    ownership: Ownership | None = None
    leadership: Leadership | None = None
    spec_checked: bool = False
    refused: bool = False
    fenced: bool = False
    """The lease is lost, and handlers of before may still run."""
    stopping: bool = False
    leave_by: float = 0.0
    ended: bool = False
    looking: bool = False
    look_ends: str = WORKERS
    """The look that is under way ends with the answer to this key."""
    lists: bool = False
    """Whether the next look is at all leases, also if nothing else asks for it."""
    look_at: float = 0.0
    unaudited: int = 0
    """Looks since the last audit."""
    listed_at: float = -math.inf
    """When all leases were last read."""
    looks: int = 0
    opened: frozenset[str] | None = None
    """The partitions that may be owned now, whatever is assigned; None: all."""
    announced: dict[str, Announcement] = field(default_factory=dict)
    """What was not readable yet when a hint told of it."""
    successors_of: tuple[object, ...] = ()
    """What the successors follow from, as `wanted_for`."""
    wanted_for: tuple[object, ...] = ()
    """What the wanted partitions follow from: they are computed again when it changes."""
    timer: float = -1.0
    reported: tuple[WorkerState, str | None] | None = None

    def __post_init__(self) -> None:
        self.view = FleetView(self.spec.lease_s, self.clock_offset_s)
        self.requests = StoreRequests(self.view)
        self.lease = IdLease(self.view, self.requests, self.identity, self.spec.pool, self.id_grace_s)

    @property
    def worker_id(self) -> str | None:
        """`<prefix>-<n>`; None: it has none now."""
        return f"{self.spec.prefix}-{self.lease.worker}" if self.ownership is not None else None

    @property
    def pin_trust_s(self) -> float:
        return self.spec.lease_s / 10

    def is_unconfirmed(self, now: float) -> bool:
        """The store has not confirmed the lease in time, and nobody has said that it is lost: pins must tell."""
        return not self.fenced and self.lease.phase is LeasePhase.HELD and not self._is_confirmed(now)

    def _is_confirmed(self, now: float) -> bool:
        return now < self.lease.deadline and (self.ownership is None or not self.ownership.late)

    def may_start(self, now: float, pin_confirmed_at: float | None = None) -> bool:
        """Whether a message of an owned partition may start now.

        `pin_confirmed_at`: when the server was last asked for the pin of its partition, and named the one that this
        worker had while its lease was sure. It matters only while the store does not answer.
        """
        if self.ownership is None or self.fenced or self.lease.phase is not LeasePhase.HELD:
            return False
        is_pinned = pin_confirmed_at is not None and now < pin_confirmed_at + self.pin_trust_s
        return is_pinned or self._is_confirmed(now)

    def token_of(self, partition: str, now: float, pin_confirmed_at: float | None = None) -> int | None:
        """The token to start a message of this partition with, now; None: it must not start."""
        if self.ownership is None or not self.may_start(now, pin_confirmed_at):
            return None
        return self.ownership.token(partition)

    def hears(self, hint: RecordHint, now: float) -> bool:
        """Whether `step` must be told of a hint. Most do not matter: every worker hears of every claim and renewal."""
        if (partition := partition_of(hint.key)) is not None:
            return self.ownership is not None and self.ownership.heeds(partition, hint.value)
        if worker_of(hint.key) is not None:
            if hint.value is None:
                return _leads(self)
            self.view.heard(hint.key, hint.value, now)
            return _leads(self) or any(state in hint.value for state in _ENDS)
        return hint.key in (ASSIGNMENT, LEADER, DRAINS)


def step(worker: FleetWorker, event: FleetEvent, now: float) -> list[FleetAction]:
    """What an event makes of a worker, and what is to be done now."""
    if worker.ended or worker.refused:
        return []
    was_late = worker.lease.is_late(now)
    _take(worker, event, now)
    if worker.ownership is not None and was_late and worker.lease.is_sure(now):
        worker.ownership.renewed_late()
    _proceed(worker, now)
    _report(worker, now)
    _set_timer(worker, now)
    return worker.requests.take()


# ---- events --------------------------------------------------------------------------------------------------


def _take(worker: FleetWorker, event: FleetEvent, now: float) -> None:  # noqa: C901, PLR0912 - a case for each event
    match event:
        case RecordsRead():
            _read(worker, event, now)
        case ReadFailed(asked):
            worker.requests.read_ended(asked)
            worker.looking = worker.looking and worker.look_ends not in asked
            worker.lists = worker.lists or WORKERS in asked
        case WriteConfirmed(key) if worker.requests.is_outdated(key):
            _not_confirmed(worker, key, is_known=False)
        case WriteConfirmed(key, revision):
            _confirmed(worker, key, revision, now)
        case WriteConflict(key):
            _not_confirmed(worker, key, is_known=True)
        case WriteUnknown(key):
            _not_confirmed(worker, key, is_known=False)
        case RecordHint():
            _hinted(worker, event, now)
        case PartitionDrained(partition):
            if worker.ownership is not None:
                worker.ownership.drained(partition, now)
        case PartitionPinned(partition):
            if worker.ownership is not None:
                worker.ownership.pinned(partition)
        case PartitionUnpinned(partition):
            if worker.ownership is not None:
                worker.ownership.unpinned(partition, now)
        case TableFollowed(version, opened):
            worker.opened = opened
            worker.lease.table = max(worker.lease.table, version)
            worker.lease.renew_at = min(worker.lease.renew_at, now)
        case FleetSignal.STOP:
            _stop(worker, now)
        case FleetSignal.HANDLERS_ENDED:
            _handlers_ended(worker)
        case FleetSignal.TIMER:
            pass


def _read(worker: FleetWorker, event: RecordsRead, now: float) -> None:
    view = worker.view
    worker.requests.read_ended(event.asked)
    if view.created is not None and event.created != view.created:
        _went_back(worker, now)
    view.created = event.created
    if LEADER in event.asked:
        view.looked(now)
    worker.looking = worker.looking and worker.look_ends not in event.asked
    for key in event.asked:
        if key == WORKERS:
            _looked(worker, event, now)
        else:
            _read_key(worker, key, event, now)
            _check_announced(worker, key, event.entries.get(key), now)
    if worker.leadership is not None and worker.lease.is_sure(now) and not worker.fenced:
        if WORKERS in event.asked:
            worker.leadership.act(now)
        elif ASSIGNMENT in event.asked or DRAINS in event.asked:
            worker.leadership.plan(now)


def _read_key(worker: FleetWorker, key: str, event: RecordsRead, now: float) -> None:
    entry = event.entries.get(key)
    if key == LEADER:
        worker.view.read_leader(entry, now)
        if worker.leadership is not None:
            worker.leadership.found(entry, now)
    elif key == ASSIGNMENT:
        worker.view.read_assignment(entry)
    elif key == DRAINS:
        worker.view.read_drains(entry)
    elif key.startswith("history.") and worker.leadership is not None:
        worker.leadership.found_history(key, entry, now)
    elif key == SPEC:
        _read_spec(worker, entry, now)
    elif (number := worker_of(key)) is not None:
        worker.view.read_worker(number, entry, now)
        if number == worker.lease.worker:
            worker.lease.found(entry, now)
    elif (partition := partition_of(key)) is not None and worker.ownership is not None:
        worker.ownership.found(partition, entry, now)


def _check_announced(worker: FleetWorker, key: str, entry: RecordEntry | None, now: float) -> None:
    """Read once more, a few times, if the store does not show yet what a hint told of."""
    announced = worker.announced.get(key)
    if announced is None:
        return
    rank = _rank(key, entry.value) if entry is not None else ()
    if (rank is not None and rank >= announced.rank) or announced.reads >= _MOST_READS:
        del worker.announced[key]
    else:
        announced.read_at = now + _READ_AGAIN_S * 2**announced.reads
        announced.reads += 1


def _rank(key: str, value: bytes | None) -> tuple[int, ...] | None:
    """None: there is no record, or none that can be read."""
    try:
        return from_json(key, value).rank if value is not None else None
    except BrokenFleetRecord:
        return None


def _read_announced(worker: FleetWorker, event: RecordHint) -> None:
    if (rank := _rank(event.key, event.value)) is not None:
        worker.announced[event.key] = Announcement(rank)
    worker.requests.read(event.key)


def _looked(worker: FleetWorker, event: RecordsRead, now: float) -> None:
    """All leases, or as many as the store told."""
    worker.listed_at = now
    if worker.ownership is not None:
        worker.ownership.ready |= worker.ownership.standby
    found = {number for key in event.entries if (number := worker_of(key)) is not None}
    for number in found:
        worker.view.read_worker(number, event.entries[worker_key(number)], now)
    # A listing may be cut short: what it lacks is read by its name before it counts as absent.
    named = worker.view.assignment.workers.keys() if worker.view.assignment is not None else ()
    holders = worker.ownership.holders() if worker.ownership is not None else ()
    for number in {*worker.view.workers, *named, *holders} - found:
        if not worker.view.is_gone(number):
            worker.requests.look(worker_key(number))
    own = worker.lease.worker
    if own in found and own is not None:
        worker.lease.found(event.entries[worker_key(own)], now)


def _read_spec(worker: FleetWorker, entry: RecordEntry | None, now: float) -> None:
    if entry is None or entry.value is None:
        if not worker.requests.is_writing(SPEC):
            worker.requests.write(worker.spec, entry.revision if entry is not None else 0, now)
        return
    try:
        stored = from_json(SPEC, entry.value)
    except BrokenFleetRecord as error:
        differences: tuple[str, ...] = (str(error),)
    else:
        assert isinstance(stored, FleetSpec)
        differences = worker.spec.differences(stored)
    if not differences:
        worker.spec_checked = True
    elif not worker.spec_checked:  # a running worker goes on: it is the newcomer that is refused
        worker.refused = True
        worker.requests.do(SpecRefused(differences))


def _confirmed(worker: FleetWorker, key: str, revision: int, now: float) -> None:
    write = worker.requests.answered(key)
    if write is None:
        return
    if revision <= write.above:
        _went_back(worker, now)
    worker.view.highest_revision = max(worker.view.highest_revision, revision)
    match write.record:
        case FleetSpec():
            worker.spec_checked = True
        case WorkerLease() if _is_own(worker, write.record):
            worker.lease.confirmed(write, revision)
        case FleetClaim():
            if worker.ownership is not None and write.record.instance == worker.lease.instance:
                worker.ownership.confirmed(write, revision, now)
        case WorkerLease() | LeaderLease() | FleetAssignment() | HistoryEntry():
            if worker.leadership is not None:
                worker.leadership.confirmed(write, revision, now)
            if isinstance(write.record, WorkerLease):
                worker.look_at = now  # it is expired: plan without it


def _is_own(worker: FleetWorker, lease: WorkerLease) -> bool:
    return (lease.worker, lease.instance) == (worker.lease.worker, worker.lease.instance)


def _not_confirmed(worker: FleetWorker, key: str, *, is_known: bool) -> None:
    """A write that was refused (`is_known`), or whose outcome nobody knows."""
    write = worker.requests.answered(key)
    if write is None:
        return
    role: IdLease | Ownership | Leadership | None = worker.leadership
    match write.record:
        case FleetSpec():
            worker.requests.read(SPEC)
            return
        case WorkerLease() if _is_own(worker, write.record):
            role = worker.lease
        case FleetClaim(instance=instance):
            role = worker.ownership if instance == worker.lease.instance else None
    if role is not None and is_known:
        role.conflicted(write)
    elif role is not None:
        role.unknown(write)


def _hinted(worker: FleetWorker, event: RecordHint, now: float) -> None:
    key = event.key
    if not worker.hears(event, now):
        return
    if key == DRAINS:
        worker.requests.read(DRAINS)
    elif key == ASSIGNMENT or partition_of(key) is not None:
        _read_announced(worker, event)
    elif event.value is not None and (key == LEADER or worker_of(key) is not None):
        _hinted_lease(worker, event, event.value, now)


def _leads(worker: FleetWorker) -> bool:
    return worker.leadership is not None and worker.leadership.role is LeaderRole.LEADER


def _hinted_lease(worker: FleetWorker, event: RecordHint, value: bytes, now: float) -> None:
    key = event.key
    try:
        record = from_json(key, value)
    except BrokenFleetRecord:
        return  # the next look reads it, and tells what is wrong
    worker.view.heard(key, value, now)
    if isinstance(record, WorkerLease) and record.successors:
        _read_announced(worker, event)
    elif isinstance(record, LeaderLease):
        if not record.state.is_held or record.version > worker.view.highest_version:
            worker.lists = True
            worker.look_at = now
    elif isinstance(record, WorkerLease):
        seen = worker.view.workers.get(record.worker)
        if seen is None or seen.lease.instance != record.instance or seen.lease.state is not record.state:
            worker.lists = True
            worker.look_at = now


def _stop(worker: FleetWorker, now: float) -> None:
    if not worker.stopping:
        worker.stopping = True
        worker.leave_by = now + worker.spec.lease_s
        worker.lease.leaving = True
        worker.lease.renew_at = 0.0


def _handlers_ended(worker: FleetWorker) -> None:
    if worker.fenced:
        worker.fenced = False
        worker.lease.rejoin()
        worker.look_at = 0.0


# ---- what follows --------------------------------------------------------------------------------------------


def _proceed(worker: FleetWorker, now: float) -> None:
    """Everything that is due, whatever the event was."""
    lease = worker.lease
    if lease.phase is LeasePhase.LOST and not worker.fenced:
        _fence(worker, "another worker may hold what this one held: its lease was expired, or its id taken")
    if lease.went_back or (worker.ownership is not None and worker.ownership.went_back):
        lease.went_back = False
        _went_back(worker, now)
    if worker.fenced:
        return
    if lease.is_held and worker.ownership is None:
        _joined(worker)
    if worker.stopping and _leave(worker, now):
        return
    _name_successors(worker, now)
    _keep_lease(worker, now)
    _read_again(worker, now)
    if worker.ownership is not None:
        _own(worker, worker.ownership, now)
    if worker.leadership is not None and lease.is_sure(now):
        _lead(worker, worker.leadership, now)
    if now >= worker.look_at and not worker.looking:
        _look(worker, now)


def _read_again(worker: FleetWorker, now: float) -> None:
    for key, announced in worker.announced.items():
        if now >= announced.read_at:
            announced.read_at = math.inf
            worker.requests.look(key)


def _keep_lease(worker: FleetWorker, now: float) -> None:
    lease = worker.lease
    if lease.phase is LeasePhase.SEEKING:
        if worker.spec_checked and worker.looks and not worker.looking and not worker.stopping:
            lease.seek(now)
    elif lease.phase is LeasePhase.HELD and now >= lease.renew_at:
        lease.renew(now)
    elif lease.phase in (LeasePhase.DOUBTED, LeasePhase.TAKING) and now >= lease.renew_at:
        lease.look_again(now)


def _joined(worker: FleetWorker) -> None:
    assert worker.lease.lease is not None
    number, instance = worker.lease.lease.worker, worker.lease.instance
    worker.ownership = Ownership(worker.view, worker.requests, number, instance)
    worker.leadership = Leadership(worker.view, worker.requests, worker.planner, number, instance)


def _own(worker: FleetWorker, ownership: Ownership, now: float) -> None:
    view = worker.view
    gives_up = worker.stopping and (
        worker.lease.is_handed_over(now) or not _others(worker, ownership) or now >= worker.leave_by
    )
    wanted_for = (ownership.instance, view.handovers, gives_up, worker.opened)
    if worker.wanted_for != wanted_for:
        worker.wanted_for = wanted_for
        wanted = view.partitions_of(ownership.worker, ownership.instance)
        if worker.opened is not None:
            wanted &= worker.opened
        if worker.stopping:
            kept = (wanted | worker.lease.successors.keys()) & ownership.partitions.keys()
            wanted = frozenset() if gives_up else frozenset(kept)
        ownership.want(wanted)
    if worker.lease.is_sure(now) and not worker.stopping:
        ownership.claim_free(now)
    ownership.unpin_late(now)
    if ownership.token_written and worker.lease.phase is LeasePhase.HELD:
        assert worker.lease.lease is not None
        if not worker.requests.is_writing(worker_key(worker.lease.lease.worker)):
            ownership.token_written = False
            worker.lease.renew(now)


def _others(worker: FleetWorker, ownership: Ownership) -> list[WorkerLease]:
    """The workers that are not about to leave."""
    return [one for one in worker.view.live_leases() if one.worker != ownership.worker and one.state is LeaseState.LIVE]


def _name_successors(worker: FleetWorker, now: float) -> None:
    """Hand over without waiting for the leader, which collects changes before it assigns: say who takes what."""
    view, assignment, ownership = worker.view, worker.view.assignment, worker.ownership
    if not worker.stopping or ownership is None or worker.leadership is None or assignment is None:
        return
    if not worker.lease.is_sure(now) or view.is_recovering(now):
        return
    known = [one.worker for one in _others(worker, ownership) if assignment.workers.get(one.worker) == one.instance]
    if not known or worker.successors_of == (view.handovers, known):
        return
    worker.successors_of = (view.handovers, known)
    mine = view.partitions_of(ownership.worker, ownership.instance)
    if not mine <= worker.lease.successors.keys():
        found = worker.planner.successors(worker.leadership.look(), ownership.worker)
        worker.lease.hand_over({one: heir for one, heir in found.items() if one in mine and heir in known})


def _lead(worker: FleetWorker, leadership: Leadership, now: float) -> None:
    knows_leases = now < worker.listed_at + worker.spec.lease_s * RENEW_SHARE  # it plans as soon as it leads
    if knows_leases and not worker.stopping and not worker.view.is_recovering(now):
        leadership.stand(now)
    if leadership.role is LeaderRole.LEADER and now >= leadership.renew_at:
        leadership.renew(now)
    if leadership.plan_at is not None and now >= leadership.plan_at:
        leadership.plan_at = None
        leadership.plan(now)


def _needs_leases(worker: FleetWorker, now: float) -> bool:
    """Whether to look at all leases. In a fleet at rest only the leader does: each look reads a record of every worker.

    Whoever may have to lead next begins before the leader's lease is old, so that it loses no time.
    """
    ownership, leadership = worker.ownership, worker.leadership
    if worker.lists or worker.stopping or ownership is None or leadership is None:
        return True
    if leadership.role is not LeaderRole.FOLLOWER or ownership.standby or any(ownership.unresolved()):
        return True
    return not worker.view.is_led(now, OVERDUE_SHARE * worker.spec.lease_s)


def _look(worker: FleetWorker, now: float) -> None:
    view, ownership = worker.view, worker.ownership
    worker.looks += 1
    worker.looking = True
    audit = view.is_recovering(now) or worker.unaudited + 1 >= LOOKS_PER_AUDIT
    lists = audit or _needs_leases(worker, now)
    worker.lists, worker.look_ends = False, WORKERS if lists else LEADER
    places = 1 if lists else LOOKS_AT_REST
    worker.unaudited = 0 if audit else worker.unaudited + places
    pause_s = places * view.lease_s / LOOKS_PER_LEASE
    worker.look_at = min(now + pause_s, view.next_expiry(now, of_workers=lists))
    keys = [LEADER, WORKERS] if lists else [LEADER]
    leader = view.leader.lease if view.leader is not None else None
    version = leader.version if isinstance(leader, LeaderLease) else 0
    if audit or not view.assignment_read or view.assignment is None or version > view.assignment.version:
        keys.append(ASSIGNMENT)
    if audit or not worker.spec_checked:
        keys.append(SPEC)
    if audit or worker.looks == 1 or _leads(worker):
        keys.append(DRAINS)
    if ownership is not None:
        keys += ownership.unresolved()
        if audit:
            keys += ownership.audited()
    worker.requests.look(*keys)


def _leave(worker: FleetWorker, now: float) -> bool:
    """Whether the worker has ended."""
    lease, ownership = worker.lease, worker.ownership
    if lease.phase in (LeasePhase.SEEKING, LeasePhase.LEFT):
        worker.ended = True
        worker.requests.do(WorkerEnded())
        return True
    if ownership is None or ownership.busy:
        return False
    if not ownership.partitions and (worker.leadership is None or worker.leadership.resign(now)):
        lease.leave(now)
    # A lease that is a little late is renewed yet: many workers that stop at once keep each other, and the store, busy.
    if now >= max(worker.leave_by, lease.deadline + worker.spec.lease_s):
        worker.ended = True
        worker.requests.do(WorkerEnded(orderly=False))
    return worker.ended


def _fence(worker: FleetWorker, why: str) -> None:
    worker.fenced = True
    worker.ownership = worker.leadership = None
    worker.requests.do(StopEverything(why))


def _went_back(worker: FleetWorker, now: float) -> None:
    if worker.ownership is not None:
        worker.ownership.went_back = False
    if not worker.view.is_recovering(now):
        worker.look_at = now
    worker.view.went_back(now)


# ---- words and time ------------------------------------------------------------------------------------------


def _state(worker: FleetWorker, now: float) -> tuple[WorkerState, str | None]:  # noqa: PLR0911 - one for each state
    lease, ownership = worker.lease, worker.ownership
    if worker.ended:
        return WorkerState.ENDED, None
    if worker.fenced:
        return WorkerState.FENCED, "handlers that began before the lease was lost"
    if worker.stopping:
        return WorkerState.STOPPING, "handlers that are at work, and the release of their partitions"
    if ownership is None:
        return WorkerState.JOINING, _obstacle_to_join(worker)
    if not lease.is_sure(now):
        return WorkerState.UNREACHABLE, "the store, to renew the lease"
    if worker.view.is_recovering(now):
        return WorkerState.RECOVERING, "the other workers, to write again what the store has lost"
    is_leading = worker.leadership is not None and worker.leadership.is_leading(now)
    is_drained = lease.lease is not None and worker.view.is_drained(lease.lease)
    waits = "an operator, who has drained this worker, to resume it" if is_drained else ownership.obstacles()
    return WorkerState.LEADING if is_leading else WorkerState.ACTIVE, waits


def _obstacle_to_join(worker: FleetWorker) -> str | None:
    lease = worker.lease
    if lease.phase is not LeasePhase.SEEKING or not worker.spec_checked or worker.looking or not worker.looks:
        return None
    if (awaited := lease.awaited()) is not None:
        return f"the lease of worker {awaited}, which a worker of the same name held: it ends unless it is renewed"
    return f"a worker id: all {worker.spec.pool} are held, or reserved for their last holders"


def _report(worker: FleetWorker, now: float) -> None:
    state = _state(worker, now)
    if state != worker.reported:
        worker.reported = state
        worker.requests.do(ReportState(*state))


def _set_timer(worker: FleetWorker, now: float) -> None:
    lease, ownership, leadership = worker.lease, worker.ownership, worker.leadership
    due = [worker.look_at] if not worker.looking else []
    if lease.is_held or lease.phase is LeasePhase.TAKING:
        due += [lease.renew_at, lease.deadline]
    due += (announced.read_at for announced in worker.announced.values() if announced.read_at < math.inf)
    if worker.stopping:
        ends_at = max(worker.leave_by, lease.deadline + worker.spec.lease_s)
        due += [worker.leave_by, ends_at, (lease.handed_over_at or 0.0) + HANDOVER_S]
    if worker.view.is_recovering(now):
        due.append(worker.view.recovering_until)
    if ownership is not None and ownership.unpins:
        due.append(ownership.unpins[0][0])
    if leadership is not None and leadership.role is LeaderRole.LEADER:
        due += [leadership.renew_at, *([leadership.plan_at] if leadership.plan_at is not None else [])]
    later = [at for at in due if at > now]
    if not later or worker.ended:
        return
    at = min(later)
    if at != worker.timer:
        worker.timer = at
        worker.requests.do(SetTimer(at))
