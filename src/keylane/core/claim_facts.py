"""The value types of a coordination log: records, claims, verdicts, pauses, and the history of owners.

`core/claim_rules.py` and `World` in `core/world.py` make these values from the log. Times are the log's, in
milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from typing import NamedTuple

from keylane.core.claim_records import Unreadable


class LogRecord(NamedTuple):
    """One record of the log. `time_ms` is the broker's timestamp, never the writer's."""

    partition: int
    offset: int
    time_ms: int
    value: bytes
    subject: str | None = None
    """In a log with a subject for each key: the subject, as `core/claim_records.py` writes it."""


class Key(NamedTuple):
    """What one consumer of a group can own: a partition of a topic."""

    group: str
    topic: str
    partition: int


class Owner(NamedTuple):
    client: str
    instance: str


class Verdict(Enum):
    """The effect of one record. Judged once, at the record's own offset; nothing later changes it."""

    WON = "won"
    """A claim: its writer owns the partition from here on."""
    LOST = "lost"
    """A claim: somebody else owned the partition here."""
    PAUSED = "paused"
    """A claim: its group was paused here."""
    UNSURE = "unsure"
    """Records expired shortly before, and an earlier owner may be alive. Its next heartbeat will show."""
    COUNTED = "counted"
    """A heartbeat, a release or a claim of messages by the owner; a pause or its end."""
    IGNORED = "ignored"
    """Its writer does not own the partition, or it claims messages that are already taken."""
    UNREADABLE = "unreadable"
    """It is none of the five messages, or on the subject of another key: counted, and skipped."""
    MISPLACED = "misplaced"
    """It is in a partition of the log where the hash does not put it."""
    REPEATED = "repeated"
    """The log was already read beyond it."""


class Freshness(Enum):
    """How long ago the owner's last heartbeat was: less than one interval, up to two, or more than two."""

    FRESH = "fresh"
    UNKNOWN = "unknown"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class MessageClaim:
    """The owner took the messages before `proposed`, by the record at offset `at`."""

    at: int
    proposed: int
    token: int


