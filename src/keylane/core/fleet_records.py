"""The records of a fleet in its KV bucket: what each holds, its JSON, and how a record is refused.

Owns: nine records, their keys below `<stream>.<fleet>.`, their checks, the digest of an assignment. Never writes one.

| key | record | written by | what only grows in it |
| --- | --- | --- | --- |
| `spec` | `FleetSpec` | the first worker, once | |
| `worker.<n>` | `WorkerLease` | the holder of id n; the leader, which expires it | `taken`, then `beat` |
| `leader` | `LeaderLease` | the leader | `epoch`, then `beat` |
| `assignment` | `FleetAssignment` | the leader | `epoch`, then `version` |
| `claim.<partition>` | `FleetClaim` | the owner of the partition, or its successor | `token` |
| `partitions` | `PartitionTable` | the leader, where partitions change while the fleet runs | `version` |
| `position.<n>` | `WorkerPositions` | the holder of id n | `beat`, and every position |
| `drains` | `DrainedWorkers` | an operator | |
| `history.<version % 100>` | `HistoryEntry` | the leader | `epoch`, then `version` |

The growing numbers put any two records of one key in order without the store: a record that is lower than one that a
worker knows was lost and came back (the store was rolled back), a higher one has replaced it. `rank` gives them.

A record that is read keeps the fields that this version does not know, and writes them back: workers of several
versions share a fleet while it is upgraded. What is known must be right: anything else raises `BrokenFleetRecord`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias, TypeVar

from keylane.core.subjects import shown
from keylane.errors import BrokenFleetRecord, InvalidInput

SPEC = "spec"
LEADER = "leader"
ASSIGNMENT = "assignment"
TABLE = "partitions"
WORKERS = "worker.*"
"""The pattern of all worker leases, for a read of many keys."""
DRAINS = "drains"
HISTORY = "history.*"
HISTORY_LENGTH = 100
"""So many assignments are remembered."""
POSITIONS = "position"
"""What the keys of all positions begin with."""

_PARTITION = re.compile(r"[-/_=A-Za-z0-9]+(?:\.[-/_=A-Za-z0-9]+)*")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_WORKER_KEY = re.compile(r"worker\.(0|[1-9][0-9]{0,5})")
_HISTORY_KEY = re.compile(r"history\.(0|[1-9][0-9]?)")
_POSITION_KEY = re.compile(r"position\.(0|[1-9][0-9]{0,5})")
_MOST = 2**63 - 1
_DIGEST_CHARACTERS = 16


class LeaseState(StrEnum):
    """Where the lease of a worker or of the leader stands. Only `live` and `leaving` are held by somebody."""

    LIVE = "live"
    LEAVING = "leaving"
    LEFT = "left"
    EXPIRED = "expired"

    @property
    def is_held(self) -> bool:
        return self in (LeaseState.LIVE, LeaseState.LEAVING)


def worker_key(worker: int) -> str:
    return f"worker.{worker}"


def claim_key(partition: str) -> str:
    return f"claim.{partition}"


def position_key(worker: int) -> str:
    return f"{POSITIONS}.{worker}"


def history_key(version: int) -> str:
    return f"history.{version % HISTORY_LENGTH}"


def worker_of(key: str) -> int | None:
    """The id number in the key of a worker lease; None: another record's key."""
    found = _WORKER_KEY.fullmatch(key)
    return int(found[1]) if found is not None else None


def partition_of(key: str) -> str | None:
    """The partition in the key of a claim; None: another record's key."""
    return key.removeprefix("claim.") if key.startswith("claim.") else None


def check_partition(partition: str) -> str:
    """Return the name of a partition unchanged, or raise `InvalidInput`.

    >>> check_partition("17"), check_partition("tool-1.chamber-2")
    ('17', 'tool-1.chamber-2')
    """
    if not isinstance(partition, str) or not _PARTITION.fullmatch(partition):
        raise InvalidInput(
            f"partition {shown(partition)} cannot be part of a KV key: use A-Z, a-z, 0-9, '-', '_', '=', '/', "
            "and single dots between them"
        )
    return partition


