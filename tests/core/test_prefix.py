"""Only what has nothing undone before it is committed; and where a new owner goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.core.partition_offsets import Prefix, Resume, ResumePoint, resume
from keylane.errors import InvalidInput


def test_in_order() -> None:
    prefix = Prefix(5)
    assert (prefix.offset, prefix.at_work) == (5, 0)
    for offset in (5, 6):
        prefix.start(offset)
    assert (prefix.offset, prefix.at_work) == (5, 2)
    prefix.finish(5)
    assert prefix.offset == 6
    prefix.finish(6)
    assert (prefix.offset, prefix.at_work) == (7, 0)


def test_what_is_undone_holds_back_all_after_it() -> None:
    prefix = Prefix(0)
    for offset in range(100):
        prefix.start(offset)
    for offset in range(1, 100):
        prefix.finish(offset)
    assert (prefix.offset, prefix.at_work) == (0, 1)
    prefix.finish(0)
    assert (prefix.offset, prefix.at_work) == (100, 0)


def test_holes_between_offsets_are_no_undone_messages() -> None:
    prefix = Prefix(0)
    for offset in (3, 9):
        prefix.start(offset)
    assert prefix.offset == 3, "nothing is before it"
    prefix.finish(3)
    assert prefix.offset == 9
    prefix.finish(9)
    assert prefix.offset == 10


def test_done_twice_is_done() -> None:
    prefix = Prefix(0)
    for offset in (0, 1):
        prefix.start(offset)
    for offset in (1, 1, 0, 0, 1):
        prefix.finish(offset)
    assert (prefix.offset, prefix.at_work) == (2, 0)


def test_what_cannot_be() -> None:
    prefix = Prefix(5)
    with pytest.raises(InvalidInput, match="never started"):
        prefix.finish(5)
    prefix.start(7)
    with pytest.raises(InvalidInput, match="start them in the log's order"):
        prefix.start(7)
    with pytest.raises(InvalidInput, match="start them in the log's order"):
        prefix.start(6)
    assert repr(prefix) == "<Prefix 7, 1 at work>"


@given(offsets=st.sets(st.integers(0, 60), min_size=1), data=st.data())
def test_it_is_the_lowest_that_is_not_done(offsets: set[int], data: st.DataObject) -> None:
    prefix = Prefix(0)
    ordered = sorted(offsets)
    for offset in ordered:
        prefix.start(offset)
    undone = set(offsets)
    for offset in data.draw(st.permutations(ordered)):
        prefix.finish(offset)
        undone.remove(offset)
        assert prefix.offset == min(undone, default=ordered[-1] + 1)
        assert prefix.at_work == len(undone)


@pytest.mark.parametrize(
    ("heartbeat", "committed", "found"),
    [
        (50, 40, Resume(50, ResumePoint.HEARTBEAT)),
        (40, 50, Resume(40, ResumePoint.HEARTBEAT)),
        (None, 40, Resume(40, ResumePoint.COMMITTED)),
        (None, None, Resume(20, ResumePoint.EARLIEST)),
        (20, None, Resume(20, ResumePoint.HEARTBEAT)),
        (100, 40, Resume(100, ResumePoint.HEARTBEAT)),
        (5, 40, Resume(20, ResumePoint.HEARTBEAT, lost=15)),
        (0, None, Resume(20, ResumePoint.HEARTBEAT, lost=20)),
        (None, 5, Resume(20, ResumePoint.COMMITTED, lost=15)),
        (101, 40, Resume(40, ResumePoint.COMMITTED)),
        (101, 102, Resume(20, ResumePoint.EARLIEST)),
        (None, -1, Resume(20, ResumePoint.EARLIEST)),
    ],
)
def test_where_to_go_on(heartbeat: int | None, committed: int | None, found: Resume) -> None:
    assert resume(heartbeat=heartbeat, committed=committed, earliest=20, end=100) == found
