"""What members wrote down, and what was sent: read, put in order, judged.

The verdict is `keylane.testing.judge`'s, which knows nothing of groups. This adds where each fault lies.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from keylane.core.partitions import partition_number
from keylane.testing import Effect, Verdict, judge

MOST_EXPLAINED = 20


class Handled(NamedTuple):
    """One line of evidence."""

    at_s: float
    key: str
    partition: int
    sequence: int
    by: str


class Happening(NamedTuple):
    """Something that was done to the group, for the explanation of a fault that followed."""

    at_s: float
    what: str


def read(file: Path, by: str, partitions: int) -> list[Handled]:
    """The evidence of one process, oldest first. The last token of a subject is the key.

    A last line that a kill cut short is left out: it was not written.
    """
    found = []
    places: dict[bytes, tuple[str, int]] = {}
    for line in file.read_bytes().split(b"\n")[:-1]:
        if line == b"ready":
            continue
        at_ns, subject, sequence, _ = line.split(b" ")
        place = places.get(subject)
        if place is None:
            key = subject.decode().rpartition(".")[2]
            place = places[subject] = key, partition_number(key, partitions)
        found.append(Handled(int(at_ns) / 1e9, *place, int(sequence), by))
    return found


def merged(logs: Iterable[Sequence[Handled]]) -> list[Handled]:
    """All evidence in the order in which it happened."""
    return list(heapq.merge(*logs, key=attrgetter("at_s")))


def verdict(sent: Iterable[int], handled: Iterable[Handled]) -> Verdict:
    return judge(sent, (Effect(one.key, one.sequence, one.by) for one in handled))


def explained(
    found: Verdict,
    handled: Iterable[Handled],
    keys: Mapping[int, str],
    happenings: Sequence[Happening],
    start_s: float,
) -> list[str]:
    """One line for each of the first faults: who handled the message and when, and what had happened before."""
    faults = [
        (name, sequence)
        for name, sequences in (
            ("lost", found.lost),
            ("duplicated", found.duplicated),
            ("out of order", found.out_of_order),
            ("unknown", found.unknown),
        )
        for sequence in sequences
    ][:MOST_EXPLAINED]
    wanted = {sequence for _, sequence in faults}
    by_sequence: dict[int, list[Handled]] = defaultdict(list)
    for one in handled:
        if one.sequence in wanted:
            by_sequence[one.sequence].append(one)
    lines = []
    for name, sequence in faults:
        times = by_sequence[sequence]
        who = ", ".join(f"{one.by} at {one.at_s - start_s:.3f} s" for one in times) or "nobody"
        before = [one for one in happenings if times and one.at_s <= times[-1].at_s]
        after = f"; after {before[-1].what} at {before[-1].at_s - start_s:.3f} s" if before else ""
        lines.append(f"{name}: {sequence} of key {keys.get(sequence, '?')}: {who}{after}")
    return lines
