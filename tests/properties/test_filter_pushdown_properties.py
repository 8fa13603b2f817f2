"""Filters that are pushed to the server: what is read, and filtered again where asked, is what the filters select."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

from keylane.core.partitions import Partitioning, strip_partition
from keylane.core.subjects import intersection, matches
from keylane.errors import InvalidInput
from keylane.spark.driver.filter_pushdown import push_filters
from keylane.spark.driver.layout import Layout

START = datetime(2026, 1, 1, tzinfo=UTC)
TOKENS = ["a", "7", "3", "orders"]
STORED = [".".join(tokens) for length in (1, 2, 3) for tokens in product(TOKENS, repeat=length)]
"""Every subject of up to three tokens is stored once."""
ORDERS = Partitioning("orders.*", (1,), 4)
PAIRS = Partitioning("a.*.*", (2, 1), 4)
WHOLE = Partitioning(">", (), 4)


@dataclass(frozen=True)
class Row:
    subject: str
    partition: int | None
    key: str | None
    sequence: int
    timestamp: datetime


def row(stored: str, sequence: int, layout: Layout) -> Row:
    """As the reader shows a message."""
    subject, partition, key = stored, None, None
    if layout.numbered:
        try:
            partition, subject = strip_partition(stored)
        except InvalidInput:
            return Row(stored, None, None, sequence, START + timedelta(seconds=sequence))
    for one in layout.partitioning:
        try:
            key = one.key(subject)
        except InvalidInput:
            continue
        partition = one.partition(subject) if partition is None else partition
        break
    return Row(subject, partition, key, sequence, START + timedelta(seconds=sequence))


def holds(one: Filter, found: Row) -> bool | None:
    """As SQL sees it: None is unknown."""
    if isinstance(one, Not):
        inner = holds(one.child, found)
        return None if inner is None else not inner
    value: Any = getattr(found, getattr(one, "attribute")[0])  # noqa: B009 - the base class has none
    match one:
        case IsNull():
            return value is None
        case IsNotNull():
            return value is not None
        case EqualNullSafe():
            return bool(value == one.value)
    wanted: Any = getattr(one, "value", None)
    if value is None or wanted is None:
        return None
    return bool(_ANSWERS[type(one)](value, wanted))


_ANSWERS: dict[type[Filter], Callable[[Any, Any], Any]] = {
    EqualTo: operator.eq,
    In: lambda value, wanted: value in wanted,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    StringStartsWith: str.startswith,
    StringContains: operator.contains,
}


subjects = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4).map(".".join)
filters_of_subjects = st.lists(st.sampled_from([*TOKENS, "*"]), min_size=1, max_size=4).flatmap(
    lambda head: st.sampled_from([".".join(head), ".".join([*head, ">"])])
)
ORDERED = (GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, EqualTo, EqualNullSafe)


def _one_of(column: str, values: st.SearchStrategy[Any], kinds: tuple[Any, ...]) -> st.SearchStrategy[Filter]:
    path = (column,)
    plain: st.SearchStrategy[Filter] = st.builds(lambda kind, value: kind(path, value), st.sampled_from(kinds), values)
    listed: st.SearchStrategy[Filter] = st.lists(values, min_size=1, max_size=3).map(lambda many: In(path, tuple(many)))
    null: st.SearchStrategy[Filter] = st.sampled_from([IsNull(path), IsNotNull(path), EqualNullSafe(path, None)])
    return st.one_of(plain, plain, listed, null, plain.map(Not))


texts = (EqualTo, EqualNullSafe, StringStartsWith, StringContains)
prefixes = st.one_of(
    subjects, subjects.map(lambda one: f"{one}."), st.sampled_from(["o", "", "orders.x\\y", "a..b", "*"])
)
predicates = st.one_of(
    _one_of("sequence", st.integers(-1, len(STORED) + 1), ORDERED),
    _one_of("timestamp", st.integers(-1, len(STORED) + 1).map(lambda one: START + timedelta(seconds=one)), ORDERED),
    _one_of("partition", st.integers(-1, 8), ORDERED),
    _one_of("subject", prefixes, texts),
    _one_of("key", prefixes, texts),
)
LAYOUTS = [
    Layout("S", "consumer", numbered, keys, filters, "partition", whole=False)
    for numbered in (True, False)
    for filters in ((None,), ("0.>", "3.>", "7.>"), ("3.>", "7.>", "a", "a.>"), ("orders.*",), ("*.orders.*", "3"))
    for keys in ((), (ORDERS, PAIRS), (WHOLE,))
]
TEXTS = ["orders", "orders.", "orders.a", "orders.a.", "a", "a.", "a.3", "3.a", "7", "7.", "orders.o", "*", "a..b", ""]
SINGLE: list[Filter] = [
    *(kind((column,), value) for kind in texts for column in ("subject", "key") for value in TEXTS),
    *(kind(("partition",), value) for kind in ORDERED for value in (-1, 0, 3, 8)),
    *(kind(("sequence",), value) for kind in ORDERED for value in (-1, 0, 1, 40, 1000)),
    *(kind(("timestamp",), START + timedelta(seconds=value)) for kind in ORDERED for value in (-1, 1, 40, 1000)),
    *(kind for column in Row.__annotations__ for kind in (IsNull((column,)), IsNotNull((column,)))),
    *(EqualNullSafe((column,), None) for column in Row.__annotations__),
    In(("partition",), (3, 7, None, 3)),
    In(("subject",), ("orders.a", "a.a", "3")),
    In(("key",), ("a", "3.a", "orders")),
    In(("sequence",), (3, 9)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_a_single_filter(layout: Layout) -> None:
    for one in SINGLE:
        check(layout, [one])
        check(layout, [Not(one)])


@given(st.sampled_from(LAYOUTS), st.lists(predicates, min_size=2, max_size=3))
def test_several_filters(layout: Layout, asked: list[Filter]) -> None:
    check(layout, asked)


@cache
def messages(layout: Layout) -> list[tuple[str, Row]]:
    """What is stored, and its row."""
    return [
        (stored, row(stored, number, layout))
        for number, stored in enumerate(STORED, start=1)
        if any(matches(one or ">", stored) for one in layout.subject_filters)
    ]


def check(layout: Layout, asked: list[Filter]) -> None:
    """What is read, and filtered again where Spark is asked to, is what the filters select; nothing is read twice."""
    pushed, given_back = push_filters(asked, layout)
    read = [
        found
        for stored, found in messages(layout)
        if not pushed.is_empty
        and pushed.after < found.sequence
        and (pushed.upto is None or found.sequence <= pushed.upto)
        and (pushed.since is None or found.timestamp >= pushed.since)
        and (pushed.until is None or found.timestamp < pushed.until)
        for one in pushed.layout.subject_filters
        if matches(one or ">", stored)
    ]
    shown = [one for one in read if all(holds(each, one) for each in given_back)]
    wanted = [found for _, found in messages(layout) if all(holds(each, found) for each in asked)]
    assert shown == wanted, asked


@given(filters_of_subjects, filters_of_subjects, subjects)
def test_an_intersection_selects_what_both_select(one: str, other: str, subject: str) -> None:
    both = intersection(one, other)
    assert (both is not None and matches(both, subject)) == (matches(one, subject) and matches(other, subject))


@given(st.sampled_from([ORDERS, PAIRS, WHOLE]), subjects, subjects)
def test_the_subjects_of_a_key_are_those_that_have_it(partitioning: Partitioning, key: str, subject: str) -> None:
    try:
        has_it = partitioning.key(subject) == key
    except InvalidInput:
        has_it = False
    found = partitioning.subjects_of(key)
    assert has_it == (found is not None and matches(found, subject))
