"""Workers of a fleet share partitions on a simulated server, with faults of every kind.

Every run is made from its seed alone.

At every step: nobody starts a message without the newest claim, no token of a partition goes back, nobody else is at
work with the same or a newer token, ids have one holder, epochs grow, messages are done in order. In the end everything
is owned and done. `python -m tests.simulation.test_fleet_simulation 1000` runs many seeds of every profile, and
`python -m tests.simulation.test_fleet_simulation 1 17 store` replays seed 17 of one profile.
"""

from __future__ import annotations

import sys

import pytest

from keylane.core import fleet_claims, fleet_lease
from keylane.core.fleet_claims import ClaimStep, Ownership
from keylane.core.fleet_leadership import Leadership
from keylane.core.fleet_records import (
    FleetAssignment,
    FleetRecord,
    LeaderLease,
    WorkerLease,
    claim_key,
    partition_of,
)
from keylane.core.fleet_view import FleetView, Sighting
from tests.simulation.fleet_process_model import LEASE_S, PREFETCH, Process
from tests.simulation.fleet_store_model import FleetBucket, PinnedPartition, SimulatedTime

SEEDS = 28
BLOCKS, LONG_BLOCKS = 2, 6
"""Blocks of each profile: 336 runs in `make test`, 1,344 with the long ones, in tests that end in time also on a busy
machine."""
MUTATED_SEEDS = 168
"""So many may be needed until one of them shows what is wrong."""
PARTITIONS = 4
BUSY_S = 10.0
"""Messages, changes and faults come until then."""
SETTLE_S = 6.0
QUIET_S = 60.0
"""By then everything must be owned and done."""

PLANNED = ("join", "leave", "roll")
CRASHES = (*PLANNED, "kill", "kill", "freeze", "kill the leader")
LINKS = ("join", "leave", "cut", "cut", "cut from the bucket", "freeze", "stale")
STORE = ("join", "roll", "wipe", "make anew", "roll back", "tell less", "unreachable")
TROUBLE = ("join", "roll", "kill", "trouble", "trouble", "trouble")
BUCKET = ("join", "cut from the bucket", "cut from the bucket", "unreachable")
PROFILES: dict[str, tuple[str, ...]] = {
    "planned": PLANNED,
    "crashes": CRASHES,
    "links": LINKS,
    "bucket": BUCKET,
    "trouble": TROUBLE,
    "store": STORE,
    "everything": (*CRASHES, *LINKS, *STORE),
}


