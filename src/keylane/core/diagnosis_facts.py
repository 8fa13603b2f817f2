"""What `keylane doctor` knows of a server and its groups, as values: facts in, findings out (`diagnosis_rules`).

Owns the values. What could not be looked at is in `unread` and `unchecked`, never a default that looks fine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from keylane.core.partitions import Partitioning
from keylane.core.plans import Plan

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that an operator should know: what, why it matters, and the command that fixes it."""

    rule: str
    severity: Severity
    """`error`: messages are lost, stuck or out of order. `warning`: they will be. `note`: no action is needed."""
    where: str
    """`server`, a stream, or `STREAM/GROUP`."""
    what: str
    why: str
    fix: str
    issue: str | None = None
    """The address of the thread in the server's tracker."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A subject that this user may not use."""

    subject: str
    text: str
    """In words: who may not do what, and what it is needed for."""


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A check that could not be made."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedServer:
    """The server that the connection is to."""

    version: tuple[int, int, int]
    is_clustered: bool = False
    missing_features: tuple[str, ...] = ()
    clock_ahead_s: float | None = None
    """How much the server's clock is ahead of this machine's; None: unknown."""
    clock_error_s: float = 0.0
    """Half of the round trip: it may be that much more or less."""
    sync_s: Mapping[str, float] | None = None
    """Server -> seconds between two syncs to disk, 0: every write is synced; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedStream:
    """A stream, as its configuration and its state say."""

    name: str
    subjects: tuple[str, ...] = ()
    transform: tuple[str, str] | None = None
    numbering: Partitioning | None = None
    """How it numbers its subjects; None: it does not, or nobody can tell (`transform_problem`)."""
    transform_problem: str | None = None
    carries_numbers: bool | None = None
    """Whether stored subjects can begin with a partition number; None: only its messages can tell."""
    sources: tuple[str, ...] = ()
    source_numberings: tuple[tuple[str, str], ...] = ()
    """The transforms of its sources: filter, destination."""
    retention: str = "limits"
    storage: str = "file"
    replicas: int = 1
    discard: str = "old"
    max_messages: int = -1
    max_bytes: int = -1
    max_age_s: float = 0.0
    max_per_subject: int = -1
    duplicate_window_s: float = 120.0
    max_consumers: int = -1
    consumers: int = 0
    messages: int = 0
    bytes: int = 0
    distinct_subjects: int = 0
    allows_rollup: bool = False
    allows_schedules: bool = False
    is_async: bool = False
    """`persist_mode: async`."""
    fleet_copy_of: str | None = None
    """`STREAM/FLEET`, if it is marked as a fleet's copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedConsumer:
    """A consumer of a stream that somebody reads with keylane."""

    stream: str
    name: str
    filters: tuple[str, ...] = ()
    pin_group: str | None = None
    """Its priority group, if it is pinned: `PCG` in groups, `fleet` in fleets."""
    pin_timeout_s: float = 0.0
    is_pinned: bool = False
    waiting: int = 0
    pending: int = 0
    ack_pending: int = 0
    redelivered: int = 0
    ack_wait_s: float = 30.0
    replicas: int = 0
    """0: as the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedGroup:
    """A static or an elastic group, as its record says."""

    stream: str
    group: str
    kind: Literal["static", "elastic"]
    problem: str | None = None
    """Why the record cannot be read; then nothing else is known."""
    partitions: int = 0
    filters: tuple[str, ...] = ()
    transforms: tuple[tuple[str, str], ...] = ()
    """Elastic: what its queue should copy, as filter and destination."""
    plan: Plan = field(default_factory=lambda: Plan({}))

    @property
    def where(self) -> str:
        return f"{self.stream}/{self.group}"

    @property
    def reads(self) -> str:
        """The stream that its consumers are on."""
        return f"{self.stream}-{self.group}" if self.kind == "elastic" else self.stream

    def consumer(self, member: str) -> str:
        return f"{self.group}-{member}" if self.kind == "static" else member


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedFleet:
    """A fleet, as its records say."""

    stream: str
    fleet: str
    problem: str | None = None
    layout: str = "partition"
    is_replicated: bool = True
    """Whether its consumers are kept by as many servers as the stream."""
    reads: str = ""
    """The stream that its consumers are on: the stream, or the fleet's copy of it."""
    numbers: int | None = None
    """How many partitions, where they are numbers; None: they are subjects."""
    partitions: tuple[str, ...] = ()
    consumers: frozenset[str] = frozenset()
    """The consumers that its partitions need, in layout `partition`."""
    owned: frozenset[str] = frozenset()
    workers: frozenset[int] = frozenset()
    """The numbers of the workers that hold a lease."""
    lease_s: float = 3.0
    emergencies: int = 0
    """Assignments of the last ten minutes that were written because a worker or the leader was lost."""
    is_changing: bool = False

    @property
    def where(self) -> str:
        return f"{self.stream}/{self.fleet}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """All that was found out."""

    server: DiagnosedServer
    streams: Mapping[str, DiagnosedStream] = field(default_factory=dict)
    consumers: Mapping[str, tuple[DiagnosedConsumer, ...]] = field(default_factory=dict)
    """By stream. A stream that is missing here was not looked at."""
    groups: tuple[DiagnosedGroup, ...] = ()
    fleets: tuple[DiagnosedFleet, ...] = ()
    pin_timeouts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(stream, consumer) -> how often its pin timed out while we watched."""
    watched_s: float = 0.0
    unread: tuple[Unread, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()
    others: tuple[Finding, ...] = ()
    """What other parts found: Spark, Java and Delta."""
