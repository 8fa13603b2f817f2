"""Why a message was handled twice: the trouble that made it so, if there is one. Pure.

A message is handled twice because the ack of the first time did not get through, or because whoever had it stood still
while another took over. So the trouble must be that of the instance that was first or second, or the server's, and it
must lie where it can have mattered.

Or because the server copied it into the group's queue twice: after a restart it may go on copying from further back
than it had come (nats-server 2.15.1). Copies are made in the order of the source, so the queue shows it: a message that
stands behind a later one of the source, or behind itself, was copied again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from chaos.evidence import Fails, Handled, Log

BEFORE_S = 1.0
"""An ack may be under way for so long on a busy machine before it is lost with its process or its server."""
AFTER_THAW_S = 2.0
"""Until a process that stood still has finished what it was in the midst of, and knows that it is too late."""
AFTER_LINK_S = 0.5
"""Until a process that has its link again knows what the restarted server has, and what it does not."""


class Trouble(NamedTuple):
    """What befell one process. `by`: the very process, or "server" for all."""

    kind: Literal["kill", "freeze", "server", "cut", "lease", "copied again"]
    by: str
    from_s: float
    until_s: float


class Pair(NamedTuple):
    """Two effects of one message, one after the other."""

    first: Handled
    second: Handled


@dataclass(slots=True)
class Causes:
    """Every repeated effect, with its cause or without one."""

    explained: list[tuple[Pair, Trouble]] = field(default_factory=list)
    unexplained: list[Pair] = field(default_factory=list)

    @property
    def sequences_unexplained(self) -> set[int]:
        return {pair.first.sequence for pair in self.unexplained}

    @property
    def sequences_explained(self) -> set[int]:
        return {pair.first.sequence for pair, _ in self.explained} - self.sequences_unexplained

    def by_kind(self) -> dict[str, int]:
        return dict(Counter(trouble.kind for _, trouble in self.explained))


def find(duplicated: Iterable[int], handled: Iterable[Handled], troubles: Sequence[Trouble]) -> Causes:
    """`handled` in the order in which it happened."""
    wanted = set(duplicated)
    handled = list(handled)
    copies = Copies(handled)
    effects: Mapping[int, list[Handled]] = defaultdict(list)
    for one in handled:
        if one.sequence in wanted:
            effects[one.sequence].append(one)
    found = Causes()
    for sequence in sorted(effects):
        for first, second in pairwise(effects[sequence]):
            pair = Pair(first, second)
            reasons = [one for one in troubles if explains(one, pair)]
            if not reasons and copies.is_copied_again(second):
                reasons = [one._replace(kind="copied again") for one in troubles if _restarted_between(one, pair)]
            if reasons:
                found.explained.append((pair, min(reasons, key=lambda one: _distance_s(one, pair))))
            else:
                found.unexplained.append(pair)
    return found


class Copies:
    """The group's queue, as far as handlers saw it."""

    def __init__(self, handled: Iterable[Handled]) -> None:
        seen = sorted((one.queue_sequence, one.sequence) for one in handled if one.queue_sequence)
        self._places = [place for place, _ in seen]
        self._furthest = list(accumulate((sequence for _, sequence in seen), max))

    def is_copied_again(self, one: Handled) -> bool:
        """Whether it, or a later message of the source, stands before it in the queue."""
        before = bisect_left(self._places, one.queue_sequence)
        return before > 0 and self._furthest[before - 1] >= one.sequence


def uncounted(logs: Iterable[Log], troubles: Sequence[Trouble]) -> list[Fails]:
    """Tries that failed on purpose and were not told as failures, though nothing befell their process.

    A process that is killed, frozen or loses its pin meanwhile says nothing: the message is another's by then.
    """
    found = []
    for log in logs:
        told = Counter(one.sequence for one in log.failed) + Counter(one.sequence for one in log.crashed)
        for one in reversed(log.fails):
            if told[one.sequence]:
                told[one.sequence] -= 1
            elif not any(abs(one.at_s - at_s) < AFTER_THAW_S for at_s in log.lost) and not any(
                trouble.by == one.by and trouble.from_s - BEFORE_S <= one.at_s <= trouble.until_s + AFTER_THAW_S
                for trouble in troubles
            ):
                found.append(one)
    return found


def _restarted_between(trouble: Trouble, pair: Pair) -> bool:
    return trouble.kind == "server" and trouble.until_s >= pair.first.at_s and trouble.from_s <= pair.second.at_s


def felt(restart: Trouble, linked: Mapping[str, Sequence[float]]) -> list[Trouble]:
    """A restart of the server as each process felt it: until it had its link again, its acks went nowhere.

    `linked`: when each process got its link back. One that never did afterwards felt it until the server was up.
    """
    return [
        Trouble("server", by, restart.from_s, next((at_s for at_s in times if at_s > restart.from_s), restart.until_s))
        for by, times in linked.items()
    ]


def explains(trouble: Trouble, pair: Pair) -> bool:
    first, second = pair
    if second.at_s < trouble.from_s:
        return False
    if trouble.kind in ("server", "cut", "lease"):
        return trouble.by == first.by and trouble.from_s - BEFORE_S <= first.at_s <= trouble.until_s + AFTER_LINK_S
    if trouble.kind == "kill":
        return trouble.by == first.by and trouble.from_s - BEFORE_S <= first.at_s <= trouble.until_s
    if trouble.by == first.by:
        return trouble.from_s - BEFORE_S <= first.at_s <= trouble.until_s + AFTER_THAW_S
    if trouble.by == second.by:
        return first.at_s >= trouble.from_s and trouble.until_s <= second.at_s <= trouble.until_s + AFTER_THAW_S
    return False


def _distance_s(trouble: Trouble, pair: Pair) -> float:
    """From the trouble to the effect that it concerns: the nearest one is named."""
    at_s = pair.second.at_s if trouble.by == pair.second.by != pair.first.by else pair.first.at_s
    return max(trouble.from_s - at_s, at_s - trouble.until_s, 0.0)
