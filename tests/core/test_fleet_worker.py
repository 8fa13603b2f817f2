"""The tables of a fleet worker: lease, claims, leadership, and a store that went back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

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
    PartitionUnpinned,
    ReadFailed,
    ReadRecords,
    RecordEntry,
    RecordHint,
    RecordsRead,
    ReportState,
    SpecRefused,
    StartPartition,
    StopEverything,
    UnpinPartition,
    WorkerEnded,
    WriteConfirmed,
    WriteConflict,
    WriteRecord,
    WriteUnknown,
)
from keylane.core.fleet_leadership import AssignmentProposal, LeaderLook
from keylane.core.fleet_lease import LeasePhase, WorkerIdentity
from keylane.core.fleet_records import (
    HISTORY_LENGTH,
    WORKERS,
    FleetAssignment,
    FleetClaim,
    FleetRecord,
    FleetSpec,
    HistoryEntry,
    LeaderLease,
    LeaseState,
    WorkerLease,
    from_json,
    key_of,
    to_json,
)
from keylane.core.fleet_view import FleetView
from keylane.core.fleet_worker import LOOKS_PER_LEASE, FleetWorker, step

SPEC = FleetSpec(source={"kind": "list"})


class OnePartition:
    """Partition 0, and those that a test adds, belong to the first worker."""

    def __init__(self) -> None:
        self.partitions = ["0"]
        self.aside: frozenset[int] = frozenset()

    def __call__(self, look: LeaderLook, now: float) -> AssignmentProposal:
        live = [one.worker for one in look.workers if one.state is LeaseState.LIVE]
        owners = dict.fromkeys(self.partitions, live[0]) if live else None
        is_same = look.assignment is not None and look.assignment.owners == owners
        return AssignmentProposal(None if is_same else owners, aside=self.aside)

    def successors(self, look: LeaderLook, leaving: int) -> Mapping[str, int]:
        return {"0": max(one.worker for one in look.workers)}


class Store:
    """A store without faults, and one worker on it."""

    def __init__(self, name: str = "", **records: FleetRecord) -> None:
        self.records: dict[str, RecordEntry] = {}
        self.sequence = 0
        self.created = "created"
        self.now = 0.0
        self.actions: list[FleetAction] = []
        self.refused: dict[str, type[WriteConflict | WriteUnknown]] = {}
        self.unanswered: dict[str, list[FleetAction]] = {}
        """Keys whose requests get no answer until `answer`, and those requests."""
        self.planner = OnePartition()
        for record in records.values():
            self.store(record)
        self.worker = FleetWorker(
            spec=SPEC,
            identity=WorkerIdentity(run="me", name=name, host="h"),
            planner=self.planner,
            clock_offset_s=1000.0,
        )

    def store(self, record: FleetRecord) -> int:
        self.sequence += 1
        self.records[key_of(record)] = RecordEntry(self.sequence, to_json(record))
        return self.sequence

    def tell(self, event: FleetEvent) -> None:
        pending = [event]
        while pending:
            for action in step(self.worker, pending.pop(0), self.now):
                self.actions.append(action)
                if (answer := self._answer(action)) is not None:
                    pending.append(answer)

    def answer(self, key: str) -> None:
        for action in self.unanswered.pop(key):
            if (answer := self._answer(action)) is not None:
                self.tell(answer)

    def _answer(self, action: FleetAction) -> FleetEvent | None:
        for key, waiting in self.unanswered.items():
            if (isinstance(action, ReadRecords) and key in action.keys) or getattr(action, "key", None) == key:
                waiting.append(action)
                return None
        match action:
            case ReadRecords(keys):
                found = {key: one for key, one in self.records.items() if key in keys or "worker.*" in keys}
                return RecordsRead(keys, found, self.created)
            case WriteRecord(key, revision, record):
                if (refusal := self.refused.pop(key, None)) is not None:
                    return refusal(key)
                if (self.records[key].revision if key in self.records else 0) != revision:
                    return WriteConflict(key)
                return WriteConfirmed(key, self.store(record))
            case _:
                return None

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            self.tell(FleetSignal.TIMER)

    def did(self, *kinds: type) -> list[FleetAction]:
        return [action for action in self.actions if isinstance(action, kinds)]

    def wrote(self, key: str) -> bool:
        return any(one.key == key for one in self.did(WriteRecord) if isinstance(one, WriteRecord))

    def history(self) -> list[tuple[int, tuple[str, ...]]]:
        """The version of every note, and what it moved."""
        found = [from_json(key, one.value or b"") for key, one in self.records.items() if key.startswith("history.")]
        notes = sorted((one for one in found if isinstance(one, HistoryEntry)), key=lambda one: one.rank)
        return [(one.version, tuple(name for move in one.moves for name in move.partitions)) for one in notes]

    def claim(self) -> FleetClaim:
        claims = [one.record for one in self.did(WriteRecord) if isinstance(one, WriteRecord)]
        return next(one for one in reversed(claims) if isinstance(one, FleetClaim))


def test_the_first_worker_joins_leads_and_owns() -> None:
    store = Store()
    store.run(1)
    assert store.worker.worker_id == "worker-0"
    token = store.worker.token_of("0", store.now)
    assert token == store.claim().token >= 1_000_000
    assert store.did(OpenPartition, StartPartition) == [OpenPartition("0"), StartPartition("0", token)]


def test_another_spec_is_refused() -> None:
    store = Store(spec=FleetSpec(source={"kind": "list"}, layout="worker"))
    store.run(1)
    assert store.did(SpecRefused)
    assert store.worker.worker_id is None


def test_a_worker_gets_its_id_back_and_leaves_those_of_others() -> None:
    ended: Mapping[str, object] = {"state": LeaseState.LEFT, "ended_ms": 1_000_000, "beat": 3, "taken": 5}
    store = Store(
        a=WorkerLease(worker=0, instance="x.1", host="other", **ended),  # type: ignore[arg-type]
        b=WorkerLease(worker=2, instance="y.1", host="h", **ended),  # type: ignore[arg-type]
    )
    store.run(1)
    assert store.worker.worker_id == "worker-2"


def test_a_worker_that_was_killed_waits_for_the_end_of_its_own_lease() -> None:
    store = Store(
        name="billing-1", a=WorkerLease(worker=0, instance="x.1", name="billing-1", host="h", beat=3, taken=5)
    )
    store.run(SPEC.lease_s - 0.2)
    assert not store.wrote("worker.0")
    waits = [one.waiting_for for one in store.did(ReportState) if isinstance(one, ReportState)]
    assert "the lease of worker 0" in (waits[-1] or "")
    store.run(1)
    assert store.worker.worker_id == "worker-0"


def test_a_worker_with_the_name_of_a_live_one_takes_another_id() -> None:
    held = WorkerLease(worker=0, instance="x.1", name="billing-1", host="h", beat=3, taken=5)
    store = Store(name="billing-1", a=held)
    store.run(SPEC.lease_s / 3)
    store.store(replace(held, beat=4))
    store.run(SPEC.lease_s / 3)
    assert store.worker.worker_id == "worker-1"


def test_a_worker_does_not_wait_for_a_lease_that_the_store_has_lost() -> None:
    store = Store(
        name="billing-1", a=WorkerLease(worker=0, instance="x.1", name="billing-1", host="h", beat=3, taken=5)
    )
    store.run(1)
    store.records.clear()
    store.run(SPEC.lease_s)
    assert store.worker.worker_id == "worker-1"


def test_a_worker_stops_by_its_own_clock_and_goes_on_under_a_confirmed_pin() -> None:
    store = Store()
    store.run(1)
    late = store.now + 3
    assert store.worker.token_of("0", late) is None
    assert store.worker.token_of("0", late, late - 0.1) is not None
    assert store.worker.token_of("0", late, late - 1) is None


def test_a_worker_whose_lease_was_expired_stops_and_joins_as_another_instance() -> None:
    store = Store()
    store.run(1)
    lease = store.worker.lease.lease
    assert lease is not None
    store.store(WorkerLease(worker=0, instance="me.1", taken=lease.taken, beat=lease.beat, state=LeaseState.EXPIRED))
    store.run(1.5)
    assert store.did(StopEverything)
    assert store.worker.token_of("0", store.now) is None
    store.tell(FleetSignal.HANDLERS_ENDED)
    store.run(1)
    assert store.worker.lease.phase is LeasePhase.HELD
    assert store.worker.lease.instance == "me.2"


def test_a_partition_is_released_after_it_was_drained() -> None:
    store = Store()
    store.run(1)
    store.tell(FleetSignal.STOP)
    assert store.did(DrainPartition) == [DrainPartition("0")]
    assert store.claim().held
    store.tell(PartitionDrained("0"))
    store.run(1)
    assert not store.claim().held
    assert store.did(ClosePartition, WorkerEnded) == [ClosePartition("0"), WorkerEnded()]


@pytest.mark.parametrize(("answers_after_s", "orderly"), [(4.0, True), (9.0, False)])
def test_a_worker_whose_lease_is_late_when_it_stops_still_leaves_in_order(
    answers_after_s: float, *, orderly: bool
) -> None:
    """Many that stop at once keep the store busy. One that does not answer for long leaves its lease to expire."""
    store = Store()
    store.run(1)
    store.tell(FleetSignal.STOP)
    store.unanswered["worker.0"] = []
    store.tell(PartitionDrained("0"))
    store.run(answers_after_s)
    for request in store.unanswered.pop("worker.0"):
        if isinstance(request, WriteRecord):
            store.tell(WriteUnknown("worker.0"))
        elif isinstance(request, ReadRecords):
            store.tell(ReadFailed(request.keys))
    store.run(2)
    assert store.did(WorkerEnded) == [WorkerEnded(orderly=orderly)]


def test_a_claim_of_a_live_worker_is_waited_for() -> None:
    store = Store(
        lease=WorkerLease(worker=7, instance="x.1", taken=1, beat=1),
        claim=FleetClaim(partition="0", worker=7, instance="x.1", token=5, held=True),
    )
    store.run(1)
    assert store.worker.ownership is not None
    assert store.worker.token_of("0", store.now) is None
    store.run(4)  # its lease does not change: it is expired, and the partition taken over
    assert store.claim().token > 5
    assert StartPartition("0", store.claim().token, force=True) in store.actions


def test_a_worker_that_is_set_aside_is_not_named_in_the_assignment() -> None:
    """So that it has joined when it is counted with again, whoever leads then."""
    store = Store(lease=WorkerLease(worker=7, instance="x.1", taken=1, beat=1, trouble="it cannot change its consumer"))
    store.planner.aside = frozenset({7})
    store.run(1)
    assignment = store.worker.view.assignment
    assert assignment is not None
    assert assignment.workers.keys() == {0}


def test_a_lease_that_is_missing_once_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing may be cut short. The claim of a worker that one read does not show is not taken over."""

    def owner_is_hidden_once() -> Store:
        store = Store(
            lease=WorkerLease(worker=7, instance="x.1", taken=1, beat=1),
            claim=FleetClaim(partition="0", worker=7, instance="x.1", token=5, held=True),
        )
        store.run(1)
        hidden = store.records.pop("worker.7")
        store.run(0.6)
        store.records["worker.7"] = hidden
        return store

    assert not owner_is_hidden_once().did(StartPartition)
    monkeypatch.setattr(FleetView, "is_gone", lambda self, worker: worker in self.absent)
    assert owner_is_hidden_once().did(StartPartition), "the planted bug is found"