@dataclass(frozen=True, slots=True)
class Release:
    """The last release: by whom, at which record, when, and where the next owner continues."""

    owner: Owner
    at: int
    time_ms: int
    offset: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """A claim that lost, in record `at`: its writer is alive and wants a partition that somebody else owns."""

    owner: Owner
    at: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Everything that the log says about one key. Whether the claim holds depends on the log's time.

    `token` is the offset of the record that made the owner the owner, and serves as a fencing token: it only grows, so
    it distinguishes writes of an earlier owner from those of the current one.
    """

    key: Key
    log_partition: int
    owner: Owner | None
    """The last owner, even if its claim has expired; None after a release."""
    token: int | None
    since_ms: int | None
    heartbeat_ms: int | None
    """The log's time at the owner's last heartbeat, or at its claim if that is younger."""
    heartbeat_at: int | None
    """The offset of that record."""
    fresh_until_ms: int | None
    holds_until_ms: int | None
    offset: int | None
    """The next message to read, by the last heartbeat or release; None if neither was seen."""
    messages: MessageClaim | None
    """Messages taken and not yet confirmed by a heartbeat."""
    released: Release | None
    requests: tuple[Request, ...] = ()
    """Claims that lost to this owner; after a release, those that had lost to the last one."""

    def holds(self, now_ms: int) -> bool:
        """Whether nobody else can win this key now."""
        return self.holds_until_ms is not None and now_ms <= self.holds_until_ms

    def freshness(self, now_ms: int) -> Freshness | None:
        """None: nobody owns it."""
        if self.fresh_until_ms is None or self.holds_until_ms is None:
            return None
        if now_ms < self.fresh_until_ms:
            return Freshness.FRESH
        return Freshness.UNKNOWN if now_ms <= self.holds_until_ms else Freshness.STALE

    def is_held_by(self, owner: Owner, token: int, now_ms: int) -> bool:
        """Whether this very claim of this owner still holds: check it before you act as the owner."""
        return self.owner == owner and self.token == token and self.holds(now_ms)

    def messages_stand(self, owner: Owner, token: int, at: int, now_ms: int) -> bool:
        """At most once: the claim of messages in record `at` exists and counts, and the partition is still ours.

        Read the log to its end first. Then confirm with a heartbeat, then work on the messages.
        """
        taken = self.messages
        return taken is not None and taken.at == at and taken.token == token and self.is_held_by(owner, token, now_ms)

    @property
    def resume_at_most_once(self) -> int | None:
        """The next message that nobody has taken."""
        return self.messages.proposed if self.messages is not None else self.offset


@dataclass(frozen=True, slots=True)
class Pause:
    """A group is paused until the log's time reaches `until_ms`. `by` may claim meanwhile, to set offsets."""

    group: str
    log_partition: int
    until_ms: int
    by: Owner
    at: int
    since_ms: int


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A record in a partition of the log where the hash in use does not put it: somebody uses another hash."""

    log_partition: int
    at: int
    key: Key
    writer: Owner
    expected: int
    fits_other_hash: bool
    time_ms: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A record that was skipped, and where it is."""

    log_partition: int
    at: int
    unreadable: Unreadable


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable copy of a `World`.

    `now_ms` and `ends` have one number for each partition of the log: its time, and the offset after its last record.
    """

    claims: Mapping[Key, Claim]
    pauses: tuple[Pause, ...]
    now_ms: tuple[int, ...]
    ends: tuple[int, ...]
    unreadable: int
    misplaced: int

    def freshness(self, key: Key) -> Freshness | None:
        claim = self.claims.get(key)
        return None if claim is None else claim.freshness(self.now_ms[claim.log_partition])

    def holds(self, key: Key) -> bool:
        claim = self.claims.get(key)
        return claim is not None and claim.holds(self.now_ms[claim.log_partition])


# ---- who owned what, when ---------------------------------------------------------------------------


class Began(Enum):
    CLAIM = "claim"
    RECLAIM = "reclaim"
    """A new instance of the same client took over, by a heartbeat."""
    REVIVAL = "revival"
    """The claim had expired, nobody had taken it, and the owner's heartbeat came late."""
    FIRST_HEARTBEAT = "first_heartbeat"
    """The record of the claim has expired."""


class Ended(Enum):
    RELEASED = "released"
    TAKEN = "taken"
    """The claim expired, and later somebody else won the partition."""
    RECLAIMED = "reclaimed"
    LAPSED = "lapsed"
    """The claim expired, and later the owner's late heartbeat revived it."""


@dataclass(frozen=True, slots=True)
class Tenure:
    """One owner's time with a key: from a record to a record, and in the log's time.

    `until_ms` is the last moment at which it held, which is before the record `until` if the claim expired. For a
    tenure that has not ended, `until` and `ended` are None and `until_ms` is when the claim will expire.
    """

    key: Key
    log_partition: int
    owner: Owner
    token: int
    since: int
    since_ms: int
    began: Began
    until: int | None
    until_ms: int
    ended: Ended | None


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which nobody held a key, between two tenures."""

    key: Key
    from_ms: int
    to_ms: int
    after: Ended


def gaps(tenures: Iterable[Tenure]) -> Iterator[Gap]:
    """The times in which nobody held a key between two tenures, in the order of keys and time."""
    for before, after in _neighbours(tenures):
        if after.since_ms > before.until_ms:
            assert before.ended is not None, before
            yield Gap(before.key, before.until_ms, after.since_ms, before.ended)


def overlaps(tenures: Iterable[Tenure]) -> Iterator[tuple[Tenure, Tenure]]:
    """Tenures that held one key at the same time. The rules make this impossible; an audit checks it anyway."""
    for before, after in _neighbours(tenures):
        if before.until is None or before.until > after.since or before.until_ms > after.since_ms:
            yield before, after


def _neighbours(tenures: Iterable[Tenure]) -> Iterator[tuple[Tenure, Tenure]]:
    ordered = sorted(tenures, key=lambda tenure: (tenure.key, tenure.since))
    for _, of_key in groupby(ordered, key=lambda tenure: tenure.key):
        yield from pairwise(of_key)
