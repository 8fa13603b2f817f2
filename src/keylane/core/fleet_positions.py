"""Positions of a fleet: where the next owner of a partition begins, and what a worker's record of them keeps.

Every worker writes one record with the positions of its partitions. A position says that everything up to it is
handled, which stays true: the highest of all records counts, and no order of writes can do harm. Two things make it
void: a stream that was made again (its sequences start at 1), and one that was restored to an older state (its last
sequence is lower).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keylane.core.fleet_records import WorkerPositions


def position_of(partition: str, records: Iterable[WorkerPositions], stream_created: str, last_sequence: int) -> int:
    """Up to which sequence a partition is handled, as the records say; 0: nothing is known.

    `last_sequence`: of the stream, read after the records.
    """
    found = (one.positions.get(partition, 0) for one in records if one.stream_created == stream_created)
    highest = max(found, default=0)
    return highest if highest <= last_sequence else 0


def merged(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """The higher position of each partition.

    >>> merged({"0": 5, "1": 9}, {"0": 7, "1": 8})
    {'0': 7, '1': 9}
    """
    return {**before, **{name: max(one, before.get(name, 0)) for name, one in after.items()}}


def pruned(
    positions: Mapping[str, int], owned: Iterable[str], others: Iterable[WorkerPositions], stream_created: str
) -> dict[str, int]:
    """The positions that a worker must keep: those of its own partitions, and what no other record says as well."""
    elsewhere: dict[str, int] = {}
    for one in others:
        if one.stream_created == stream_created:
            elsewhere = merged(elsewhere, one.positions)
    mine = set(owned)
    return {name: one for name, one in positions.items() if name in mine or elsewhere.get(name, -1) < one}