def test_a_lease_is_expired_the_moment_it_is_old() -> None:
    store = Store(
        lease=WorkerLease(worker=7, instance="x.1", taken=1, beat=1),
        claim=FleetClaim(partition="0", worker=7, instance="x.1", token=5, held=True),
    )
    store.run(1)
    first_seen = store.worker.view.workers[7].since
    assert store.worker.view.next_expiry(store.now) == first_seen + store.worker.spec.lease_s
    store.run(4)
    assert store.worker.view.next_expiry(store.now) > first_seen + store.worker.spec.lease_s


def test_a_claim_that_landed_when_its_id_was_nobodys_any_more_is_taken_over() -> None:
    """Another instance came and left before the late write landed, so no lease is newer than the claim."""
    store = Store(
        lease=WorkerLease(worker=7, instance="y.1", taken=2, beat=3, state=LeaseState.LEFT, ended_ms=1),
        claim=FleetClaim(partition="0", worker=7, instance="x.1", token=5, held=True),
    )
    store.run(2 * SPEC.lease_s - 0.5)
    assert not store.did(StartPartition), "the read of the lease may be a stale one"
    store.run(2)
    assert StartPartition("0", store.claim().token, force=True) in store.actions


def led_by_another(store: Store, seconds: int) -> None:
    """Worker 7 leads, and renews its two leases every second. Everybody hears of it."""
    for _ in range(seconds):
        beat = store.sequence + 1
        renewed = (
            WorkerLease(worker=7, instance="x.1", taken=1, beat=beat),
            LeaderLease(worker=7, instance="x.1", epoch=1, beat=beat),
        )
        for record in renewed:
            store.store(record)
        for record in renewed:
            store.tell(RecordHint(key_of(record), to_json(record)))
        store.run(1)