class Ledger:
    """What handlers did, and whether that is right: the downstream that refuses older tokens."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.problems: list[str] = []
        self.repeated = 0
        self.tolerated = 0
        self.last: dict[str, int] = {}
        self._started: dict[str, int] = {}
        self._accepted: dict[str, int] = {}
        self._owners: dict[tuple[str, int], str] = {}
        self._at_work: dict[str, dict[Process, int]] = {}

    def began(self, process: Process, name: str, sequence: int, token: int) -> None:
        instance = process.worker.lease.instance
        what = f"{process.name} began {name}/{sequence} with {token}"
        newest = self.world.bucket.claims[name]
        # Under a confirmed pin the newest claim may be another's, which starts when it has cleared the pin: the tokens
        # that were started with, and who is at work, tell whether it has. A store that went back shows a claim from
        # before to its owner of then, which releases it, with its lower token: nobody claims the partition while the
        # fleet recovers, and by then the present owner has written its own again.
        is_sure = process.worker.may_start(process.time.now)
        if is_sure and newest != (instance, token, True):
            self.complain(f"{what}, and the newest claim is {newest}", (2 if newest[1] < token else 1) * LEASE_S)
        if token < self._started.get(name, 0):
            self.complain(f"{what} after {self._started[name]}")
        if self._owners.setdefault((name, token), instance) != instance:
            self.problems.append(f"{what}, a token of {self._owners[name, token]}")
        self._started[name] = max(token, self._started.get(name, 0))
        others = self._at_work.setdefault(name, {})
        for other, its_token in others.items():
            if other.is_dead:
                continue
            if its_token >= token or not self.world.faulty:
                self.complain(f"{what}, and {other.name} is at work with {its_token}")
        others[process] = token

    def did(self, process: Process, name: str, sequence: int, token: int) -> bool:
        """Whether the downstream took it."""
        self._at_work[name].pop(process, None)
        if token < self._accepted.get(name, 0):
            return False
        self._accepted[name] = token
        last = self.last.get(name, 0)
        if sequence == last + 1:
            self.last[name] = sequence
        elif sequence <= last:
            self.repeated += 1
        else:
            self.problems.append(f"{process.name} did {name}/{sequence} with {token} after {last}")
        return True

    def complain(self, text: str, tolerated_s: float = LEASE_S) -> None:
        """Right after the store lost records its workers cannot know it, and revisions come a second time: tokens
        and epochs fence them then."""
        if self.world.time.now < self.world.bucket.lossy_at + tolerated_s:
            self.tolerated += 1
        else:
            self.problems.append(text)


class World:
    """Processes, the server, and a source of trouble."""

    def __init__(self, seed: int, profile: str) -> None:
        self.time = SimulatedTime(seed)
        self.bucket = FleetBucket(self.time)
        self.bucket.on_write += [self._written, self._kill_who_assigns]
        self.partitions = {str(number): PinnedPartition(str(number)) for number in range(PARTITIONS)}
        self.ledger = Ledger(self)
        self.profile = profile
        self.faulty = profile != "planned"
        self.is_named = seed % 2 == 1
        """Whether a process that is started again has the name of the one before, as under a supervisor."""
        self.pool = 8
        self.prefetch = PREFETCH
        self.handler_times: tuple[float, ...] = (0.001, 0.01, 0.05, 0.05, 0.3, 1.5)
        self.processes: list[Process] = []
        self._numbers = 0
        self._epoch: tuple[int, str] = (0, "")
        self._rank: tuple[int, ...] = ()
        self._checked_loss = self.bucket.lossy_at
        self._kill_leader = False
        random = self.time.random
        for _ in range(random.randint(1, 3)):
            self.time.after(random.uniform(0, 0.5), self.start)
        self.time.after(0.1, self._publish)
        self.time.after(0.5, self._deliver_again)
        if profile in PROFILES:
            self.time.after(random.uniform(2, 4), self._trouble)

    def start(self, host: str = "") -> None:
        self._numbers += 1
        name = f"p{self._numbers}"
        self.processes.append(Process(self, name, host or f"host-{name}"))

    @property
    def running(self) -> list[Process]:
        return [one for one in self.processes if not one.is_dead and not one.has_ended]

    # ---- the stream ----------------------------------------------------------------------------------------

    def _publish(self) -> None:
        for partition in self.partitions.values():
            if self.time.random.random() < 0.4:
                partition.published += 1 if self.time.random.random() < 0.9 else 8
                self.deliver(partition)
        if self.time.now < BUSY_S:
            self.time.after(self.time.random.choice((0.1, 0.3, 0.6)), self._publish)

    def deliver(self, partition: PinnedPartition) -> None:
        if partition.floor == partition.published:
            return
        reader: Process | None = partition.pinned_reader()
        if reader is None or reader.is_cut:
            return
        sequences = [one for one in range(partition.floor + 1, partition.published + 1) if one not in partition.acked]
        reader.later(
            self.time.random.uniform(0.001, 0.02),
            reader.receive,
            partition.name,
            sequences[: self.prefetch],
            partition.pin,
        )

    def _deliver_again(self) -> None:
        for partition in self.partitions.values():
            partition.time_out(self.time.now)
            self.deliver(partition)
            for process in self.running:  # pulls are sent again
                if process.can_pull:
                    process.pull_again(partition.name)
        self.bucket.snapshot()
        self.time.after(0.5, self._deliver_again)

    # ---- hints, and what is checked at every write ---------------------------------------------------------

    def hint(self, key: str, value: bytes) -> None:
        partition = partition_of(key)
        for process in self.running:
            if process.is_cut or self.time.random.random() < 0.1:
                continue
            is_heard = process.is_leading or not key.startswith("worker")
            if (partition in process.partitions) if partition is not None else is_heard:
                process.later(self.time.random.uniform(0.001, 0.02), process.hint, key, value)

    def _written(self, key: str, record: FleetRecord) -> None:
        if self.bucket.lossy_at != self._checked_loss:
            self._checked_loss, self._epoch, self._rank = self.bucket.lossy_at, (0, ""), ()
        # One that was sent when nobody could know of the loss, and was held up on its way, may land when its revision
        # has come a second time: whoever wrote the newer record writes it again.
        is_outdated = self.bucket.sent_at < self.bucket.lossy_at + LEASE_S
        match record:
            case WorkerLease():
                self._check_ids()
            case LeaderLease() | FleetAssignment() if is_outdated:
                pass
            case LeaderLease():
                epoch, instance = self._epoch
                if record.epoch < epoch or (record.epoch == epoch and record.instance != instance):
                    self.ledger.complain(f"leader {record} after {self._epoch}")
                self._epoch = (record.epoch, record.instance)
            case FleetAssignment():
                if record.rank[0] < (self._rank or (0,))[0] or record.rank <= self._rank:
                    self.ledger.complain(f"assignment {record.rank} after {self._rank}")
                self._rank = record.rank
            case _:
                pass

    def _kill_who_assigns(self, _key: str, record: FleetRecord) -> None:
        if self._kill_leader and isinstance(record, FleetAssignment):
            self._kill_leader = False
            for process in self.running:
                if process.is_leading:
                    self._kill(process)

    def _check_ids(self) -> None:
        held = [
            process.worker.lease.worker
            for process in self.running
            if process.worker.ownership is not None
            and process.worker.lease.is_sure(self.time.now)
            and not (process.worker.stopping and not process.worker.ownership.partitions)  # its end is being written
        ]
        if len(held) != len(set(held)):
            self.ledger.complain(f"an id has two holders: {held}")

    # ---- trouble -------------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        random = self.time.random
        if self.time.now < BUSY_S:
            self._cause(random.choice(PROFILES[self.profile]), random.choice(self.running) if self.running else None)
            self.time.after(random.choice((0.1, 0.5, 1.5, 3.0)), self._trouble)

    def _kill(self, process: Process) -> None:
        process.kill()
        self.time.after(self.time.random.choice((0.2, 2.0, 6.0)), self.start, process.host)

    def _cause(self, trouble: str, process: Process | None) -> None:  # noqa: C901, PLR0912 - one case for each trouble
        random, after = self.time.random, self.time.after
        span = random.choice((0.3, 1.5, 4.0, 7.0))
        if process is None or trouble == "join":
            if len(self.running) < 5:
                self.start()
            return
        match trouble:
            case "leave" | "roll":
                if trouble == "roll" or len(self.running) > 1:
                    process.tell_stop()
                if trouble == "roll":
                    after(random.choice((0.1, 1.0, 3.0)), self.start, process.host)
            case "kill":
                self._kill(process)
            case "kill the leader":
                self._kill_leader = True
                self.start()
            case "freeze":
                process.is_frozen = True
                after(span, process.wake)
            case "cut":
                process.is_cut = True
                after(span, setattr, process, "is_cut", False)
            case "cut from the bucket":
                process.is_bucket_cut = True
                after(span, setattr, process, "is_bucket_cut", False)
            case "stale":
                self.bucket.stale_reads = True
                after(span, setattr, self.bucket, "stale_reads", False)
            case "tell less":
                self.bucket.tells_less = True
                after(span, setattr, self.bucket, "tells_less", False)
            case "unreachable":
                self.bucket.is_reachable = False
                after(span, setattr, self.bucket, "is_reachable", True)
            case "trouble":
                process.worker.lease.trouble = "it cannot change its consumer"
                after(span, setattr, process.worker.lease, "trouble", "")
            case "wipe":
                self.bucket.wipe()
            case "make anew":
                self.bucket.make_anew()
            case "roll back":
                self.bucket.roll_back()
            case _:
                raise AssertionError(trouble)

    # ---- the end -------------------------------------------------------------------------------------------

    def has_problem(self) -> bool:
        return bool(self.ledger.problems)

    def is_settled(self) -> bool:
        return self.has_problem() or (not self._undone() and not self._unowned())

    def _undone(self) -> list[str]:
        return [
            name
            for name, one in self.partitions.items()
            if one.published != one.floor or self.ledger.last.get(name, 0) != one.published
        ]

    def _unowned(self) -> list[str]:
        owned = [name for process in self.running for name in process.owned]
        return [name for name in self.partitions if owned.count(name) != 1]

    def run(self) -> None:
        self.time.run(BUSY_S, self.has_problem)
        if not self.has_problem():
            self.bucket.stale_reads = self.bucket.tells_less = False
            self.bucket.is_reachable = True
            for process in self.running:
                process.is_cut = process.is_bucket_cut = False
                process.wake()
            if all(process.worker.stopping for process in self.running):
                self.start()
            self.time.run(self.time.now + SETTLE_S, self.has_problem)  # what began goes on
            self.time.run(QUIET_S, self.is_settled)
        assert not self.ledger.problems, self.ledger.problems[0]
        assert not self._undone(), f"never done: {[(vars(self.partitions[one])) for one in self._undone()]}"
        assert not self._unowned(), f"not owned once: {self._unowned()}"
        if not self.faulty:
            assert not self.ledger.repeated, f"{self.ledger.repeated} handled twice in a planned run"


def take_over(world: World) -> None:
    """Cut one owner off from the bucket alone, under a load that never ends: the leader expires it, others take its
    partitions over, and until they have cleared its pins it handles messages."""
    world.handler_times, world.prefetch = (0.02, 0.05), 1000
    while len(world.processes) < 3:
        world.start()
    for partition in world.partitions.values():
        partition.published = 300
    world.time.after(3.0, setattr, world.processes[0], "is_bucket_cut", True)


def simulate(seed: int, profile: str) -> World:
    world = World(seed, profile)
    if profile == "takeovers":
        take_over(world)
    try:
        world.run()
    except Exception as error:
        error.add_note(
            f"seed {seed}, profile {profile}, at {world.time.now:.3f} s; replay it with "
            f"`python -m tests.simulation.test_fleet_simulation 1 {seed} {profile}`"
        )
        for process in world.processes:
            error.add_note(repr(process))
        raise
    return world


def _simulate_many(profile: str, first: int, seeds: int) -> int:
    """How many messages were handled."""
    return sum(sum(simulate(seed, profile).ledger.last.values()) for seed in range(first, first + seeds))


@pytest.mark.parametrize(
    "block",
    [
        *range(BLOCKS),
        *(pytest.param(one, marks=pytest.mark.long("more seeds")) for one in range(BLOCKS, BLOCKS + LONG_BLOCKS)),
    ],
)
@pytest.mark.parametrize("profile", PROFILES)
def test_one_owner_order_and_nothing_lost(profile: str, block: int) -> None:
    assert _simulate_many(profile, block * SEEDS, SEEDS) > 20 * SEEDS


def test_one_owner_while_a_worker_without_the_bucket_is_replaced() -> None:
    _simulate_many("takeovers", 0, 10)


def test_the_leader_gives_what_a_worker_in_trouble_has_to_others() -> None:
    world = World(1, "calm")
    while len(world.processes) < 3:
        world.start()
    world.time.run(BUSY_S, world.has_problem)
    troubled = next(process for process in world.running if process.owned)
    troubled.worker.lease.trouble = "it cannot change its consumer"
    world.time.run(2 * BUSY_S, lambda: not troubled.owned and not world._unowned())
    assert not troubled.owned
    assert not world._unowned()
    troubled.worker.lease.trouble = ""
    world.time.run(4 * BUSY_S, lambda: bool(troubled.owned))
    assert troubled.owned
    assert not world.ledger.problems


def _start_at_once(self: Process, name: str) -> None:
    if (mine := self.partitions.get(name)) is not None and mine.start_at == float("inf"):
        mine.start_at = self.time.now
        self._next(name)


def _start_without_clearing(self: Process, name: str, token: int, *, force: bool) -> None:
    _START(self, name, token, force=False)


def _put_without_comparing(self: FleetBucket, key: str, revision: int, record: FleetRecord, value: bytes) -> int | None:
    present = self.records.get(key)
    current = present.entry.revision if present is not None else 0
    return _PUT(self, key, current if partition_of(key) is not None else revision, record, value)


def _release_at_once(self: Ownership, wanted: frozenset[str]) -> None:
    _WANT(self, wanted)
    for one in self.partitions.values():
        if one.step is ClaimStep.DRAINING and not self.requests.is_writing(claim_key(one.partition)):
            one.step = ClaimStep.RELEASING
            self._write(one, 0.0, held=False)


_PUT, _WANT, _START = FleetBucket.put, Ownership.want, Process._start_partition

MUTATIONS: dict[str, tuple[str, object, str, object]] = {
    # what is wrong: the profile that shows it, what is replaced, by what
    "a claim is written without a comparison": ("everything", FleetBucket, "put", _put_without_comparing),
    "a claim is written over that of a live worker": ("planned", Ownership, "obstacle", lambda *_: ""),
    "a partition is released before it is drained": ("planned", Ownership, "want", _release_at_once),
    "a holder does not stop by its own clock": ("links", fleet_lease, "HOLD_SHARE", 1000.0),
    "a lease is expired too early": (
        "crashes",
        Sighting,
        "unchanged_for",
        lambda self: 3 * (self.checked - self.since),
    ),
    "tokens begin again after a wipe": ("store", FleetView, "next_token", lambda _self, previous, _now: previous + 1),
    "epochs do not grow": (
        "crashes",
        Leadership,
        "_next_epoch",
        lambda self: LeaderLease(worker=self.worker, instance=self.instance, epoch=1, beat=1),
    ),
    "a takeover does not wait until nobody trusts the old pin": ("takeovers", Process, "_unpinned", _start_at_once),
    "a takeover does not clear the pin": ("takeovers", Process, "_start_partition", _start_without_clearing),
    "an owner does not look for its claim": ("store", Ownership, "_found_held", lambda *_: None),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_planted_bugs_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, owner, name, replacement = MUTATIONS[what]
    monkeypatch.setattr(owner, name, replacement)
    if name == "_found_held":
        monkeypatch.setitem(fleet_claims._FOUND, ClaimStep.HELD, replacement)
    with pytest.raises(AssertionError):
        _simulate_many(profile, 0, MUTATED_SEEDS)


if __name__ == "__main__":
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for each in range(first, first + int(sys.argv[1])):
        for one in sys.argv[3:] or PROFILES:
            simulate(each, one)
