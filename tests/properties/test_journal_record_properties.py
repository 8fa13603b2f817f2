"""Journal batches over random columns: what goes in comes out, and damage never goes unseen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.core.journal_record import OUTCOMES, BatchHead, Columns, in_sample, open_batch, pack, seal
from keylane.errors import JournalError

NAMES = st.text("abcXYZ-_=09", min_size=1, max_size=12)
KEYS = st.one_of(st.text(max_size=8), st.binary(max_size=8).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
U32 = st.integers(0, 2**32 - 1)
ROWS = st.lists(
    st.tuples(
        U64, U64, I64, I64, KEYS, U32, U32, st.tuples(st.text(max_size=5), st.integers(0, 2**53)), st.integers(0, 5)
    ),
    max_size=40,
)
HEADS = st.builds(
    BatchHead,
    writer=NAMES,
    batch=st.integers(1, 2**53),
    stream=NAMES,
    group=NAMES,
    member=st.text(min_size=1, max_size=9),
    instance=NAMES,
    sample=st.floats(0.000001, 1),
    dropped=st.integers(0, 2**53),
)


def packed(head: BatchHead, rows: list[tuple[object, ...]]) -> bytes:
    return seal(head, pack(Columns(*([row[number] for row in rows] for number in range(9)))))  # type: ignore[arg-type]


@given(HEADS, ROWS)
def test_what_goes_in_comes_out(head: BatchHead, rows: list[tuple[object, ...]]) -> None:
    data = packed(head, rows)
    batch = open_batch(data)
    assert batch.head == head
    assert batch.records == len(rows)
    seen = [
        (
            record.sequence,
            record.source_sequence,
            record.started_ns,
            record.ended_ns,
            record.key,
            record.partition,
            record.delivered,
            (record.pin, record.revision),
            OUTCOMES.index(record.outcome),
        )
        for record in batch.rows()
    ]
    assert seen == rows
    assert [record.row for record in batch.rows()] == list(range(len(rows)))
    assert all(span.start % 8 == 0 for span in batch.spans.values())


@given(HEADS, ROWS, st.data())
def test_damage_is_seen(head: BatchHead, rows: list[tuple[object, ...]], data: st.DataObject) -> None:
    whole = packed(head, rows)
    at = data.draw(st.integers(0, len(whole) - 1))
    bits = data.draw(st.integers(1, 255))
    damaged = whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :]
    try:
        open_batch(damaged)
    except JournalError:
        return
    raise AssertionError(f"byte {at} was changed and nobody noticed")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_an_error_of_ours(data: bytes) -> None:
    for raw in (data, b"KLJ\x01" + data):
        try:
            open_batch(raw)
        except JournalError:
            continue


@given(KEYS, st.floats(0.000001, 1), st.floats(0.000001, 1))
def test_a_larger_sample_holds_a_smaller_one(key: str, one: float, other: float) -> None:
    if in_sample(key, min(one, other)):
        assert in_sample(key, max(one, other))
