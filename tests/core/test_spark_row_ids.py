"""Ids of rows: the same row always has the same, and two rows never share one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from keylane.spark.sink.row_ids import IdScope, RowIds

SCOPE = IdScope("copy", "5f1c:7", 3)


def ids_of(
    rows: Sequence[tuple[bytes, bytes, bytes, int | None]], scope: IdScope = SCOPE, by: int = 1000
) -> list[bytes]:
    """The ids of rows (subject, header lines, data, sequence), asked for in pieces."""
    made = RowIds(scope)
    found: list[bytes] = []
    for at in range(0, len(rows), by):
        piece = rows[at : at + by]
        subjects, lines, datas, sequences = (list(column) for column in zip(*piece, strict=True))
        found += made.next(subjects, lines, datas, sequences)
    return found


def test_rows_with_a_sequence_have_ids_that_name_scope_and_sequence() -> None:
    assert ids_of([(b"a", b"", b"x", 17)])[0].startswith(b"copy:17:")


def test_other_rows_have_ids_by_run_partition_and_place() -> None:
    scopes = [SCOPE, IdScope("copy", "5f1c:8", 3), IdScope("copy", "5f1c:7", 4)]
    found = [one for scope in scopes for one in RowIds(scope).next([b"a", b"a"], [b"", b""], [b"x", b"x"])]
    assert len(set(found)) == 6
    assert {len(one) for one in found} == {16}
    assert RowIds(SCOPE).next([b"a", b"a"], [b"", b""], [b"x", b"x"]) == found[:2]


def test_a_row_without_a_sequence_among_others_is_named_by_its_place() -> None:
    found = ids_of([(b"a", b"", b"x", 1), (b"a", b"", b"x", None), (b"a", b"", b"x", 2)])
    assert found[1] == RowIds(SCOPE).next([b"a", b"a"], [b"", b""], [b"", b"x"])[1]


def test_equal_rows_of_one_message_are_counted() -> None:
    found = ids_of([(b"a", b"", b"x", 17)] * 3)
    assert found == [found[0], found[0] + b":1", found[0] + b":2"]


@pytest.mark.parametrize("by", [1, 2, 3, 1000])
def test_pieces_make_no_difference(by: int) -> None:
    rows = [(b"s%d" % (number % 3), b"h", b"%d" % (number % 2), number // 5) for number in range(40)]
    assert ids_of(rows, by=by) == ids_of(rows)


def test_rows_of_one_message_in_different_tasks_do_not_share_an_id() -> None:
    """A message became two rows, and a shuffle took them apart: each is the first of its task."""
    one = ids_of([(b"a", b"", b"x", 17)], IdScope("copy", "5f1c:7", 0))
    other = ids_of([(b"a", b"", b"y", 17)], IdScope("copy", "5f1c:7", 1))
    assert one != other


def test_another_split_of_the_work_makes_the_same_ids() -> None:
    rows = [(b"a", b"", b"%d" % number, number) for number in range(10)]
    whole = ids_of(rows, IdScope("copy", "5f1c:7", 0))
    halves = ids_of(rows[:5], IdScope("copy", "5f1c:7", 0)) + ids_of(rows[5:], IdScope("copy", "5f1c:7", 1))
    assert whole == halves


def test_sequences_of_two_streams_are_told_apart() -> None:
    made = RowIds(SCOPE)
    found = made.next([b"a"] * 3, [b""] * 3, [b"x"] * 3, [5, 5, 5], ["ORDERS", "REFUNDS", None])
    assert len(set(found)) == 3
    assert found[0].startswith(b"copy:ORDERS:5:")


def test_the_name_of_a_source_cannot_break_a_header() -> None:
    made = RowIds(SCOPE)
    [found] = made.next([b"a"], [b""], [b"x"], [5], ["a\r\nNats-Rollup: all"])
    assert b"\r" not in found
    assert b"\n" not in found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"a", b"", b"x"), (b"b", b"", b"x")),
        ((b"a", b"", b"x"), (b"a", b"", b"y")),
        ((b"a", b"A: 1\r\n", b"x"), (b"a", b"A: 2\r\n", b"x")),
        ((b"a", b"A: 1\r\n", b"x"), (b"a", b"", b"A: 1\r\nx")),
        ((b"a", b"", b""), (b"a", b"x", b"")),
    ],
)
def test_whatever_is_published_counts(one: tuple[bytes, bytes, bytes], other: tuple[bytes, bytes, bytes]) -> None:
    assert ids_of([(*one, 1)]) != ids_of([(*other, 1)])
    assert ids_of([(*one, None)]) != ids_of([(*other, None)])


def test_no_two_rows_of_a_batch_share_an_id_however_they_are_split() -> None:
    chance = random.Random(17)  # noqa: S311 - no secret
    messages = [[b"%d" % chance.randrange(3) for _ in range(4)] for _ in range(200)]
    rows = [(b"s", b"", data, index) for index, datas in enumerate(messages) for data in datas]
    found = ids_of(rows, by=chance.randrange(1, 50))
    assert len(set(found)) == len(rows)
    assert found == ids_of(rows)
