"""Positions of a fleet: the highest counts, unless the stream is another one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.core.fleet_positions import both_gaps, gap_of, merged, merged_gaps, position_of, pruned
from keylane.core.fleet_records import HandledBut, WorkerPositions

GAPS = st.builds(HandledBut, st.integers(0, 30), st.frozensets(st.integers(0, 30)))


def record(worker: int, created: str = "then", **positions: int) -> WorkerPositions:
    named = {name.removeprefix("p"): one for name, one in positions.items()}
    return WorkerPositions(worker=worker, instance="a", beat=1, stream_created=created, positions=named)


def test_the_highest_position_counts_whoever_wrote_it() -> None:
    records = [record(0, p1=5), record(1, p1=9, p2=3), record(2, p1=7)]
    assert position_of("1", records, "then", 100) == 9
    assert position_of("3", records, "then", 100) == 0


def test_positions_of_another_stream_do_not_count() -> None:
    """A stream that was made again counts from 1: what the record names was never handled."""
    assert position_of("1", [record(0, "before", p1=900), record(1, p1=4)], "then", 1000) == 4


def test_a_position_above_the_end_of_the_stream_does_not_count() -> None:
    """The stream was restored to an older state: rather repeat than lose."""
    assert position_of("1", [record(0, p1=900)], "then", 899) == 0
    assert position_of("1", [record(0, p1=900)], "then", 900) == 900


def test_a_position_never_goes_back() -> None:
    assert merged({"1": 5}, {"1": 4, "2": 1}) == {"1": 5, "2": 1}


def test_what_no_other_record_says_is_kept() -> None:
    others = [record(1, p1=5, p2=9), record(2, "before", p3=99)]
    assert pruned({"1": 6, "2": 9, "3": 1, "4": 2}, {"4"}, others, "then") == {"1": 6, "3": 1, "4": 2}


@given(GAPS, GAPS)
def test_what_either_gap_covers_is_covered(first: HandledBut, second: HandledBut) -> None:
    both = both_gaps(first, second)
    assert [both.covers(one) for one in range(40)] == [first.covers(one) or second.covers(one) for one in range(40)]


def test_a_gap_ends_where_a_position_has_passed_it() -> None:
    gap = HandledBut(9, frozenset({3}))
    assert merged_gaps({"1": gap}, {}, {"1": 8}) == {"1": gap}
    assert merged_gaps({"1": gap}, {}, {"1": 9}) == {}


def test_a_gap_of_another_stream_or_above_its_end_does_not_count() -> None:
    one = WorkerPositions(
        worker=0,
        instance="a",
        beat=1,
        stream_created="then",
        positions={"1": 2},
        gaps={"1": HandledBut(9, frozenset({3}))},
    )
    assert gap_of("1", [one], "then", 9) == HandledBut(9, frozenset({3}))
    assert gap_of("1", [one], "then", 8) is None
    assert gap_of("1", [one], "later", 9) is None
    assert gap_of("2", [one], "then", 9) is None
