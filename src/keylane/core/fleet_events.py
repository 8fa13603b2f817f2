"""What a fleet worker is told and what it asks for: the events and actions of `core/fleet_worker.py`.

The contract of whoever performs the actions:
- Every `ReadRecords` is answered by one `RecordsRead` or `ReadFailed`, every `WriteRecord` by one `WriteConfirmed`,
  `WriteConflict` or `WriteUnknown`, within a deadline (lease_s / 3 is a good one). A timeout, a lost link and an error
  that does not say that nothing was written are all `WriteUnknown`: the write may land later.
- Keys are relative: `worker.3` is stored as `<stream>.<fleet>.worker.3`. `worker.*` asks for all keys of this form.
- Reads may be stale (any replica may answer). Writes are compare-and-set on the revision of the key; 0: no record.
- Actions on one partition are performed in their order. `DrainPartition` is answered by `PartitionDrained`,
  `StopEverything` by `HandlersEnded`; the others have no answer and are tried until they succeed.
- Hints may be lost, come late, or tell of a write that was refused. Subscribe to the keys of the fleet.
- `now` is a clock in seconds that also runs while the machine sleeps (CLOCK_BOOTTIME).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import NamedTuple, TypeAlias

from keylane.core.fleet_records import FleetRecord

# ---- events ------------------------------------------------------------------------------------------------


class RecordEntry(NamedTuple):
    """A key's newest record. `value` is None where the key was deleted: its revision still counts."""

    revision: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class RecordsRead:
    """The answer to a read. A key that was asked for and is not in `entries` does not exist."""

    asked: tuple[str, ...]
    entries: Mapping[str, RecordEntry]
    created: str
    """When the bucket was created, as the server says it."""


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """No answer: the store does not answer, or there is no bucket."""

    asked: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteConfirmed:
    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class WriteConflict:
    """The key's newest revision was another one: nothing was written, and nothing will be."""

    key: str


@dataclass(frozen=True, slots=True)
class WriteUnknown:
    """It may have been written, it may still be, or never."""

    key: str


@dataclass(frozen=True, slots=True)
class RecordHint:
    """Somebody wrote, or tried to write, this key."""

    key: str
    value: bytes | None = None


@dataclass(frozen=True, slots=True)
class PartitionDrained:
    """Nothing of the partition runs, and the server has confirmed its acks."""

    partition: str


@dataclass(frozen=True, slots=True)
class PartitionPinned:
    """The first message of the partition came under a pin of this worker."""

    partition: str


@dataclass(frozen=True, slots=True)
class PartitionUnpinned:
    """The server has refused the pin of this worker."""

    partition: str


@dataclass(frozen=True, slots=True)
class TableFollowed:
    """The partition table is in force here, in every reader: the lease says so from now on."""

    version: int
    opened: frozenset[str] | None = None
    """Only these partitions may be owned now, whatever is assigned; None: all."""


class FleetSignal(Enum):
    """Events that say all by their name."""

    TIMER = auto()
    """The time of the last `SetTimer` has come. More of them do no harm."""
    STOP = auto()
    """The worker is asked to leave: partitions are drained and released first."""
    HANDLERS_ENDED = auto()
    """After `StopEverything`: nothing runs any more."""


FleetEvent: TypeAlias = (
    RecordsRead
    | ReadFailed
    | WriteConfirmed
    | WriteConflict
    | WriteUnknown
    | RecordHint
    | PartitionDrained
    | PartitionPinned
    | PartitionUnpinned
    | TableFollowed
    | FleetSignal
)


# ---- actions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadRecords:
    """-> RecordsRead, ReadFailed"""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Write `to_json(record)` if the key's newest revision is still this one. -> WriteConfirmed, …Conflict, …Unknown"""

    key: str
    revision: int
    record: FleetRecord


@dataclass(frozen=True, slots=True)
class OpenPartition:
    """Pull the partition as a standby. Nothing of it may be handled yet; what arrives waits."""

    partition: str


@dataclass(frozen=True, slots=True)
class StartPartition:
    """Handle the partition with this token. Ask `FleetWorker.token_of` before every start of a message.

    `force`: the owner before is gone without a release. Clear its pin, whoever has it unless it is ours, and start
    nothing until `pin_trust_s` after the server has confirmed that.
    """

    partition: str
    token: int
    force: bool = False


@dataclass(frozen=True, slots=True)
class ChangeToken:
    """Go on with the partition under this token: what starts from now on has it."""

    partition: str
    token: int


@dataclass(frozen=True, slots=True)
class UnpinPartition:
    """No message came yet, or the pin was refused: clear the pin of whoever has it, unless it is ours. It handles
    nothing: it has released the claim, or `StartPartition` has waited for it."""

    partition: str


@dataclass(frozen=True, slots=True)
class DrainPartition:
    """Start nothing more, finish what runs, have its acks confirmed. -> PartitionDrained

    `lost`: another worker owns it by now; acks are sent but nobody waits for them, and retries end.
    """

    partition: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class ClosePartition:
    """Stop pulling, and give the pin back if it is ours."""

    partition: str


@dataclass(frozen=True, slots=True)
class StopEverything:
    """The lease is lost. Start nothing, drop what has not begun, close every partition. -> HANDLERS_ENDED"""

    why: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send `FleetSignal.TIMER` at this time. Replaces the timer before."""

    at: float


class WorkerState(StrEnum):
    """What a worker of a fleet is doing. `ReportState.waiting_for` says what it waits for, where it waits."""

    JOINING = "joining"
    ACTIVE = "active"
    LEADING = "leading"
    """Active, and the leader of the fleet."""
    RECOVERING = "degraded: recovering"
    """The store lost records. Everything goes on as it was last assigned; nothing moves until the others had time to
    write theirs again."""
    UNREACHABLE = "degraded: store unreachable"
    """The lease could not be renewed in time. What is owned goes on, as long as the server confirms its pins."""
    FENCED = "fenced"
    """The lease is lost: handlers end, then the worker joins again."""
    STOPPING = "stopping"
    ENDED = "ended"

    @property
    def is_degraded(self) -> bool:
        return self in (WorkerState.RECOVERING, WorkerState.UNREACHABLE, WorkerState.FENCED)


@dataclass(frozen=True, slots=True)
class ReportState:
    """The state has changed."""

    state: WorkerState
    waiting_for: str | None = None


@dataclass(frozen=True, slots=True)
class SpecRefused:
    """This fleet exists with another spec, or its spec cannot be read. The worker has not joined and does not go on."""

    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """Everything is over. Not `orderly`: the store did not take the end of the lease; it expires."""

    orderly: bool = field(default=True)


FleetAction: TypeAlias = (
    ReadRecords
    | WriteRecord
    | OpenPartition
    | StartPartition
    | ChangeToken
    | UnpinPartition
    | DrainPartition
    | ClosePartition
    | StopEverything
    | SetTimer
    | ReportState
    | SpecRefused
    | WorkerEnded
)