def test_a_fleet_at_rest_reads_the_leases_of_all_workers_only_for_its_leader() -> None:
    store = Store()
    led_by_another(store, 3)
    store.actions.clear()
    led_by_another(store, 30)
    looks = [one.keys for one in store.did(ReadRecords) if isinstance(one, ReadRecords)]
    assert len(looks) >= 25
    assert sum(WORKERS in keys for keys in looks) == 3, "with every audit"


def test_whoever_follows_a_dead_leader_knows_since_when_its_lease_is_unchanged() -> None:
    """It has read no lease for seconds then. It heard of the renewals, so it need not wait for another lease_s."""
    store = Store()
    led_by_another(store, 12)
    store.actions.clear()
    store.run(SPEC.lease_s - 1 + SPEC.lease_s / LOOKS_PER_LEASE + 0.2)
    assert store.wrote("worker.7")


def test_a_time_when_the_store_did_not_answer_is_not_held_against_a_worker() -> None:
    store = Store()
    led_by_another(store, 12)
    store.unanswered = {"leader": [], "worker.0": []}
    store.run(10)
    store.actions.clear()
    store.answer("worker.0")
    store.answer("leader")
    store.run(SPEC.lease_s - 0.5)
    assert not store.wrote("worker.7")
    store.run(1)
    assert store.wrote("worker.7")


