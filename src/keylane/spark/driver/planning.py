"""Cuts the range of a batch into pieces, one for each task. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from keylane.spark.driver.options import SplitBy

SEQUENCES_A_PIECE = 250_000
MOST_PIECES = 32
"""What a read by sequence is cut into where `minPartitions` says nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """(after, upto] of what matches a filter; None is the whole stream. `last` is the newest that matches it."""

    subject_filter: str | None
    after: int
    upto: int
    last: int


def plan(
    after: int,
    upto: int,
    newest: Mapping[str | None, int],
    *,
    split_by: SplitBy,
    min_partitions: int | None = None,
) -> list[Piece]:
    """The pieces of (after, upto]: each message that matches a filter is in exactly one of them.

    `newest` has the last sequence of each filter, asked for when `upto` was in the stream already. A filter with
    nothing behind `after` gets no piece.

    >>> plan(0, 100, {"0.>": 98, "1.>": 100, "2.>": 0}, split_by="partition")
    [Piece(subject_filter='0.>', after=0, upto=98, last=98), Piece(subject_filter='1.>', after=0, upto=100, last=100)]
    """
    live = {one: last for one, last in newest.items() if last > after}
    if not live or upto <= after:
        return []
    wanted = min_partitions or (_usual(upto - after) if split_by == "sequence" else 1)
    cuts = -(-wanted // len(live))
    return [
        Piece(one, low, high, last) for one, last in live.items() for low, high in _cut(after, min(upto, last), cuts)
    ]


def _usual(sequences: int) -> int:
    return min(MOST_PIECES, -(-sequences // SEQUENCES_A_PIECE))


def _cut(after: int, upto: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Neighbouring ranges of nearly the same length, none of them empty."""
    span = upto - after
    pieces = min(pieces, span)
    for index in range(pieces):
        yield after + span * index // pieces, after + span * (index + 1) // pieces
