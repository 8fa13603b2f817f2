"""Filters of a query that the server can apply, so that fewer messages are read. Pure.

Spark applies every filter again that is given back. A filter is kept only if what is read is exactly what it selects:
of sequences, partitions and whole subjects. Times are given back, because the clocks of servers may differ, and so are
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from keylane.core.subjects import check_subject, intersection, overlaps
from keylane.errors import InvalidInput
from keylane.spark.driver.layout import Layout

MOST_FILTERS = 256
"""Each is read by a task of its own."""
_NEVER_NULL = ("sequence", "timestamp", "subject")
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """What need not be read."""

    layout: Layout
    """With narrower filters."""
    after: int = 0
    upto: int | None = None
    """Sequences in (after, upto]."""
    since: datetime | None = None
    until: datetime | None = None
    """Times in [since, until)."""

    @property
    def is_empty(self) -> bool:
        """Nothing is selected, whatever the stream holds."""
        crossed = self.since is not None and self.until is not None and self.until <= self.since
        return not self.layout.subject_filters or crossed or (self.upto is not None and self.upto <= self.after)


def push_filters(filters: Iterable[Filter], layout: Layout) -> tuple[PushedFilters, list[Filter]]:
    """What the filters leave to be read of `layout`, and those that Spark must apply itself."""
    pushed, given_back = PushedFilters(layout), []
    for one in filters:
        pushed, is_exact = _push(one, pushed)
        if not is_exact:
            given_back.append(one)
    return pushed, given_back


def _push(one: Filter, pushed: PushedFilters) -> tuple[PushedFilters, bool]:
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    if len(attribute) != 1 or attribute[0] not in _COLUMNS:
        return pushed, False
    if isinstance(one, IsNotNull):
        return pushed, attribute[0] in _NEVER_NULL
    return _COLUMNS[attribute[0]](one, pushed)


def _equal(one: Filter) -> list[Any] | None:
    """The values of which a column must have one."""
    if isinstance(one, EqualTo):
        return [] if one.value is None else [one.value]
    if isinstance(one, EqualNullSafe) and one.value is not None:
        return [one.value]
    if isinstance(one, In):
        return [value for value in dict.fromkeys(one.value) if value is not None]
    return None


# ---- where in the stream -----------------------------------------------------------------------------------------


def _push_sequence(one: Filter, pushed: PushedFilters) -> tuple[PushedFilters, bool]:
    low, high = pushed.after + 1, pushed.upto
    first, last = low, high
    match one:
        case EqualTo(value=int(value)) | EqualNullSafe(value=int(value)):
            first = last = value
        case GreaterThan(value=int(value)):
            first = value + 1
        case GreaterThanOrEqual(value=int(value)):
            first = value
        case LessThan(value=int(value)):
            last = value - 1
        case LessThanOrEqual(value=int(value)):
            last = value
        case In(value=values) if values and all(isinstance(each, int) for each in values):
            narrowed, _ = _push_sequence(GreaterThanOrEqual(("sequence",), min(values)), pushed)
            return _push_sequence(LessThanOrEqual(("sequence",), max(values)), narrowed)[0], False
        case _:
            return pushed, False
    upto = last if high is None else high if last is None else min(high, last)
    return replace(pushed, after=max(low, first) - 1, upto=upto), True


def _push_time(one: Filter, pushed: PushedFilters) -> tuple[PushedFilters, bool]:
    value = getattr(one, "value", None)
    if not isinstance(value, datetime) or value.tzinfo is None:
        return pushed, False
    time = value.astimezone(UTC)
    since: datetime | None = None
    until: datetime | None = None
    if isinstance(one, EqualTo | EqualNullSafe | GreaterThanOrEqual):
        since = time
    if isinstance(one, GreaterThan):
        since = time + _MICROSECOND
    if isinstance(one, EqualTo | EqualNullSafe | LessThanOrEqual):
        until = time + _MICROSECOND
    if isinstance(one, LessThan):
        until = time
    lows = [each for each in (pushed.since, since) if each is not None]
    highs = [each for each in (pushed.until, until) if each is not None]
    return replace(pushed, since=max(lows, default=None), until=min(highs, default=None)), False


# ---- which subjects ----------------------------------------------------------------------------------------------


def _push_partition(one: Filter, pushed: PushedFilters) -> tuple[PushedFilters, bool]:
    values = _equal(one)
    if values is None or not pushed.layout.numbered:
        return pushed, False
    return _narrow(pushed, [f"{value}.>" for value in values if isinstance(value, int) and value >= 0], is_exact=True)


def _push_subject(one: Filter, pushed: PushedFilters) -> tuple[PushedFilters, bool]:
    if isinstance(one, StringStartsWith) and isinstance(one.value, str):
        whole, dot, rest = one.value.rpartition(".")
        if not dot or not _is_literal(whole):
            return pushed, False
        return _narrow_subjects(pushed, [f"{whole}.>"], is_exact=not rest)
    values = _equal(one)
    if values is None or not all(isinstance(value, str) and _is_literal(value) for value in values):
        return pushed, False
    return _narrow_subjects(pushed, values, is_exact=True)


def _push_key(one: Filter, pushed: PushedFilters) -> tuple[PushedFilters, bool]:
    """The same tokens may be keys under several filters."""
    values = _equal(one)
    if values is None or not all(isinstance(value, str) and _is_literal(value) for value in values):
        return pushed, False
    found = [each.subjects_of(value) for value in values for each in pushed.layout.partitioning]
    subjects = list(dict.fromkeys(each for each in found if each is not None))
    return _narrow_subjects(pushed, subjects, is_exact=False)


def _is_literal(text: str) -> bool:
    """Whether it is a subject. A backslash stands for bytes that are not UTF-8."""
    try:
        check_subject(text)
    except InvalidInput:
        return False
    return "\\" not in text


def _narrow_subjects(pushed: PushedFilters, subjects: Sequence[str], *, is_exact: bool) -> tuple[PushedFilters, bool]:
    if not pushed.layout.numbered:
        return _narrow(pushed, subjects, is_exact=is_exact)
    # A stream with numbers may hold subjects without one, and then "7.x" can be a subject, or x in partition 7.
    stored = [each for subject in subjects for each in (f"*.{subject}", subject)]
    in_partitions = all(_first(each).isdecimal() for each in pushed.layout.subject_filters)
    return _narrow(
        pushed, stored, is_exact=is_exact and in_partitions and not any(_first(each).isdecimal() for each in subjects)
    )


def _first(subject_filter: str | None) -> str:
    return (subject_filter or ">").split(".", 1)[0]


def _narrow(pushed: PushedFilters, wanted: Sequence[str], *, is_exact: bool) -> tuple[PushedFilters, bool]:
    """Keeps of each filter what `wanted` selects. No message may be in two of them: it would be read twice."""
    found: list[str | None] = []
    for outer in pushed.layout.subject_filters:
        inner = list(dict.fromkeys(intersection(outer or ">", each) for each in wanted))
        common = [each for each in inner if each is not None]
        if any(overlaps(*pair) for pair in combinations(common, 2)):
            return pushed, False
        found += common
    if len(found) > MOST_FILTERS:
        return pushed, False
    return replace(pushed, layout=replace(pushed.layout, subject_filters=tuple(found), whole=False)), is_exact


_COLUMNS: dict[str, Callable[[Filter, PushedFilters], tuple[PushedFilters, bool]]] = {
    "sequence": _push_sequence,
    "timestamp": _push_time,
    "partition": _push_partition,
    "subject": _push_subject,
    "key": _push_key,
}
