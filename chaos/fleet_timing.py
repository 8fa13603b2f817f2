"""What the evidence of a fleet says about tokens and time: pure arithmetic on lines of handlers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from chaos.causes import AFTER_THAW_S, Trouble
from chaos.evidence import Handled

_AT_WORK_S = 3.0
"""A partition that its owner has not handled anything of for so long is not counted as its own."""


class Move(NamedTuple):
    """A partition went from one worker to another: the last message there and the first one here."""

    partition: int
    before: Handled
    after: Handled

    @property
    def pause_s(self) -> float:
        return self.after.at_s - self.before.at_s


class Stale(NamedTuple):
    """A handler began with a token, and a higher one had been used for the partition before."""

    line: Handled
    highest: int
    by: str
    """Who used the higher one."""
    is_late_start: bool
    """It had just been thawed: no check of a clock can see what happens between the check and the call."""


class Timeline:
    """The lines of each partition, in the order in which handlers ended."""

    def __init__(self, handled: Iterable[Handled]) -> None:
        self.lines: dict[int, list[Handled]] = defaultdict(list)
        for one in handled:
            self.lines[one.partition].append(one)
        self.times = {partition: [one.at_s for one in lines] for partition, lines in self.lines.items()}

    def moves(self) -> list[Move]:
        """In the order of time."""
        found = (
            Move(partition, before, after)
            for partition, lines in self.lines.items()
            for before, after in pairwise(lines)
            if before.by != after.by
        )
        return sorted(found, key=lambda move: move.after.at_s)

    def gap_within(self, partition: int, from_s: float, until_s: float) -> float | None:
        """The longest time without a message that touches this window; None: its owner changed, or it ended there."""
        lines, times = self.lines[partition], self.times[partition]
        first, last = bisect_right(times, from_s) - 1, bisect_left(times, until_s)
        if first < 0 or last >= len(lines) or len({one.by for one in lines[first : last + 1]}) > 1:
            return None
        return max((later - earlier for earlier, later in pairwise(times[first : last + 1])), default=0.0)

    def gaps_of_others(self, moves: Sequence[Move]) -> list[float]:
        """For every move and every partition that stayed with its worker meanwhile: its longest gap."""
        found: list[float] = []
        for from_s, until_s, moved in _windows(moves):
            for partition in self.lines:
                gap = None if partition in moved else self.gap_within(partition, from_s, until_s)
                if gap is not None:
                    found.append(gap)
        return found

    def calm_gaps(self, moves: Sequence[Move]) -> list[float]:
        """The same for windows in which nothing moves, as long as those in which something does."""
        found: list[float] = []
        windows = _windows(moves)
        for (_, begin_s, _), (end_s, _, _) in pairwise(windows):
            middle_s = (begin_s + end_s) / 2
            half_s = 0.05
            if end_s - begin_s > 4 * half_s:
                for partition in self.lines:
                    gap = self.gap_within(partition, middle_s - half_s, middle_s + half_s)
                    if gap is not None:
                        found.append(gap)
        return found

    def returns(self, at_s: float, gone: set[str]) -> dict[int, float | None]:
        """For each partition that one of `gone` had at that moment: until another worker handled a message of it."""
        found: dict[int, float | None] = {}
        for partition, lines in self.lines.items():
            index = bisect_right(self.times[partition], at_s)
            if index and lines[index - 1].by in gone and at_s - lines[index - 1].at_s < _AT_WORK_S:
                after = next((one.at_s - at_s for one in lines[index:] if one.by not in gone), None)
                found[partition] = after
        return found


def _windows(moves: Sequence[Move]) -> list[tuple[float, float, set[int]]]:
    """Moves that overlap in time are one window."""
    made: list[tuple[float, float, set[int]]] = []
    for move in sorted(moves, key=lambda one: one.before.at_s):
        if made and move.before.at_s <= made[-1][1]:
            from_s, until_s, moved = made[-1]
            made[-1] = from_s, max(until_s, move.after.at_s), moved | {move.partition}
        else:
            made.append((move.before.at_s, move.after.at_s, {move.partition}))
    return made


def stale_tokens(handled: Iterable[Handled], frozen: Sequence[Trouble]) -> list[Stale]:
    """Handlers that began with a token lower than one that had begun before on the same partition."""
    highest: dict[int, Handled] = {}
    found = []
    for one in sorted(handled, key=attrgetter("begun_ns")):
        known = highest.get(one.partition)
        if known is not None and one.token < known.token:
            begun_s = one.begun_ns / 1e9
            late = any(each.by == one.by and 0 <= begun_s - each.until_s < AFTER_THAW_S for each in frozen)
            found.append(Stale(one, known.token, known.by, late))
        else:
            highest[one.partition] = one
    return found


def overlaps(handled: Iterable[Handled], frozen: Sequence[Trouble]) -> list[tuple[Handled, Handled]]:
    """Two handlers of one key at work at the same time, neither in a process that stood still."""
    last: dict[str, Handled] = {}
    found = []
    for one in sorted(handled, key=attrgetter("begun_ns")):
        before = last.get(one.key)
        if before is not None and one.begun_ns < before.at_s * 1e9:
            stood = any(
                each.by in (one.by, before.by)
                and each.from_s <= before.at_s
                and one.begun_ns / 1e9 <= each.until_s + AFTER_THAW_S
                for each in frozen
            )
            if not stood:
                found.append((before, one))
        if before is None or one.at_s >= before.at_s:
            last[one.key] = one
    return found