def test_an_owner_whose_pin_is_refused_clears_that_of_whoever_has_it() -> None:
    store = Store()
    store.run(1)
    store.tell(PartitionPinned("0"))
    store.run(4)
    assert not store.did(UnpinPartition)
    store.tell(PartitionUnpinned("0"))
    store.run(2)
    assert store.did(UnpinPartition) == [UnpinPartition("0")]
    store.tell(PartitionPinned("0"))
    store.run(6)
    assert store.did(UnpinPartition) == [UnpinPartition("0")]


@pytest.mark.parametrize("outcome", [WriteConflict, WriteUnknown])
def test_a_claim_without_an_answer_is_written_again(outcome: type[WriteConflict | WriteUnknown]) -> None:
    store = Store()
    store.refused["claim.0"] = outcome
    store.run(2)
    assert store.worker.token_of("0", store.now) == store.claim().token


@pytest.mark.parametrize("outcome", [WriteConflict, WriteUnknown])
def test_a_note_of_the_history_without_an_answer_is_written_again(outcome: type[WriteConflict | WriteUnknown]) -> None:
    store = Store()
    store.refused["history.1"] = outcome
    store.run(2)
    assert store.history() == [(1, ("0",))]


def test_a_version_that_comes_before_the_last_one_is_noted_loses_neither() -> None:
    store = Store()
    store.unanswered["history.1"] = []
    store.run(1)
    store.planner.partitions.append("1")
    store.run(1)
    assert store.history() == [(2, ("1",))], "the note of version 1 waits"
    store.answer("history.1")
    store.run(1)
    assert store.history() == [(1, ("0",)), (2, ("1",))]


def test_a_version_is_noted_whose_write_had_no_answer_before_the_next_was_planned() -> None:
    store = Store()
    store.run(1)
    store.unanswered["assignment"] = []
    store.planner.partitions.append("1")
    store.run(1)
    written = store.unanswered["assignment"].pop()
    assert isinstance(written, WriteRecord)
    store.store(written.record)
    store.tell(WriteUnknown("assignment"))
    store.store(WorkerLease(worker=7, instance="x.1", taken=1, beat=1, highest_version=2))
    store.planner.partitions.append("2")
    store.run(1)
    planned = [one.record for one in store.unanswered["assignment"] if isinstance(one, WriteRecord)]
    assert [one.version for one in planned if isinstance(one, FleetAssignment)] == [3]
    store.answer("assignment")
    store.run(1)
    assert store.history() == [(1, ("0",)), (2, ("1",)), (3, ("2",))]


def test_the_history_keeps_the_last_100_versions() -> None:
    store = Store()
    for number in range(1, HISTORY_LENGTH + 10):
        store.run(0.6)
        store.planner.partitions.append(str(number))
    store.run(0.6)
    assert [version for version, _ in store.history()] == list(range(11, HISTORY_LENGTH + 11))


