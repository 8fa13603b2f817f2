"""Offsets: their text, and what a stream no longer has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.errors import DataLost, InvalidInput
from keylane.spark.driver.offsets import Offset, planned, resume
from keylane.spark.stream_state import Loss, Losses, StreamSnapshot


def state(first: int, last: int, created: str = "t1") -> StreamSnapshot:
    return StreamSnapshot("S", created, first, last, last - first + 1, 100)


def at(sequence: int, created: str = "t1") -> Offset:
    return Offset("S", created, sequence)


def test_the_text_of_an_offset_never_changes() -> None:
    text = '{"stream": "S", "created": "t1", "sequence": 7}'
    assert json.dumps(at(7).to_wire()) == text
    assert Offset.from_wire(dict(reversed(json.loads(text).items())), "S") == at(7)


@pytest.mark.parametrize("wire", [None, 5, "x", [], {}, {"partition-1": 3}, {"stream": "S", "created": "t"}])
def test_a_checkpoint_of_another_source(wire: Any) -> None:
    with pytest.raises(InvalidInput, match="belongs to another source"):
        Offset.from_wire(wire, "S")


def test_a_checkpoint_of_another_stream() -> None:
    with pytest.raises(InvalidInput, match=r"checkpoint is of stream 'OLD', and the query reads 'S'"):
        Offset.from_wire({"stream": "OLD", "created": "t1", "sequence": 7}, "S")


def test_a_checkpoint_of_the_groups_queue() -> None:
    wire = {"stream": "S-g", "created": "t1", "sequence": 7}
    assert Offset.from_wire(wire, "S-g", queue="S-g").sequence == 7
    with pytest.raises(InvalidInput, match=r"is of 'S-g', the queue of the group.*Give queue=true to go on with the q"):
        Offset.from_wire(wire, "S", queue="S-g")


def test_a_stream_that_never_held_a_message() -> None:
    wire = {
        "config": {"name": "S"},
        "created": "t1",
        "state": {"first_seq": 0, "last_seq": 0, "messages": 0, "bytes": 0},
    }
    assert resume(at(0), StreamSnapshot.from_wire(wire)).loss is None


def test_nothing_is_lost_where_the_next_message_is_there() -> None:
    for start, now in ((at(0), state(1, 10)), (at(4), state(5, 10)), (at(10), state(11, 10)), (at(7), state(1, 10))):
        found = resume(start, now)
        assert (found.after, found.upto, found.loss) == (start.sequence, 10, None)


def test_trimmed() -> None:
    found = resume(at(4), state(8, 10))
    assert (found.after, found.upto) == (7, 10)
    assert found.loss is not None
    assert (found.loss.kind, found.loss.first, found.loss.last, found.loss.count) == ("trimmed", 5, 7, 3)


def test_made_anew() -> None:
    found = resume(at(4), state(1, 3, "t2"))
    assert (found.after, found.upto) == (0, 3)
    assert found.loss is not None
    assert (found.loss.kind, found.loss.count) == ("recreated", None)


def test_restored_from_an_older_copy() -> None:
    found = resume(at(10), state(1, 6))
    assert (found.after, found.upto) == (6, 6)
    assert found.loss is not None
    assert found.loss.kind == "cut short"


@pytest.mark.parametrize(
    ("batch", "now", "readable", "lost"),
    [
        ((at(2), at(8)), state(1, 10), (2, 8), None),
        ((at(2), at(8)), state(5, 10), (4, 8), ("trimmed", 3, 4)),
        ((at(2), at(8)), state(20, 30), (8, 8), ("trimmed", 3, 8)),
        ((at(2), at(8)), state(1, 3, "t2"), (0, 0), ("recreated", 3, 8)),
        ((at(2), at(8)), state(1, 5), (2, 5), ("cut short", 6, 8)),
        ((at(2, "t0"), at(8)), state(1, 10), (0, 8), ("recreated", 3, None)),
        ((at(2, "t0"), at(8, "t1")), state(1, 10, "t2"), (0, 0), ("recreated", 1, 8)),
    ],
)
def test_a_planned_batch(
    batch: tuple[Offset, Offset],
    now: StreamSnapshot,
    readable: tuple[int, int],
    lost: tuple[str, int, int | None] | None,
) -> None:
    found = planned(*batch, now)
    assert (found.after, found.upto) == readable
    assert (found.loss and (found.loss.kind, found.loss.first, found.loss.last)) == lost


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 25), st.integers(0, 25), st.sampled_from("ab"))
def test_a_range_is_within_the_stream_and_complete_or_a_loss_is_told(
    begin: int, more: int, first: int, count: int, created: str
) -> None:
    now = state(first, first + count - 1, created)
    start, end = at(begin, "a"), at(begin + more, "a")
    found = planned(start, end, now)
    assert found.after <= found.upto
    readable = range(found.after + 1, found.upto + 1)
    assert all(now.first <= n <= now.last for n in readable)
    missing = [n for n in range(begin + 1, begin + more + 1) if n not in readable]
    if missing:
        assert found.loss is not None
        assert found.loss.first <= missing[0]


def test_what_happens_with_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    loss = Loss("trimmed", "stream 'S' was trimmed or purged and begins at 8 now", 5, 7)
    with pytest.raises(DataLost, match=r"sequences 5 to 7, at most 3 messages, are gone.*failOnDataLoss=false"):
        Losses(fatal=True).report(loss)
    losses = Losses(fatal=False)
    losses.report(loss)
    losses.report(loss)
    losses.report(Loss("trimmed", "again", 10, 11))
    assert losses.count == 5
    assert len(caplog.records) == 2
    assert "sequences 5 to 7" in caplog.text
