"""Positions of a fleet: where the next owner of a partition begins, and what a worker's record of them keeps.

Every worker writes one record with the positions of its partitions. A position says that everything up to it is
handled, which stays true: the highest of all records counts, and no order of writes can do harm. Two things make it
void: a stream that was made again (its sequences start at 1), and one that was restored to an older state (its last
sequence is lower).

What is handled above a message that fails is written when its partition is given away: the next owner passes over it.
That stays true as well: what one record says is handled, is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keylane.core.fleet_records import HandledBut, WorkerPositions


def position_of(partition: str, records: Iterable[WorkerPositions], stream_created: str, last_sequence: int) -> int:
    """Up to which sequence a partition is handled, as the records say; 0: nothing is known.

    `last_sequence`: of the stream, read after the records.
    """
    found = (one.positions.get(partition, 0) for one in records if one.stream_created == stream_created)
    highest = max(found, default=0)
    return highest if highest <= last_sequence else 0


def gap_of(
    partition: str, records: Iterable[WorkerPositions], stream_created: str, last_sequence: int
) -> HandledBut | None:
    """What is handled of a partition above its position, as the records say; None: nothing."""
    found = (one.gaps.get(partition) for one in records if one.stream_created == stream_created)
    gap = None
    for one in found:
        if one is not None and one.upto <= last_sequence:
            gap = both_gaps(gap, one)
    return gap


def both_gaps(first: HandledBut | None, second: HandledBut) -> HandledBut:
    """What either of them says is handled.

    >>> both_gaps(HandledBut(9, frozenset({3, 7})), HandledBut(5, frozenset({3, 4})))
    HandledBut(upto=9, sequences=frozenset({3, 7}))
    """
    if first is None:
        return second
    either = first.sequences | second.sequences
    left = frozenset(one for one in either if not first.covers(one) and not second.covers(one))
    return HandledBut(max(first.upto, second.upto), left)


def merged_gaps(
    before: Mapping[str, HandledBut], after: Mapping[str, HandledBut], positions: Mapping[str, int]
) -> dict[str, HandledBut]:
    """Both, without those that a position has passed."""
    found = {**before, **{name: both_gaps(before.get(name), one) for name, one in after.items()}}
    return {name: one for name, one in found.items() if one.upto > positions.get(name, 0)}


def merged(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """The higher position of each partition.

    >>> merged({"0": 5, "1": 9}, {"0": 7, "1": 8})
    {'0': 7, '1': 9}
    """
    return {**before, **{name: max(one, before.get(name, 0)) for name, one in after.items()}}


def highest_of(records: Iterable[WorkerPositions], stream_created: str) -> dict[str, int]:
    """The highest position of each partition that the records name."""
    highest: dict[str, int] = {}
    for one in records:
        if one.stream_created == stream_created:
            highest = merged(highest, one.positions)
    return highest


def pruned(
    positions: Mapping[str, int], owned: Iterable[str], others: Iterable[WorkerPositions], stream_created: str
) -> dict[str, int]:
    """The positions that a worker must keep: those of its own partitions, and what no other record says as well."""
    elsewhere = highest_of(others, stream_created)
    mine = set(owned)
    return {name: one for name, one in positions.items() if name in mine or elsewhere.get(name, -1) < one}