def test_what_a_wiped_store_lost_is_written_again() -> None:
    store = Store()
    store.run(1)
    token = store.worker.token_of("0", store.now)
    store.records.clear()
    store.run(3)
    assert {"worker.0", "leader", "claim.0", "spec"} <= store.records.keys()
    assert store.worker.token_of("0", store.now) == token
    assert not store.did(StopEverything)


def test_a_confirmation_by_a_store_that_is_gone_makes_no_owner() -> None:
    """The claim was written to a bucket that was made anew since. In the new one the owner before has its own."""
    store = Store()
    store.unanswered = {"claim.0": []}
    store.run(1)
    store.tell(RecordsRead(("claim.0",), {}, store.created))
    [_, write] = store.unanswered.pop("claim.0")
    assert isinstance(write, WriteRecord)
    confirmed = WriteConfirmed("claim.0", store.store(write.record))
    store.records.clear()
    store.created, store.sequence = "made anew", 0
    store.store(WorkerLease(worker=7, instance="x.1", taken=1, beat=1))
    store.store(FleetClaim(partition="0", worker=7, instance="x.1", token=5, held=True))
    store.run(0.6)
    store.tell(confirmed)
    store.run(0.6)
    assert not store.did(StartPartition)
    assert store.worker.token_of("0", store.now) is None


def test_a_claim_that_is_replaced_while_workers_recover_is_noticed_without_a_hint() -> None:
    """Two owners may have started before anybody could notice the loss: the one with the higher token stays."""
    store = Store()
    store.run(1)
    store.records.clear()
    store.run(1.5)
    assert store.worker.token_of("0", store.now) is not None
    store.store(FleetClaim(partition="0", worker=7, instance="x.1", token=store.claim().token + 1, held=True))
    store.run(0.6)
    assert store.did(DrainPartition) == [DrainPartition("0", lost=True)]


def renewed_late(store: Store) -> None:
    """The process stood still for longer than its lease; then it has renewed it, and not read its claim yet."""
    store.now += 10
    store.unanswered["claim.0"] = []
    store.tell(FleetSignal.TIMER)
    assert store.worker.lease.is_sure(store.now)


def test_a_lease_that_is_renewed_too_late_starts_nothing_before_the_claims_were_read() -> None:
    """It was expired and its partition taken over, and the store has lost the one and not the other."""
    store = Store()
    store.run(1)
    assert store.worker.may_start(store.now)
    store.store(FleetClaim(partition="0", worker=7, instance="x.1", token=store.claim().token + 1, held=True))
    renewed_late(store)
    assert not store.worker.may_start(store.now)
    assert store.worker.is_unconfirmed(store.now)
    assert store.worker.may_start(store.now, store.now), "under a confirmed pin it goes on"
    store.answer("claim.0")
    assert store.did(DrainPartition) == [DrainPartition("0", lost=True)]
    assert store.worker.token_of("0", store.now) is None
    assert store.worker.may_start(store.now)


def test_an_owner_whose_lease_is_renewed_too_late_goes_on_with_a_new_token() -> None:
    """Another may have owned the partition meanwhile, with a higher token, and the store may have lost all of that."""
    store = Store()
    store.run(1)
    before = store.worker.token_of("0", store.now)
    assert before is not None
    renewed_late(store)
    assert store.worker.token_of("0", store.now, store.now) == before, "while its pin is confirmed"
    store.answer("claim.0")
    token = store.worker.token_of("0", store.now)
    assert token == store.claim().token >= store.worker.view.wall_ms(store.now)
    assert store.did(ChangeToken) == [ChangeToken("0", token)]
    assert not store.did(DrainPartition), "what runs goes on"


@pytest.mark.parametrize("outcome", [WriteConflict, WriteUnknown])
def test_a_new_token_without_an_answer_is_written_again(outcome: type[WriteConflict | WriteUnknown]) -> None:
    store = Store()
    store.run(1)
    renewed_late(store)
    store.refused["claim.0"] = outcome
    store.answer("claim.0")
    store.run(1)
    assert store.did(ChangeToken) == [ChangeToken("0", store.claim().token)]
    assert store.worker.token_of("0", store.now) == store.claim().token


