"""How long a change of membership was felt: pure arithmetic on evidence and plans."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from chaos.evidence import Handled
from keylane.core.plans import Plan


@dataclass(frozen=True, slots=True)
class Change:
    """A membership change; `at_s` is the moment before it was asked for."""

    at_s: float
    verb: Literal["add", "drop"]
    member: str
    before: Plan
    after: Plan

    @property
    def moved(self) -> frozenset[int]:
        return frozenset(move.partition for move in self.after.moves_from(self.before))

    @property
    def untouched(self) -> frozenset[str]:
        """Members that own exactly what they owned."""
        return frozenset(
            member for member, partitions in self.after.shares if self.before.partitions_of(member) == partitions
        )


class Wait(NamedTuple):
    """From a change to the first message on a partition that moved; None: there was none."""

    verb: str
    partition: int
    seconds: float | None


class Gap(NamedTuple):
    """The longest time without a message on a partition that did not move, until the next change."""

    partition: int
    untouched: bool
    """Its member lost and gained nothing."""
    seconds: float


class _Timeline:
    """When each partition's messages were handled, and by whom."""

    def __init__(self, handled: Iterable[Handled]) -> None:
        self.times: dict[int, list[float]] = defaultdict(list)
        self.hands: dict[int, list[str]] = defaultdict(list)
        for one in handled:
            self.times[one.partition].append(one.at_s)
            self.hands[one.partition].append(one.by)

    def last_before(self, partition: int, at_s: float) -> str | None:
        index = bisect_left(self.times[partition], at_s) - 1
        return self.hands[partition][index] if index >= 0 else None


def waits(changes: Sequence[Change], handled: Iterable[Handled]) -> list[Wait]:
    """For every change and every moved partition: until its owner at that moment handled a message of it.

    A partition may move again before its new owner got to it: then the next owner's first message ends the wait.
    """
    line = _Timeline(handled)
    starts = [one.at_s for one in changes]

    def owner(partition: int, at_s: float) -> str | None:
        return changes[bisect_right(starts, at_s) - 1].after.owner_of(partition)

    found = []
    for change in changes:
        for partition in sorted(change.moved):
            times, hands = line.times[partition], line.hands[partition]
            first = next(
                (
                    times[index]
                    for index in range(bisect_left(times, change.at_s), len(times))
                    if hands[index] == owner(partition, times[index])
                ),
                None,
            )
            found.append(Wait(change.verb, partition, None if first is None else first - change.at_s))
    return found


def gaps(changes: Sequence[Change], handled: Iterable[Handled], end_s: float) -> list[Gap]:
    """For every change and every partition that stayed. `end_s`: when publishing ended.

    A partition that its owner had not got to yet before the change is left out: it waits for an earlier one.
    """
    line = _Timeline(handled)
    ends = [*(one.at_s for one in changes[1:]), end_s]
    found = []
    for change, until_s in zip(changes, ends, strict=True):
        moved, untouched = change.moved, change.untouched
        for partition in change.after.partitions:
            owner = change.after.owner_of(partition)
            if partition in moved or line.last_before(partition, change.at_s) != owner:
                continue
            times = line.times[partition]
            inside = times[bisect_left(times, change.at_s) : bisect_right(times, until_s)]
            edges = [change.at_s, *inside, until_s]
            longest = max(later - earlier for earlier, later in pairwise(edges))
            found.append(Gap(partition, owner in untouched, longest))
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed.

    >>> percentile([4, 1, 3, 2], 0.5)
    2
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(seconds: Sequence[float | None]) -> dict[str, float | int | None]:
    """Milliseconds: median, 95th percentile and longest; `never` counts what did not end."""
    ended = [one * 1000 for one in seconds if one is not None]
    never = len(seconds) - len(ended)
    if not ended:
        return {"count": len(seconds), "never": never, "p50": None, "p95": None, "max": None}
    return {
        "count": len(seconds),
        "never": never,
        "p50": round(percentile(ended, 0.5), 1),
        "p95": round(percentile(ended, 0.95), 1),
        "max": round(max(ended), 1),
    }
