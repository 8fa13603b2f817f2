"""One process of a simulated fleet: performs what `core/fleet_worker.py` decides, and handles messages.

It stands for `keylane/fleet`, in its order of steps and without its details. A process can be killed, frozen and woken,
cut off from the server, or from the bucket alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keylane.core.fleet_claims import ClaimStep
from keylane.core.fleet_events import (
    ChangeToken,
    ClosePartition,
    DrainPartition,
    FleetAction,
    FleetEvent,
    FleetSignal,
    OpenPartition,
    PartitionDrained,
    PartitionPinned,
    ReadFailed,
    ReadRecords,
    RecordEntry,
    RecordHint,
    RecordsRead,
    ReportState,
    SetTimer,
    SpecRefused,
    StartPartition,
    StopEverything,
    UnpinPartition,
    WorkerEnded,
    WorkerState,
    WriteConfirmed,
    WriteConflict,
    WriteRecord,
    WriteUnknown,
)
from keylane.core.fleet_leadership import AssignmentProposal, LeaderLook
from keylane.core.fleet_lease import WorkerIdentity
from keylane.core.fleet_records import FleetSpec, LeaseState, to_json
from keylane.core.fleet_worker import FleetWorker, step
from tests.simulation.fleet_store_model import FleetBucket, PinnedPartition, SimulatedTime

LEASE_S = 3.0
TIMEOUT_S = LEASE_S / 3
PREFETCH = 4
COOLDOWN_S = 4.0


class EvenPlanner:
    """Even shares with few moves, at once; a moment of patience at the start."""

    def __init__(self, partitions: Sequence[str]) -> None:
        self.partitions = partitions
        self._since: float | None = None
        self._handed_over: float | None = None

    def __call__(self, look: LeaderLook, now: float) -> AssignmentProposal:
        assignment = look.assignment
        all_live = [one.worker for one in look.workers if one.state is LeaseState.LIVE]
        troubled = frozenset(one.worker for one in look.workers if one.trouble)
        live = [one for one in all_live if one not in troubled] or all_live
        aside = troubled if len(live) < len(all_live) else frozenset()
        if assignment is None or not assignment.owners:
            self._since = now if self._since is None else self._since
            if now < self._since + 0.5:
                return AssignmentProposal(ask_again_at=self._since + 0.5)
        if not live:
            return AssignmentProposal()
        present = look.owners
        shares: dict[int, list[str]] = {worker: [] for worker in live}
        left = []
        most = -(-len(self.partitions) // len(live))
        for partition in self.partitions:
            owner = present.get(partition)
            if owner in shares and len(shares[owner]) < most:
                shares[owner].append(partition)
            else:
                left.append(partition)
        for partition in left:
            min(shares.values(), key=len).append(partition)
        owners = {partition: worker for worker, share in shares.items() for partition in share}
        if assignment is not None and owners == assignment.owners:
            return AssignmentProposal()
        if assignment is not None and owners == present:  # successors have everything: there is no hurry
            self._handed_over = now if self._handed_over is None else self._handed_over
            if now < self._handed_over + COOLDOWN_S:
                return AssignmentProposal(ask_again_at=self._handed_over + COOLDOWN_S)
        self._handed_over = None
        return AssignmentProposal(owners, "shares", aside=aside)

    def successors(self, look: LeaderLook, leaving: int) -> Mapping[str, int]:
        current = look.assignment
        assert current is not None
        stay = [
            one.worker
            for one in look.workers
            if one.worker != leaving
            and one.state is LeaseState.LIVE
            and current.workers.get(one.worker) == one.instance
        ]
        mine = sorted(one for one, owner in look.owners.items() if owner == leaving)
        return {one: stay[place % len(stay)] for place, one in enumerate(mine)}


@dataclass
class RunningPartition:
    """What a process has of a partition."""

    token: int | None = None
    start_at: float = 0.0
    buffer: list[int] = field(default_factory=list)
    pin: int = -1
    running: int | None = None
    unacked: int = 0
    done: set[int] = field(default_factory=set)
    draining: bool = False
    closed: bool = False
    sure_pin: int = -1
    """The pin that it had while the lease was sure."""
    confirmed_at: float | None = None
    """When the server was asked for the pin, and named that one."""
    asking: bool = False
    aside: bool = False


class Process:
    """A worker process."""

    def __init__(self, world: Any, name: str, host: str) -> None:
        self.world = world
        self.time: SimulatedTime = world.time
        self.bucket: FleetBucket = world.bucket
        self.name, self.host = name, host
        random = self.time.random
        offset = 1_000_000.0 + random.uniform(-0.02, 0.02)
        self.worker = FleetWorker(
            spec=FleetSpec(source={"kind": "simulated"}, pool=world.pool, lease_s=LEASE_S),
            identity=WorkerIdentity(run=name, name=host if world.is_named else "", host=host),
            planner=EvenPlanner(tuple(world.partitions)),
            clock_offset_s=offset,
        )
        self.partitions: dict[str, RunningPartition] = {}
        self.is_dead = self.is_frozen = False
        self.is_cut = self.is_bucket_cut = False
        self.has_ended = False
        self.is_stopping_all = False
        self.state = WorkerState.JOINING
        self._created = ""
        self._created_at = 0.0
        self._newest = 0
        self._asleep: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.tell(FleetSignal.TIMER)

    def __repr__(self) -> str:
        worker = self.worker
        claims = worker.ownership.partitions.values() if worker.ownership is not None else ()
        marks = "".join(
            f" {mark}"
            for mark in ("is_dead", "is_frozen", "is_cut", "is_bucket_cut", "has_ended")
            if getattr(self, mark)
        )
        shown = {one.partition: (one.step.name, one.token, one.waits_for) for one in claims}
        return (
            f"<{self.name}{marks} id={worker.lease.worker} {worker.lease.phase.name} {self.state} "
            f"version={worker.view.assignment.rank if worker.view.assignment else None} {shown}>"
        )

    # ---- time and faults -----------------------------------------------------------------------------------

    def later(self, delay: float, do: Callable[..., None], *arguments: Any) -> None:
        self.time.after(delay, self._run, do, arguments)

    def _run(self, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.is_frozen:
            self._asleep.append((do, arguments))
        elif not self.is_dead:
            do(*arguments)

    def kill(self) -> None:
        self.is_dead = True
        for partition in self.world.partitions.values():
            if self in partition.readers:
                partition.readers.remove(self)

    def tell_stop(self) -> None:
        self.later(0.0, self.tell, FleetSignal.STOP)

    def wake(self) -> None:
        if self.is_frozen:
            self.is_frozen = False
            missed, self._asleep = self._asleep, []
            self.time.random.shuffle(missed)  # a process that wakes up may do anything first
            for do, arguments in missed:
                if not self.is_dead:
                    do(*arguments)

    # ---- the machine ---------------------------------------------------------------------------------------

    def tell(self, event: FleetEvent) -> None:
        if self.is_dead or self.has_ended:
            return
        for action in step(self.worker, event, self.time.now):
            self._perform(action)

    def _tick(self, at: float) -> None:
        if self.worker.timer == at:
            self.worker.timer = -1.0
            self.tell(FleetSignal.TIMER)

    def _perform(self, action: FleetAction) -> None:  # noqa: C901, PLR0912 - a case for each action
        match action:
            case SetTimer(at):
                self.later(at - self.time.now, self._tick, at)
            case ReadRecords(keys):
                self._read(keys)
            case WriteRecord():
                self._write(action)
            case OpenPartition(name):
                self._open(name)
            case StartPartition(name, token, force):
                self._start_partition(name, token, force=force)
            case ChangeToken(name, token):
                self.partitions[name].token = token
            case UnpinPartition(name):
                self._request(self._force_unpin, name)
            case DrainPartition(name):
                self.partitions[name].draining = True
                self.partitions[name].buffer.clear()
                self._drained(name, self.partitions[name])
            case ClosePartition(name):
                self._close(name)
            case StopEverything():
                self.is_stopping_all = True
                for name in list(self.partitions):
                    self._close(name)
                self._all_ended()
            case ReportState(state):
                self.state = state
            case WorkerEnded():
                self.has_ended = True
                for name in list(self.partitions):
                    self._close(name)
            case SpecRefused(differences):
                raise AssertionError(differences)

    # ---- the bucket ----------------------------------------------------------------------------------------

    def _delay(self) -> float:
        random = self.time.random
        return random.uniform(0.001, 0.01) if random.random() < 0.9 else random.uniform(0.01, 0.2)

    @property
    def _has_bucket(self) -> bool:
        return not (self.is_cut or self.is_bucket_cut) and self.bucket.is_reachable

    def _read(self, keys: tuple[str, ...]) -> None:
        def at_the_server() -> None:
            if not self._has_bucket:
                self.later(TIMEOUT_S, self.tell, ReadFailed(keys))
                return
            entries = self.bucket.read(keys)
            if self._is_asked_for_creation(keys, entries):
                self.later(self._delay(), self.time.after, self._delay(), ask_for_creation, entries)
            else:
                self.later(self._delay(), self.tell, RecordsRead(keys, entries, self._created))

        def ask_for_creation(entries: dict[str, RecordEntry]) -> None:
            if self._has_bucket:
                self._created, self._created_at = self.bucket.created, self.time.now
                self.later(self._delay(), self.tell, RecordsRead(keys, entries, self._created))
            else:
                self.later(TIMEOUT_S, self.tell, ReadFailed(keys))

        self.time.after(self._delay(), at_the_server)

    def _is_asked_for_creation(self, keys: tuple[str, ...], entries: Mapping[str, RecordEntry]) -> bool:
        """After a while, or if the records look as if the bucket was made anew: as the store of a fleet does it."""
        is_odd = any(key not in entries for key in keys if not key.endswith("*"))
        if any(key.endswith("*") for key in keys):
            newest = max((one.revision for one in entries.values()), default=0)
            is_odd |= newest < self._newest
            self._newest = newest
        return not self._created or is_odd or self.time.now >= self._created_at + 3 * TIMEOUT_S

    def _write(self, action: WriteRecord) -> None:
        random, faulty, sent_at = self.time.random, self.world.faulty, self.time.now
        answered: list[bool] = []

        def give_up() -> None:
            if not answered:
                answered.append(False)
                self.tell(WriteUnknown(action.key))

        def answer(revision: int | None) -> None:
            if not answered:
                answered.append(True)
                known = WriteConfirmed(action.key, revision) if revision is not None else WriteConflict(action.key)
                self.tell(known)

        def at_the_server() -> None:
            if not self._has_bucket and not (self.is_cut and random.random() < 0.1):  # sent just before the cut
                return
            value = to_json(action.record)
            self.bucket.sent_at = sent_at
            revision = self.bucket.put(action.key, action.revision, action.record, value)
            self.world.hint(action.key, value)
            if self._has_bucket and not (faulty and random.random() < 0.02):
                self.later(self._delay(), answer, revision)

        self.later(TIMEOUT_S, give_up)
        if faulty and random.random() < 0.02:
            self.time.after(random.uniform(0.5, 4.0), at_the_server)  # held up on the way, perhaps beyond the timeout
        elif not (faulty and random.random() < 0.02):
            self.time.after(self._delay(), at_the_server)

    def hint(self, key: str, value: bytes) -> None:
        self.tell(RecordHint(key, value))

    # ---- the partitions ------------------------------------------------------------------------------------

    def _request(self, do: Callable[[str], None], name: str) -> None:
        """At the server, as soon as it can be reached. Not from a dead process."""

        def at_the_server() -> None:
            if self.is_dead:
                return
            if self.is_cut or self.is_frozen:
                self.time.after(0.3, at_the_server)
            else:
                do(name)

        self.time.after(self._delay(), at_the_server)

    def _open(self, name: str) -> None:
        old = self.partitions.get(name)
        self.partitions[name] = RunningPartition()
        if old is not None and old.running is not None:
            raise AssertionError(f"{self.name} opens {name}, and {old.running} still runs")
        self._request(self._join_readers, name)

    def _join_readers(self, name: str) -> None:
        partition: PinnedPartition = self.world.partitions[name]
        if name in self.partitions and not self.partitions[name].closed and self not in partition.readers:
            partition.readers.append(self)
            self.world.deliver(partition)

    def pull_again(self, name: str) -> None:
        mine = self.partitions.get(name)
        if mine is not None and not mine.closed:
            mine.aside = mine.aside and self.worker.is_unconfirmed(self.time.now)
            if not mine.aside:
                self._join_readers(name)

    def _start_partition(self, name: str, token: int, *, force: bool) -> None:
        mine = self.partitions[name]
        mine.token, mine.draining = token, False
        if force:
            self._clear_pin(name)
        self._next(name)

    def _clear_pin(self, name: str) -> None:
        if name in self.partitions:
            self.partitions[name].start_at = float("inf")
            self._request(self._force_unpin, name)

    def _force_unpin(self, name: str) -> None:
        partition: PinnedPartition = self.world.partitions[name]
        if partition.pinned is not None and partition.pinned is not self:
            # The open pulls of the one that was pinned are void, so whoever waits is pinned next.
            partition.readers.sort(key=lambda one: one is partition.pinned)
            partition.unpin()
            self.world.deliver(partition)
        self.later(self._delay(), self._unpinned, name)

    def _unpinned(self, name: str) -> None:
        mine = self.partitions.get(name)
        if mine is not None and mine.start_at == float("inf"):
            mine.start_at = self.time.now + self.worker.pin_trust_s
            self.later(self.worker.pin_trust_s, self._next, name)

    def receive(self, name: str, sequences: list[int], pin: int) -> None:
        """Messages under a pin. Those of an earlier pin are dropped, if this process knows of the new one."""
        mine = self.partitions.get(name)
        if mine is None or mine.closed or mine.draining:
            return
        if mine.pin != pin:
            mine.pin = pin
            mine.buffer.clear()
            self.tell(PartitionPinned(name))
        for sequence in sequences:
            if sequence in mine.done:
                self._ack(name, mine, sequence)
            elif sequence != mine.running and sequence not in mine.buffer:
                mine.buffer.append(sequence)
        self._next(name)

    def _next(self, name: str) -> None:
        mine = self.partitions.get(name)
        if mine is None or mine.closed or mine.draining or mine.running is not None or not mine.buffer:
            return
        if mine.token is None or self.time.now < mine.start_at:
            return
        if self.worker.may_start(self.time.now):
            mine.sure_pin, mine.confirmed_at = mine.pin, None
        token = self.worker.token_of(name, self.time.now, mine.confirmed_at)
        if token is None:
            if self.worker.is_unconfirmed(self.time.now):
                self._confirm_pin(name, mine)
            self.later(0.25, self._next, name)
            return
        assert token == mine.token, (token, mine)
        sequence = mine.buffer.pop(0)
        mine.running = sequence
        self.world.ledger.began(self, name, sequence, token)
        self.later(self.time.random.choice(self.world.handler_times), self._ended, name, mine, sequence, token)

    def _confirm_pin(self, name: str, mine: RunningPartition) -> None:
        """While the bucket does not answer."""
        if mine.asking or self.is_cut:
            return
        mine.asking = True
        asked_at = self.time.now

        def answer(is_ours: bool) -> None:
            mine.asking = False
            if is_ours:
                mine.confirmed_at = asked_at
                self._next(name)

        def at_the_server() -> None:
            if self.is_cut:
                mine.asking = False
            else:
                partition = self.world.partitions[name]
                is_ours = partition.pinned is self and partition.pin == mine.sure_pin
                if not is_ours:
                    self._leave_readers_for_now(name, partition)
                self.later(self._delay(), answer, is_ours)

        self.time.after(self._delay(), at_the_server)

    def _leave_readers_for_now(self, name: str, partition: PinnedPartition) -> None:
        """It pulls again when its lease is confirmed."""
        mine = self.partitions.get(name)
        if mine is not None:
            mine.aside = True
        if self in partition.readers:
            partition.readers.remove(self)
        if partition.pinned is self:
            partition.unpin()
            self.world.deliver(partition)

    def _ended(self, name: str, mine: RunningPartition, sequence: int, token: int) -> None:
        mine.running = None
        if self.world.ledger.did(self, name, sequence, token):
            mine.done.add(sequence)
            self._ack(name, mine, sequence)
        self._next(name)
        self._drained(name, mine)
        self._all_ended()

    def _ack(self, name: str, mine: RunningPartition, sequence: int) -> None:
        pin = mine.pin
        mine.unacked += 1

        def at_the_server(_: str) -> None:
            self.world.partitions[name].ack(sequence, pin)
            self.later(self._delay(), acked)

        def acked() -> None:
            mine.unacked -= 1
            self._drained(name, mine)

        self._request(at_the_server, name)

    def _drained(self, name: str, mine: RunningPartition) -> None:
        """Report once nothing runs and the server has all acks."""
        if mine.running is None and not mine.unacked and mine.draining and not mine.closed:
            mine.token = None
            mine.draining = False
            self.later(0.0, self.tell, PartitionDrained(name))

    def _close(self, name: str) -> None:
        mine = self.partitions[name]
        mine.closed = True
        mine.token = None
        mine.buffer.clear()
        if mine.running is None:
            del self.partitions[name]
        self._request(self._leave_readers, name)

    def _leave_readers(self, name: str) -> None:
        partition: PinnedPartition = self.world.partitions[name]
        if name in self.partitions and not self.partitions[name].closed:
            return  # opened again
        if self in partition.readers:
            partition.readers.remove(self)
        if partition.pinned is self:
            partition.unpin()
            self.world.deliver(partition)

    def _all_ended(self) -> None:
        for name, mine in list(self.partitions.items()):
            if mine.closed and mine.running is None:
                del self.partitions[name]
        if self.is_stopping_all and not self.partitions:
            self.is_stopping_all = False
            self.later(0.001, self.tell, FleetSignal.HANDLERS_ENDED)

    @property
    def is_leading(self) -> bool:
        return self.worker.leadership is not None and self.worker.leadership.is_leading(self.time.now)

    @property
    def can_pull(self) -> bool:
        return not (self.is_dead or self.is_frozen or self.is_cut or self.has_ended)

    @property
    def owned(self) -> set[str]:
        if self.is_dead or self.has_ended or self.worker.ownership is None:
            return set()
        return {one.partition for one in self.worker.ownership.partitions.values() if one.step is ClaimStep.HELD}