def test_a_late_owner_of_a_lost_claim_waits_until_the_fleet_has_recovered() -> None:
    """The one that took the partition over may be there, and writes its claim again."""
    store = Store()
    store.run(1)
    before = store.claim()
    store.records.clear()
    store.now += 10
    store.run(SPEC.lease_s)
    assert store.worker.lease.is_sure(store.now)
    assert store.worker.token_of("0", store.now) is None
    assert store.worker.token_of("0", store.now, store.now) == before.token
    assert store.claim() == before, "nothing was claimed"
    store.run(SPEC.lease_s + 1)
    assert store.worker.token_of("0", store.now) == store.claim().token > before.token


@pytest.mark.parametrize("taken_later", [True, False])
def test_a_late_lease_is_not_written_over_that_of_another_with_the_revision_of_before(*, taken_later: bool) -> None:
    """Revisions come a second time in a store that went back: a comparison with one does not tell holders apart."""
    store = Store()
    store.run(1)
    known = store.records["worker.0"]
    mine = from_json("worker.0", known.value or b"")
    assert isinstance(mine, WorkerLease)
    theirs = WorkerLease(worker=0, instance="x.1", taken=mine.taken + (1 if taken_later else -1), beat=1)
    store.records["worker.0"] = RecordEntry(known.revision, to_json(theirs))
    store.now += 10
    store.tell(FleetSignal.TIMER)
    assert store.did(StopEverything)
    assert store.records["worker.0"].value == to_json(theirs)


def test_a_late_leader_leads_again_under_a_new_epoch() -> None:
    """Another may have led meanwhile, and the store may have lost that: what is stored looks as it did."""
    store = Store()
    store.run(1)
    leadership = store.worker.leadership
    assert leadership is not None
    assert leadership.lease is not None
    before = leadership.lease.epoch
    store.now += 10
    store.run(1)
    assert leadership.is_leading(store.now)
    assert leadership.lease.epoch == before + 1


def test_a_late_leader_does_not_write_over_another_with_the_revision_of_before() -> None:
    store = Store()
    store.run(1)
    leadership = store.worker.leadership
    assert leadership is not None
    assert leadership.lease is not None
    theirs = LeaderLease(worker=7, instance="x.1", epoch=leadership.lease.epoch + 1, beat=1)
    store.records["leader"] = RecordEntry(store.records["leader"].revision, to_json(theirs))
    leadership.deadline = leadership.renew_at = store.now  # as if its renewals alone had no answers
    store.tell(FleetSignal.TIMER)
    assert store.records["leader"].value == to_json(theirs)
    assert not leadership.is_leading(store.now)


def test_a_stale_read_does_not_take_a_leader_back() -> None:
    """Else its next write expects a revision of before, and one that leaves does not say so: the next leader waits."""
    store = Store()
    store.run(1)
    leadership = store.worker.leadership
    assert leadership is not None
    first = next(one for one in store.did(WriteRecord) if isinstance(one, WriteRecord) and one.key == "leader")
    stale = RecordEntry(store.records["leader"].revision - 1, to_json(first.record))
    store.tell(RecordsRead(("leader",), {"leader": stale}, store.created))
    assert leadership.revision == store.records["leader"].revision
    assert leadership.is_leading(store.now)


def test_a_leader_expires_an_id_that_its_own_late_write_has_taken() -> None:
    """A write without an answer may land when its worker has already taken another id."""
    store = Store()
    store.run(2)
    [mine] = (from_json(key, one.value or b"") for key, one in store.records.items() if key == "worker.0")
    assert isinstance(mine, WorkerLease)
    store.store(WorkerLease(worker=1, instance=mine.instance, taken=mine.taken, beat=1, host="h"))
    store.run(SPEC.lease_s + 1)
    orphan = from_json("worker.1", store.records["worker.1"].value or b"")
    assert isinstance(orphan, WorkerLease)
    assert orphan.state is LeaseState.EXPIRED
    assert store.worker.lease.phase is LeasePhase.HELD
    assert store.worker.lease.worker == 0


def test_a_store_that_went_back_to_the_revision_of_before_does_not_hold_a_lease_up() -> None:
    store = Store()
    store.run(2)
    known = store.records["worker.0"]
    lease = from_json("worker.0", known.value or b"")
    assert isinstance(lease, WorkerLease)
    store.refused["worker.0"] = WriteConflict  # of a store that is rolled back the moment after
    older = to_json(replace(lease, beat=0))
    store.records["worker.0"] = RecordEntry(known.revision, older)
    store.run(2 * SPEC.lease_s)
    assert store.worker.lease.phase is LeasePhase.HELD
    assert store.worker.lease.is_sure(store.now)
