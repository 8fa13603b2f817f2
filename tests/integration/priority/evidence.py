"""The judge of these tests: what handlers wrote down against what was published, and nothing else.

It knows no feed, no pin and no server. A log is a list of `Line`s, one per handler start, oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Line(NamedTuple):
    """A handler began to work on a stream sequence. `at` is a clock that all processes share."""

    at: float
    by: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Findings:
    """Sequences, each with the fault that was found in it."""

    lost: tuple[int, ...]
    duplicated: tuple[int, ...]
    out_of_order: tuple[int, ...]
    invented: tuple[int, ...]

    @property
    def in_order_and_complete(self) -> bool:
        """Repeats are allowed, everything else is not."""
        return not (self.lost or self.out_of_order or self.invented)

    @property
    def exactly_once(self) -> bool:
        """Nothing is lost and nothing repeated, in whatever order."""
        return not (self.lost or self.duplicated or self.invented)

    @property
    def exactly_once_in_order(self) -> bool:
        return self.in_order_and_complete and self.exactly_once


def judge(published: Iterable[int], *logs: Iterable[Line]) -> Findings:
    """Put the logs together by time and name every sequence that is lost, repeated, late or from nowhere.

    Late is a sequence whose first start comes after the first start of a higher one.
    """
    expected = set(published)
    seen: set[int] = set()
    repeated: set[int] = set()
    late: list[int] = []
    highest = 0
    for line in sorted(line for log in logs for line in log):
        if line.sequence in seen:
            repeated.add(line.sequence)
            continue
        seen.add(line.sequence)
        if line.sequence < highest:
            late.append(line.sequence)
        highest = max(highest, line.sequence)
    return Findings(
        lost=tuple(sorted(expected - seen)),
        duplicated=tuple(sorted(repeated)),
        out_of_order=tuple(late),
        invented=tuple(sorted(seen - expected)),
    )


def descents(log: Sequence[Line]) -> list[tuple[int, int]]:
    """Neighbours of one log where the sequence does not rise: (before, after)."""
    return [(one.sequence, two.sequence) for one, two in pairwise(log) if two.sequence <= one.sequence]


def receivers(logs: Mapping[str, Sequence[Line]]) -> list[str]:
    """Who handled anything at all."""
    return sorted(name for name, log in logs.items() if log)
