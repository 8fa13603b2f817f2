"""The filters of a worker's consumer: diffs, removals first, pauses, retries, the limit of subjects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.core.consumer_filters import (
    AdmitFilters,
    ChangeLater,
    ConsumerFilters,
    CreateConsumer,
    DeleteConsumer,
    FilterChange,
    NarrowFilters,
    ReleaseMessages,
    UpdatePace,
    WidenFilters,
    split_filters,
)
from keylane.errors import SubjectCapExceeded

PACE = UpdatePace(min_interval_s=1.0, first_retry_s=0.1, longest_retry_s=5.0, escalate_after_s=3.0)
ALL = [frozenset(), frozenset("a"), frozenset("ab"), frozenset("bc"), frozenset("abc"), frozenset("cd")]


def settled(*filters: str) -> ConsumerFilters:
    known = frozenset(filters)
    return ConsumerFilters(PACE, wanted=known, present=known, admitted=known)


def steps(filters: ConsumerFilters, now: float = 0.0) -> list[FilterChange]:
    """Everything that is due, each with success; pauses pass."""
    done = []
    while (change := filters.next_change(now)) is not None:
        if isinstance(change, ChangeLater):
            now = change.at
        else:
            done.append(change)
            filters.succeeded(change, now)
    return done


def test_what_an_earlier_run_left_is_deleted_first() -> None:
    filters = ConsumerFilters(PACE)
    filters.want("ab")
    both = frozenset("ab")
    assert steps(filters) == [DeleteConsumer(), CreateConsumer(both), AdmitFilters(both)]


def test_the_same_filters_in_any_order_change_nothing_and_are_counted() -> None:
    filters = settled("a", "b")
    assert not filters.want(["b", "a", "b"])
    assert filters.skipped == 1
    assert steps(filters) == []


def test_removals_come_before_additions() -> None:
    filters = settled("a", "b")
    filters.want("bc")
    kept, after = frozenset("b"), frozenset("bc")
    assert steps(filters) == [
        NarrowFilters(kept),
        ReleaseMessages(),
        WidenFilters(after),
        AdmitFilters(frozenset("c")),
    ]


def test_no_filters_delete_the_consumer_and_never_mean_the_whole_stream() -> None:
    filters = settled("a")
    filters.want("")
    assert steps(filters) == [DeleteConsumer()]
    filters.want("b")
    assert steps(filters, 9.0) == [CreateConsumer(frozenset("b")), AdmitFilters(frozenset("b"))]


def test_a_swap_of_all_filters_deletes_the_consumer_between() -> None:
    filters = settled("a")
    filters.want("b")
    assert steps(filters)[:2] == [DeleteConsumer(), CreateConsumer(frozenset("b"))]


def test_changes_within_the_interval_become_one() -> None:
    filters = settled("a")
    filters.want("ab")
    change = filters.next_change(0.0)
    assert isinstance(change, WidenFilters)
    filters.succeeded(change, 0.0)
    filters.succeeded(AdmitFilters(frozenset("b")), 0.0)
    for number in range(50):
        filters.want("a" * (number % 2) + "bc")
    assert filters.next_change(0.5) == ChangeLater(1.0)
    filters.want("abcd")
    assert steps(filters, 1.0) == [WidenFilters(frozenset("abcd")), AdmitFilters(frozenset("cd"))]
    assert filters.changes == 2


def test_a_failure_keeps_what_is_there_and_is_tried_again_later() -> None:
    filters = settled("a")
    filters.want("ab")
    change = WidenFilters(frozenset("ab"))
    pauses = []
    now = 0.0
    for _ in range(8):
        assert filters.next_change(now) == change
        filters.failed(change, now, jitter=1.0)
        later = filters.next_change(now)
        assert isinstance(later, ChangeLater)
        pauses.append(round(later.at - now, 3))
        now = later.at
    assert filters.present == frozenset("a")
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_removal_does_not_wait_for_an_addition_that_fails() -> None:
    filters = settled("a", "b")
    filters.want("abc")
    filters.failed(WidenFilters(frozenset("abc")), 0.0, jitter=1.0)
    filters.want("bc")
    assert filters.next_change(0.01) == NarrowFilters(frozenset("b"))


def test_the_leader_is_told_once_when_a_change_fails_for_long() -> None:
    filters = settled("a")
    filters.want("ab")
    change = WidenFilters(frozenset("ab"))
    told = [filters.failed(change, now, jitter=0.0) for now in (0.0, 1.0, 2.9, 3.0, 4.0)]
    assert told == [False, False, False, True, False]
    filters.succeeded(change, 5.0)
    assert not filters.failed(WidenFilters(frozenset("abc")), 9.0, jitter=0.0)


def test_a_consumer_that_is_gone_is_made_with_what_is_wanted() -> None:
    filters = settled("a", "b")
    filters.gone()
    assert steps(filters) == [CreateConsumer(frozenset("ab")), AdmitFilters(frozenset("ab"))]


def test_a_filter_is_admitted_again_for_another_reader() -> None:
    filters = settled("a", "b")
    filters.admit_again("a")
    assert steps(filters) == [AdmitFilters(frozenset("a"))]


@given(st.lists(st.tuples(st.sampled_from(ALL), st.sampled_from(["settle", "fail", "gone", "forget"])), max_size=12))
def test_whatever_happens_it_ends_with_what_is_wanted(history: list[tuple[frozenset[str], str]]) -> None:
    """No step ever asks for an empty list, adds before it removes, or admits what the server does not have."""
    filters = ConsumerFilters(PACE)
    now = 0.0
    for wanted, what in history:
        filters.want(wanted)
        now += 10
        change = filters.next_change(now)
        if change is None or isinstance(change, ChangeLater):
            continue
        if isinstance(change, CreateConsumer | NarrowFilters | WidenFilters):
            assert change.filters
        if isinstance(change, WidenFilters):
            assert filters.present is not None
            assert change.filters > filters.present
        if isinstance(change, AdmitFilters):
            assert filters.present is not None
            assert change.filters <= filters.present
        match what:
            case "settle":
                filters.succeeded(change, now)
            case "fail":
                filters.failed(change, now, jitter=0.5)
            case "gone":
                filters.gone()
            case "forget":
                filters.forget()
    steps(filters, now + 100)
    assert filters.is_settled


def test_too_many_subjects_are_refused_with_the_numbers() -> None:
    with pytest.raises(SubjectCapExceeded, match="501 subjects are wanted of one consumer, and its limit is 500"):
        split_filters([], map(str, range(501)))


def test_a_second_consumer_takes_what_the_first_may_not_have() -> None:
    first = split_filters([], "abc", cap=3, may_split=True)
    assert first == (frozenset("abc"),)
    second = split_filters(first, "abcde", cap=3, may_split=True)
    assert second == (frozenset("abc"), frozenset("de"))
    assert split_filters(second, "bde", cap=3, may_split=True) == (frozenset("b"), frozenset("de")), "nobody moves"
    assert split_filters(second, "", cap=3, may_split=True) == (frozenset(), frozenset())


def test_a_set_that_never_rests_is_changed_twice_in_an_interval_at_most() -> None:
    """What is wanted is another one whenever a change is done: a removal and an addition in each interval."""
    filters = settled("a")
    now, changes = 0.0, 0
    for number in range(1000):
        now = number / 100
        filters.want("abc" if number % 2 else "bcd")
        change = filters.next_change(now)
        if change is not None and not isinstance(change, ChangeLater):
            filters.succeeded(change, now)
    changes = filters.changes
    assert 8 <= changes <= 22
