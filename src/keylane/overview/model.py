"""What an overview says of an account, its groups, their members and partitions. What is unknown is None, never 0."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Literal

from keylane.core.group_summary import GroupFacts, Standing, standing, summary

OverviewKind = Literal["static", "elastic", "fleet", "marshal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOverview:
    """A partition of a group: who handles it, and what waits in it."""

    id: str
    assigned: str | None
    """The member or worker that is to handle it."""
    owner: str | None
    """The one that does now; None: nobody."""
    lag: int | None
    """Messages that are not handled."""
    lag_s: float | None
    """The age of the oldest of them; 0: there is none."""
    in_flight: int | None = None
    """Delivered and not acked. Known where the partition has a consumer of its own."""
    token: int | None = None
    """The fencing token of its owner, where it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOverview:
    """A member of a group, a worker of a fleet, or a Marshal consumer."""

    name: str
    state: str
    """Of a member: `active` (an instance is pinned), `waiting` (for its first message), `absent` or `leaving`. Of a
    worker that of its lease: `live` or `leaving`."""
    is_active: bool
    """Whether an instance of it is at work now, or ready to be."""
    partitions: tuple[str, ...]
    """Those that it is to handle; of a worker those that it owns."""
    consumer: str | None = None
    pin: str | None = None
    """The id of the active instance, as the server gave it."""
    pinned_since: datetime | None = None
    host: str | None = None
    pid: int | None = None
    standbys: int | None = None
    """Other instances that wait. Known of members that were asked and answered."""
    lag: int | None = None
    lag_s: float | None = None
    in_flight: int | None = None
    max_in_flight: int | None = None
    """What its consumer may have in flight; None: no such limit."""
    redelivered: int | None = None
    is_paused: bool = False
    is_leader: bool = False
    is_drained: bool = False
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOverview:
    """The work queue of an elastic group. A limit of None is none."""

    stream: str
    messages: int
    bytes: int
    max_messages: int | None
    max_bytes: int | None
    source_lag: int
    """Roughly how many messages of the source are not copied yet, as the server counts them."""

    @property
    def fill(self) -> float | None:
        """How full it is, 0 to 1; None without a limit."""
        pairs = ((self.messages, self.max_messages), (self.bytes, self.max_bytes))
        return max((min(held / limit, 1.0) for held, limit in pairs if limit), default=None)


@dataclass(frozen=True, kw_only=True)
class GroupOverview:
    """A group, a fleet, or a group of Marshal consumers, as it stands now."""

    kind: OverviewKind
    stream: str
    name: str
    members: tuple[MemberOverview, ...] = ()
    partitions: tuple[PartitionOverview, ...] = ()
    queue: QueueOverview | None = None
    """Of an elastic group."""
    lag: int | None = None
    lag_s: float | None = None
    """The age of the oldest message that is not handled; 0: there is none."""
    in_flight: int | None = None
    redelivered: int | None = None
    """Messages that were delivered again and are not acked yet."""
    dead_letters: int | None = None
    """Messages that the group gave up, without those of parked keys."""
    parked_keys: int | None = None
    parked_messages: int | None = None
    is_paused: bool = False
    change: str | None = None
    """Where a change of the number of a fleet's partitions stands; None: there is none."""
    problem: str | None = None
    """Why it, or a part of it, cannot be read; None: nothing is wrong."""

    @property
    def active(self) -> tuple[MemberOverview, ...]:
        """The members that are at work."""
        return tuple(one for one in self.members if one.is_active)

    @cached_property
    def unowned(self) -> tuple[str, ...]:
        """The partitions that nobody handles now."""
        return tuple(one.id for one in self.partitions if one.owner is None)

    @property
    def summary(self) -> str:
        """One sentence: `billing keeps up: 3 members, lag 12, 0.4 s`."""
        return summary(self._facts)

    @property
    def standing(self) -> Standing:
        """The verdict of that sentence, as one word."""
        return standing(self._facts)

    @property
    def _facts(self) -> GroupFacts:
        return GroupFacts(
            self.name,
            members=len(self.members),
            active=len(self.active),
            partitions=len(self.partitions),
            unowned=len(self.unowned),
            lag=self.lag,
            lag_s=self.lag_s,
            dead_letters=self.dead_letters,
            parked_keys=self.parked_keys,
            is_paused=self.is_paused,
            problem=self.problem,
            member_word={"fleet": "worker", "marshal": "consumer"}.get(self.kind, "member"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOverview:
    """A stream of the account, with everything that keylane keeps in streams."""

    name: str
    messages: int
    bytes: int
    first_sequence: int
    last_sequence: int
    consumers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountOverview:
    """Every group of an account, as it stood at one time."""

    read_at: datetime
    groups: tuple[GroupOverview, ...]
    """By stream and name."""
    streams: tuple[StreamOverview, ...]

    def group(self, stream: str, name: str) -> GroupOverview | None:
        """The group of this name; None: there is none. A static one comes before an elastic one."""
        return next((one for one in self.groups if (one.stream, one.name) == (stream, name)), None)