# ---- the records -------------------------------------------------------------------------------------------

Extra: TypeAlias = Mapping[str, Any]


def _no_extra() -> Extra:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """What a fleet is. Every worker brings its own; it must be the stored one."""

    source: Mapping[str, Any]
    """Where the partitions come from, as its source describes itself: `{"kind": "hashed", "partitions": 32, …}`."""
    prefix: str = "worker"
    pool: int = 1000
    """How many worker ids there are."""
    lease_s: float = 3.0
    layout: str = "partition"
    acks: str = "message"
    state: str = "replicated"
    extra: Extra = field(default_factory=_no_extra, compare=False)

    def differences(self, stored: FleetSpec) -> tuple[str, ...]:
        """What differs from the stored one, in words. Fields that one of the versions does not know do not count."""
        names = ("source", "prefix", "pool", "lease_s", "layout", "acks", "state")
        return tuple(
            f"{name} is {json.dumps(getattr(stored, name))} in the fleet and {json.dumps(getattr(self, name))} here"
            for name in names
            if getattr(stored, name) != getattr(self, name)
        )

    @property
    def rank(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLease:
    """Who holds a worker id. `worker` is the number in its key."""

    worker: int
    instance: str
    """One run of one process, and how often it has joined: never used again."""
    taken: int
    """The order of the holders of this id: milliseconds since 1970, or more if an earlier holder had more."""
    beat: int = 0
    state: LeaseState = LeaseState.LIVE
    name: str = ""
    host: str = ""
    labels: tuple[str, ...] = ()
    ended_ms: int = 0
    """When it left or was expired, by the wall clock of whoever wrote that. For the reservation of the id only."""
    highest_token: int = 0
    highest_version: int = 0
    highest_epoch: int = 0
    """The highest that this worker has seen: what a store that forgot them must be told."""
    table: int = 0
    """The version of the partition table that this worker follows."""
    successors: Mapping[str, int] = field(default_factory=dict)
    """Partition -> the worker that takes it over from this one, which leaves. Holds until the next assignment."""
    trouble: str = ""
    """What this worker cannot do, and asks the leader to look at; empty: nothing."""
    extra: Extra = field(default_factory=_no_extra, compare=False)

    @property
    def rank(self) -> tuple[int, ...]:
        return (self.taken, self.beat)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderLease:
    """Who leads the fleet."""

    worker: int
    instance: str
    epoch: int
    beat: int = 0
    version: int = 0
    """Of the newest assignment that this leader knows: a worker that has an older one reads it."""
    state: LeaseState = LeaseState.LIVE
    extra: Extra = field(default_factory=_no_extra, compare=False)

    @property
    def rank(self) -> tuple[int, ...]:
        return (self.epoch, self.beat)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAssignment:
    """Which worker is to own which partition, and which instance of it is meant."""

    epoch: int
    version: int
    owners: Mapping[str, int]
    """Partition -> worker."""
    workers: Mapping[int, str]
    """Worker -> instance. An assignment gives nothing to another instance of the same id."""
    reason: str = ""
    extra: Extra = field(default_factory=_no_extra, compare=False)

    @property
    def rank(self) -> tuple[int, ...]:
        return (self.epoch, self.version)

    @property
    def digest(self) -> str:
        return digest_of(self.owners)

    def partitions_of(self, worker: int, instance: str) -> frozenset[str]:
        if self.workers.get(worker) != instance:
            return frozenset()
        return frozenset(partition for partition, owner in self.owners.items() if owner == worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetClaim:
    """Who owns a partition, and with which fencing token. `partition` is in its key."""

    partition: str
    worker: int
    instance: str
    token: int
    held: bool
    extra: Extra = field(default_factory=_no_extra, compare=False)

    @property
    def rank(self) -> tuple[int, ...]:
        return (self.token, not self.held)


class Generation(NamedTuple):
    """A numbering of a hashed fleet's stream: the sequences that it counts for, and where it stands."""

    number: int
    partitions: int
    first: int = 0
    """The first sequence of this generation; 0: all that there is."""
    last: int | None = None
    """Nothing after this sequence is handled; None: no end."""
    every: bool = False
    """One partition for all numbers: messages of two numberings are mixed here."""
    retired: bool = False
    """Everything up to `last` is handled: its consumers are deleted next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTable:
    """Partitions that change while the fleet runs: subjects that were found, or generations of numbers."""

    version: int
    entries: tuple[Mapping[str, Any], ...] = ()
    """Of a source that is looked up: `{"subject": …, "weight": …, "label": …}`, the last two where they are given."""
    generations: tuple[Generation, ...] = ()
    """Of a hashed fleet: the one that is handled now, then those that wait for it. None: the spec's, as it began."""
    target: int = 0
    """The number of partitions that somebody asked for; 0: no change is wanted."""
    numbers: tuple[int, ...] = ()
    """Every number of partitions that the fleet has had or was asked for."""
    extra: Extra = field(default_factory=_no_extra, compare=False)

    @property
    def rank(self) -> tuple[int, ...]:
        return (self.version,)


class HandledBut(NamedTuple):
    """Of one partition: everything up to `upto` is handled, but these."""

    upto: int
    sequences: frozenset[int]

    def covers(self, sequence: int) -> bool:
        return sequence <= self.upto and sequence not in self.sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPositions:
    """How far partitions are handled, as one worker knows it. `worker` is the number in its key.

    A position is a fact that stays true: of several records the highest counts, whoever wrote it.
    """

    worker: int
    instance: str
    beat: int
    stream_created: str
    """Of which stream: one that was made again counts its sequences from 1."""
    positions: Mapping[str, int]
    """Partition -> all its messages up to this sequence of the stream are handled."""
    gaps: Mapping[str, HandledBut] = field(default_factory=dict)
    """Partition -> what is handled above its position, written where it was given away below a message that fails."""
    extra: Extra = field(default_factory=_no_extra, compare=False)

    @property
    def rank(self) -> tuple[int, ...]:
        return (self.beat,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedWorkers:
    """The workers that are to own nothing, because an operator said so. Holds for one instance: a restart ends it."""

    workers: Mapping[int, str]
    """Worker -> instance."""
    extra: Extra = field(default_factory=_no_extra, compare=False)

    @property
    def rank(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class PartitionMove:
    """Partitions that an assignment moved together. No worker: they had none before, or wait for one."""

    before: int | None
    after: int | None
    partitions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """An assignment as it is remembered: when and why it was written, and what it moved."""

    epoch: int
    version: int
    at_ms: int
    """Milliseconds since 1970, by the clock of the leader."""
    cause: str = ""
    reason: str = ""
    moves: tuple[PartitionMove, ...] = ()
    extra: Extra = field(default_factory=_no_extra, compare=False)

    @property
    def rank(self) -> tuple[int, ...]:
        return (self.epoch, self.version)


FleetRecord: TypeAlias = (
    FleetSpec
    | WorkerLease
    | LeaderLease
    | FleetAssignment
    | FleetClaim
    | PartitionTable
    | WorkerPositions
    | DrainedWorkers
    | HistoryEntry
)


def moves_between(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[PartitionMove, ...]:
    """What differs between two assignments of owners.

    >>> moves_between({"0": 1, "1": 1}, {"0": 2, "1": 1, "2": 1})
    (PartitionMove(before=None, after=1, partitions=('2',)), PartitionMove(before=1, after=2, partitions=('0',)))
    """
    found: dict[tuple[int, int], list[str]] = {}
    for partition in before.keys() | after.keys():
        pair = (before.get(partition, -1), after.get(partition, -1))
        if pair[0] != pair[1]:
            found.setdefault(pair, []).append(partition)
    return tuple(
        PartitionMove(had if had >= 0 else None, has if has >= 0 else None, tuple(sorted(moved)))
        for (had, has), moved in sorted(found.items())
    )


def digest_of(owners: Mapping[str, int]) -> str:
    """The same owners, the same digest, in any order.

    >>> digest_of({"0": 1, "1": 2}) == digest_of({"1": 2, "0": 1})
    True
    """
    text = json.dumps(sorted(owners.items()), separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


# ---- JSON --------------------------------------------------------------------------------------------------


class _Wrong(Exception):
    """What a field must be instead."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong("text")
    return value


def _some_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _Wrong("text of at least one character")
    return value


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise _Wrong("a whole number from 0 to 2^63 - 1")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise _Wrong("seconds, more than 0")
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("true or false")
    return value


def _state(value: Any) -> LeaseState:
    try:
        return LeaseState(value)
    except ValueError:
        raise _Wrong(f"one of {', '.join(LeaseState)}") from None


def _labels(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _Wrong("a list of texts")
    return tuple(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong("an object")
    return value


def _instances(value: Any) -> Mapping[int, str]:
    if not isinstance(value, dict) or not all(
        _NUMBER.fullmatch(key) and one and isinstance(one, str) for key, one in value.items()
    ):
        raise _Wrong('an object of instances by worker: {"0": "instance"}')
    return {int(key): one for key, one in value.items()}


def _positions(value: Any) -> Mapping[str, int]:
    if not isinstance(value, dict) or not all(_PARTITION.fullmatch(one) for one in value):
        raise _Wrong('an object of sequences by partition: {"0": 17}')
    return {partition: _number(one) for partition, one in value.items()}


def _gaps(value: Any) -> Mapping[str, HandledBut]:
    """From `{"3": [120, 101, 105]}`: up to 120, but not 101 and 105."""
    if not isinstance(value, dict) or not all(
        _PARTITION.fullmatch(partition) and isinstance(one, list) and one for partition, one in value.items()
    ):
        raise _Wrong('an object of lists of sequences by partition: {"0": [120, 101, 105]}')
    return {
        partition: HandledBut(_number(one[0]), frozenset(map(_number, one[1:]))) for partition, one in value.items()
    }


def _owners(value: Any) -> Mapping[str, int]:
    """From `{"3": [[0, 15], 18, "tool-1"]}`: ranges and single numbers, and partitions that have other names."""
    owners: dict[str, int] = {}
    if not isinstance(value, dict):
        raise _Wrong("an object of lists of partitions by worker")
    for key, listed in value.items():
        if not _NUMBER.fullmatch(key) or not isinstance(listed, list):
            raise _Wrong("an object of lists of partitions by worker")
        for partition in _named(listed):
            if partition in owners:
                raise _Wrong(f"one owner for each partition, and {partition} has two")
            owners[partition] = int(key)
    return owners


def _named(listed: list[Any]) -> Iterable[str]:
    for one in listed:
        match one:
            case bool():
                raise _Wrong("partitions as numbers, pairs of numbers, or names")
            case int() if one >= 0:
                yield str(one)
            case [int(first), int(last)] if 0 <= first <= last < first + 1_000_000:
                yield from map(str, range(first, last + 1))
            case str() if _PARTITION.fullmatch(one):
                yield one
            case _:
                raise _Wrong("partitions as numbers, pairs of numbers, or names")


def _moves(value: Any) -> tuple[PartitionMove, ...]:
    """From `[[1, 2, [[0, 15], 18]], [null, 1, ["tool-1"]]]`: from which worker to which, and what."""
    if not isinstance(value, list):
        raise _Wrong("a list of moves")
    moves = []
    for one in value:
        match one:
            case [int() | None as before, int() | None as after, [*listed]]:
                moves.append(PartitionMove(before, after, tuple(sorted(_named(listed)))))
            case _:
                raise _Wrong("a list of moves: the worker before, the worker after, and the partitions")
    return tuple(moves)


def _compact(owners: Mapping[str, int]) -> dict[str, list[Any]]:
    by_worker: dict[int, list[str]] = {}
    for partition, worker in owners.items():
        by_worker.setdefault(worker, []).append(partition)
    return {str(worker): _compact_list(listed) for worker, listed in sorted(by_worker.items())}


def _compact_list(partitions: Iterable[str]) -> list[Any]:
    numbers, names = [], []
    for partition in partitions:
        if _NUMBER.fullmatch(partition):
            numbers.append(int(partition))
        else:
            names.append(partition)
    return [*_ranges(sorted(numbers)), *sorted(names)]


def _ranges(numbers: list[int]) -> Iterable[int | list[int]]:
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            first, last = numbers[start], numbers[place - 1]
            yield first if first == last else [first, last]
            start = place


def _entries(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise _Wrong("a list of objects")
    return tuple(value)


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _Wrong("a list of whole numbers")
    return tuple(map(_number, value))


def _generations(value: Any) -> tuple[Generation, ...]:
    try:
        found = tuple(Generation(**one) for one in value)
    except TypeError:
        raise _Wrong("a list of generations") from None
    for one in found:
        for each in (one.number, one.partitions, one.first, one.last or 0):
            _number(each)
        _boolean(one.every), _boolean(one.retired)
    return found


_Fields: TypeAlias = Mapping[str, Callable[[Any], Any]]

_FIELDS: dict[type, _Fields] = {
    FleetSpec: {
        "source": _mapping,
        "prefix": _some_text,
        "pool": _number,
        "lease_s": _seconds,
        "layout": _some_text,
        "acks": _some_text,
        "state": _some_text,
    },
    WorkerLease: {
        "instance": _some_text,
        "taken": _number,
        "beat": _number,
        "state": _state,
        "name": _text,
        "host": _text,
        "labels": _labels,
        "ended_ms": _number,
        "highest_token": _number,
        "highest_version": _number,
        "highest_epoch": _number,
        "table": _number,
        "successors": _owners,
        "trouble": _text,
    },
    LeaderLease: {
        "worker": _number,
        "instance": _some_text,
        "epoch": _number,
        "beat": _number,
        "version": _number,
        "state": _state,
    },
    FleetAssignment: {
        "epoch": _number,
        "version": _number,
        "owners": _owners,
        "workers": _instances,
        "reason": _text,
    },
    DrainedWorkers: {"workers": _instances},
    HistoryEntry: {
        "epoch": _number,
        "version": _number,
        "at_ms": _number,
        "cause": _text,
        "reason": _text,
        "moves": _moves,
    },
    FleetClaim: {
        "worker": _number,
        "instance": _some_text,
        "token": _number,
        "held": _boolean,
    },
    PartitionTable: {
        "version": _number,
        "entries": _entries,
        "generations": _generations,
        "target": _number,
        "numbers": _numbers,
    },
    WorkerPositions: {
        "instance": _some_text,
        "beat": _number,
        "stream_created": _some_text,
        "positions": _positions,
        "gaps": _gaps,
    },
}

_REQUIRED: dict[type, frozenset[str]] = {
    FleetSpec: frozenset(_FIELDS[FleetSpec]),
    WorkerLease: frozenset({"instance", "taken", "beat", "state"}),
    LeaderLease: frozenset({"worker", "instance", "epoch", "beat", "state"}),
    FleetAssignment: frozenset({"epoch", "version", "owners", "workers"}),
    DrainedWorkers: frozenset({"workers"}),
    HistoryEntry: frozenset({"epoch", "version", "at_ms"}),
    FleetClaim: frozenset(_FIELDS[FleetClaim]),
    PartitionTable: frozenset({"version"}),
    WorkerPositions: frozenset({"instance", "beat", "stream_created", "positions"}),
}
"""A field that a later version adds to this list must have a default here for records of an earlier one."""


def key_of(record: FleetRecord) -> str:  # noqa: PLR0911 - one for each record
    match record:
        case FleetSpec():
            return SPEC
        case WorkerLease():
            return worker_key(record.worker)
        case LeaderLease():
            return LEADER
        case FleetAssignment():
            return ASSIGNMENT
        case FleetClaim():
            return claim_key(record.partition)
        case PartitionTable():
            return TABLE
        case WorkerPositions():
            return position_key(record.worker)
        case DrainedWorkers():
            return DRAINS
        case HistoryEntry():
            return history_key(record.version)


def to_json(record: FleetRecord) -> bytes:
    """The bytes to store under `key_of(record)`."""
    content = {**record.extra, **{name: getattr(record, name) for name in _FIELDS[type(record)]}}
    if isinstance(record, FleetAssignment):
        content["owners"] = _compact(record.owners)
        content["digest"] = record.digest
    elif isinstance(record, PartitionTable):
        content["generations"] = [one._asdict() for one in record.generations]
    elif isinstance(record, WorkerLease):
        content["successors"] = _compact(record.successors)
    elif isinstance(record, WorkerPositions):
        content["gaps"] = {name: [one.upto, *sorted(one.sequences)] for name, one in record.gaps.items()}
    elif isinstance(record, HistoryEntry):
        content["moves"] = [[one.before, one.after, _compact_list(one.partitions)] for one in record.moves]
    return json.dumps(content, separators=(",", ":")).encode()


@lru_cache(maxsize=512)  # what a hint announced is read a moment later
def from_json(key: str, value: bytes) -> FleetRecord:  # noqa: PLR0911 - one for each record
    """The record that is stored under a key, or `BrokenFleetRecord`.

    >>> claim = FleetClaim(partition="3", worker=1, instance="a", token=7, held=True)
    >>> from_json("claim.3", to_json(claim)) == claim
    True
    """
    if key == SPEC:
        return read_spec(value)
    if key == LEADER:
        return _read(LeaderLease, key, value, {})
    if key == ASSIGNMENT:
        return _read_assignment(value)
    if key == TABLE:
        return _read(PartitionTable, key, value, {})
    if (worker := worker_of(key)) is not None:
        return _read(WorkerLease, key, value, {"worker": worker})
    if (partition := partition_of(key)) is not None:
        return _read(FleetClaim, key, value, {"partition": partition})
    if (found := _POSITION_KEY.fullmatch(key)) is not None:
        return _read(WorkerPositions, key, value, {"worker": int(found[1])})
    if key == DRAINS:
        return _read(DrainedWorkers, key, value, {})
    if _HISTORY_KEY.fullmatch(key) is not None:
        return _read(HistoryEntry, key, value, {})
    raise BrokenFleetRecord(f"fleet record {shown(key)}: there is no record of this name; delete the key")


def read_spec(value: bytes) -> FleetSpec:
    return _read(FleetSpec, SPEC, value, {})


def _read_assignment(value: bytes) -> FleetAssignment:
    record = _read(FleetAssignment, ASSIGNMENT, value, {})
    stated = record.extra.get("digest")
    if stated != record.digest:
        raise BrokenFleetRecord(
            f"fleet record {ASSIGNMENT}: its digest is {shown(stated)} and its owners have {record.digest}: somebody "
            "changed one without the other; delete the key, and the leader writes it again"
        )
    return record


R = TypeVar(
    "R",
    FleetSpec,
    WorkerLease,
    LeaderLease,
    FleetAssignment,
    FleetClaim,
    PartitionTable,
    WorkerPositions,
    DrainedWorkers,
    HistoryEntry,
)


def _read(kind: type[R], key: str, value: bytes, given: Mapping[str, Any]) -> R:
    try:
        content = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BrokenFleetRecord(f"fleet record {shown(key)} is not JSON ({error}): delete the key") from None
    if not isinstance(content, dict):
        raise BrokenFleetRecord(f"fleet record {shown(key)} is {shown(content)}, not a JSON object: delete the key")
    if missing := sorted(_REQUIRED[kind] - content.keys()):
        raise BrokenFleetRecord(f"fleet record {shown(key)} lacks {', '.join(missing)}: delete the key")
    fields = _FIELDS[kind]
    known: dict[str, Any] = dict(given)
    extra: dict[str, Any] = {}
    for name, one in content.items():
        check = fields.get(name)
        if check is None:
            extra[name] = one
            continue
        try:
            known[name] = check(one)
        except _Wrong as wrong:
            raise BrokenFleetRecord(
                f"fleet record {shown(key)}: {name} is {shown(one)}, and must be {wrong}; delete the key"
            ) from None
    return kind(**known, extra=extra)
