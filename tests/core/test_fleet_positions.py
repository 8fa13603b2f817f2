"""Positions of a fleet: the highest counts, unless the stream is another one."""

from __future__ import annotations

from keylane.core.fleet_positions import merged, position_of, pruned
from keylane.core.fleet_records import WorkerPositions


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
