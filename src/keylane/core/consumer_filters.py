"""The filters of a worker's consumer: which change comes next, when, and when a failure is one for the leader.

Theory of operation. A worker has one durable consumer whose filters are its partitions. They change while it is read.
The state knows what is wanted and what the server has; `next_change` compares the two and returns one step:

| the server has | wanted | step |
| --- | --- | --- |
| unknown: an earlier run of this worker may have left it | any | delete it |
| a filter that is not wanted | others remain | narrow; then release what was delivered of it |
| | nothing remains | delete: an empty list of filters would mean the whole stream |
| nothing | something | create; then admit its filters |
| less than wanted | | widen; then admit the new filters |
| what is wanted | | none |

Removals come before additions, always: two workers that swap partitions in one step would refuse each other's change.
To *admit* a filter is to have its older messages delivered first, as adding a filter does not go back in the stream: a
work queue is rewound; on a stream with limits the partition is read up to the end of the stream by other means.

Changes are coalesced: what is wanted while one is under way, or within `min_interval_s` after the last, goes into the
next. A change that failed leaves everything as it was and is tried again later; a removal does not wait for an addition
that fails. Only the filters ever change (`with_filters`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from keylane.errors import SubjectCapExceeded

Filters: TypeAlias = frozenset[str]

SUBJECT_CAP = 500
_NO_FILTERS: Filters = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePace:
    """How often a consumer is changed."""

    min_interval_s: float = 0.25
    first_retry_s: float = 0.05
    longest_retry_s: float = 5.0
    longest_taken_s: float = 0.25
    """While another consumer still has one of the filters."""
    escalate_after_s: float = 5.0


@dataclass(frozen=True, slots=True)
class DeleteConsumer:
    """No filter is left, or it is not known what an earlier run has left."""


@dataclass(frozen=True, slots=True)
class CreateConsumer:
    filters: Filters


@dataclass(frozen=True, slots=True)
class NarrowFilters:
    filters: Filters


@dataclass(frozen=True, slots=True)
class WidenFilters:
    filters: Filters


@dataclass(frozen=True, slots=True)
class ReleaseMessages:
    """Have the server forget what it delivered of filters that were removed."""


@dataclass(frozen=True, slots=True)
class AdmitFilters:
    """Have the older messages of these filters delivered."""

    filters: Filters


@dataclass(frozen=True, slots=True)
class ChangeLater:
    """Nothing before this time."""

    at: float


FilterChange: TypeAlias = (
    DeleteConsumer | CreateConsumer | NarrowFilters | WidenFilters | ReleaseMessages | AdmitFilters
)


@dataclass(slots=True)
class ConsumerFilters:
    """The filters of one consumer. Mutable; stepped by its only writer."""

    pace: UpdatePace = field(default_factory=UpdatePace)
    wanted: Filters = _NO_FILTERS
    present: Filters | None = None
    """What the server has, as the last answer said; None: unknown."""
    admitted: Filters = _NO_FILTERS
    skipped: int = 0
    """How often nothing was to change."""
    changes: int = 0
    failures: int = 0
    """Of one change, in a row."""
    _releases: bool = False
    _not_before: float = 0.0
    _failed: FilterChange | None = None
    _failing_since: float = 0.0
    _escalated: bool = False

    def want(self, filters: Iterable[str]) -> bool:
        """Whether that is something else than what was wanted before."""
        wanted = frozenset(filters)
        if wanted == self.wanted:
            self.skipped += 1
            return False
        self.wanted = wanted
        return True

    @property
    def is_settled(self) -> bool:
        return self.present == self.wanted == self.admitted and not self._releases

    def next_change(self, now: float) -> FilterChange | ChangeLater | None:
        change = self._due()
        if change is None:
            return None
        is_paced = not isinstance(change, ReleaseMessages | AdmitFilters)
        if now < self._not_before and (change == self._failed or (is_paced and self._failed is None)):
            return ChangeLater(self._not_before)
        return change

    def _due(self) -> FilterChange | None:  # noqa: PLR0911 - a line of the table each
        if self.present is None:
            return DeleteConsumer()
        if not self.present:
            return CreateConsumer(self.wanted) if self.wanted else None
        kept = self.present & self.wanted
        if kept != self.present:
            return NarrowFilters(kept) if kept else DeleteConsumer()
        if self._releases:
            return ReleaseMessages()
        if self.wanted - self.present:
            return WidenFilters(self.wanted)
        if self.present - self.admitted:
            return AdmitFilters(self.present - self.admitted)
        return None

    def succeeded(self, change: FilterChange, now: float) -> None:
        """The server has done it."""
        match change:
            case DeleteConsumer():
                self.present = self.admitted = _NO_FILTERS
                self._releases = False
            case CreateConsumer(filters):
                self.present, self.admitted = filters, _NO_FILTERS
            case NarrowFilters(filters):
                self.present = filters
                self.admitted &= filters
                self._releases = True
            case WidenFilters(filters):
                self.present = filters
            case ReleaseMessages():
                self._releases = False
            case AdmitFilters(filters):
                self.admitted |= filters
        self._failed, self.failures, self._escalated = None, 0, False
        if isinstance(change, ReleaseMessages | AdmitFilters):
            return
        self.changes += 1
        assert self.present is not None
        if isinstance(change, CreateConsumer | WidenFilters) or self.wanted <= self.present:
            self._not_before = now + self.pace.min_interval_s  # not between a removal and the addition of the same swap

    def failed(self, change: FilterChange, now: float, *, jitter: float, taken: bool = False) -> bool:
        """It failed, or its outcome is unknown; returns whether the leader is to be told now.

        `jitter`: from 0 to 1. `taken`: another consumer has one of the filters.
        """
        if self._failed != change:
            self._failed, self.failures, self._failing_since = change, 0, now
        self.failures += 1
        longest_s = self.pace.longest_taken_s if taken else self.pace.longest_retry_s
        pause_s = min(longest_s, self.pace.first_retry_s * 2.0 ** min(self.failures - 1, 20))
        self._not_before = now + pause_s * (0.5 + jitter / 2)
        is_news = not self._escalated and now - self._failing_since >= self.pace.escalate_after_s
        self._escalated |= is_news
        return is_news

    def admit_again(self, one: str) -> None:
        """Another reader begins with this filter, which may be there already."""
        self.admitted -= {one}

    def gone(self) -> None:
        """The consumer does not exist any more."""
        self.present = self.admitted = _NO_FILTERS
        self._releases = False

    def forget(self) -> None:
        """It is not known any more what the server has: begin anew."""
        self.present, self.admitted = None, _NO_FILTERS
        self._releases = False


def split_filters(
    parts: Sequence[Filters], wanted: Iterable[str], *, cap: int = SUBJECT_CAP, may_split: bool = False
) -> tuple[Filters, ...]:
    """Which consumer has which filters; one that stays keeps its consumer.

    More than `cap` filters need a second consumer, or raise `SubjectCapExceeded`.

    >>> split_filters([frozenset({"a", "b"})], ["a", "b", "c"], cap=2, may_split=True)
    (frozenset({'a', 'b'}), frozenset({'c'}))
    """
    left = dict.fromkeys(sorted(wanted))
    if len(left) > cap and not may_split:
        raise SubjectCapExceeded(
            f"{len(left)} subjects are wanted of one consumer, and its limit is {cap}: start more workers, raise "
            "max_subjects, or allow a second consumer with split_consumer=True"
        )
    split = [set(part) & left.keys() for part in parts] or [set()]
    for part in split:
        for one in part:
            left.pop(one, None)
    for one in left:
        place = next((part for part in split if len(part) < cap), None)
        if place is None:
            split.append(place := set())
        place.add(one)
    return tuple(map(frozenset, split))
