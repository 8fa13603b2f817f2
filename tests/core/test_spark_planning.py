"""Ranges cut into pieces, batches cut to their limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.spark.driver.batch_plan import MOST_PIECES, SplitRange, plan
from keylane.spark.driver.offsets import admit
from keylane.spark.options import SplitBy
from keylane.spark.stream_state import StreamSnapshot


def state(last: int, *, first: int = 1, size: int = 100) -> StreamSnapshot:
    count = last - first + 1
    return StreamSnapshot("S", "t", first, last, count, count * size)


def test_a_piece_for_each_partition_with_something_new() -> None:
    assert plan(10, 20, {"0.>": 10, "1.>": 15, "2.>": 25, "3.>": 0}, split_by="partition") == [
        SplitRange("1.>", 10, 15, 15),
        SplitRange("2.>", 10, 20, 25),
    ]


def test_nothing_to_read() -> None:
    assert plan(10, 10, {None: 50}, split_by="sequence") == []
    assert plan(10, 20, {None: 10}, split_by="sequence") == []
    assert plan(0, 20, {}, split_by="partition") == []


def test_a_large_range_is_cut_by_itself_where_it_is_read_by_sequence() -> None:
    assert len(plan(0, 1_000_000, {None: 1_000_000}, split_by="sequence")) == 4
    assert len(plan(0, 10**12, {None: 10**12}, split_by="sequence")) == MOST_PIECES
    assert len(plan(0, 1_000_000, {"0.>": 1_000_000}, split_by="partition")) == 1


@given(
    after=st.integers(0, 1000),
    span=st.integers(0, 300),
    newest=st.dictionaries(st.sampled_from(["0.>", "1.>", "2.>", "x.>"]), st.integers(0, 1500), max_size=4),
    split_by=st.sampled_from(["partition", "sequence"]),
    wanted=st.one_of(st.none(), st.integers(1, 50)),
)
def test_every_message_is_in_exactly_one_piece(
    after: int, span: int, newest: dict[str | None, int], split_by: SplitBy, wanted: int | None
) -> None:
    pieces = plan(after, after + span, newest, split_by=split_by, min_partitions=wanted)
    for one, last in newest.items():
        covered = [n for piece in pieces if piece.subject_filter == one for n in range(piece.after + 1, piece.upto + 1)]
        assert covered == list(range(after + 1, min(after + span, last) + 1))
    assert all(piece.last > piece.after and piece.upto > piece.after for piece in pieces)
    possible = sum(max(0, min(after + span, last) - after) for last in newest.values())
    live = sum(last > after for last in newest.values()) if span else 0
    if wanted is not None and live and all(min(after + span, last) - after >= wanted for last in newest.values()):
        assert len(pieces) >= wanted
    assert len(pieces) <= max(possible, live)


def test_limits_of_a_batch() -> None:
    assert admit(0, state(1000)) == 1000
    assert admit(0, state(1000), max_offsets=10) == 10
    assert admit(995, state(1000), max_offsets=10) == 1000
    assert admit(0, state(1000), max_bytes=1000) == 10
    assert admit(0, state(1000), max_bytes=1000, max_offsets=7) == 7
    assert admit(0, state(1000), max_bytes=1000, max_offsets=70) == 10
    assert admit(1000, state(1000), max_offsets=5) == 1000


def test_a_limit_below_one_message_still_makes_progress() -> None:
    assert admit(3, state(1000, size=5000), max_bytes=1) == 4


def test_bytes_are_averaged_over_sequences_not_messages() -> None:
    half_deleted = StreamSnapshot("S", "t", first=1, last=1000, messages=500, bytes=50_000)
    assert admit(0, half_deleted, max_bytes=5_000) == 100


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.one_of(st.none(), st.integers(1, 10**7)),
    st.one_of(st.none(), st.integers(1, 10**9)),
    st.integers(0, 10**6),
)
def test_a_batch_is_never_empty_while_there_is_something(
    after: int, more: int, rows: int | None, size: int | None, first_gap: int
) -> None:
    now = state(after + more, first=min(after + 1, 1 + first_gap))
    end = admit(after, now, max_offsets=rows, max_bytes=size)
    assert after <= end <= after + more
    assert (end > after) == (more > 0)
    if rows is not None:
        assert end - after <= rows
