"""What becomes of messages, counted by the hooks that members, workers and consumers have in common.

Counts in plain numbers, once for a batch where that is possible; prometheus-client comes in when somebody asks.
`values` may be called from another thread: a number that is a moment old is right too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from threading import Lock

from keylane.jetstream import Message
from keylane.metrics.catalogue import LATENCY_BOUNDS_S, STEP_BOUNDS_S, Reading

_COUNTED_AT_ONCE = 512
_OUTCOMES = ("done", "failed", "delayed", "dead", "parked", "cancelled", "other")
_ACK_WORDS_BEFORE_COUNT = 4


class Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        self._total_s += seconds

    @property
    def value(self) -> list[object]:
        """As `Reading` has it."""
        return [list(self._counts), self._total_s]


class HandlerCounts:
    """Counts of one member, worker or consumer. `delivered`, `returned` and `tried` are hooks."""

    def __init__(self) -> None:
        self.messages = 0
        self.redeliveries = 0
        self.outcomes: Counter[str] = Counter()
        self._latencies = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._latency_s = 0.0
        self._seconds: list[float] = []
        """Of handlers that returned, not yet in the buckets."""
        self._counting = Lock()
        self.returned = self._seconds.append

    def delivered(self, batch: list[Message]) -> None:
        """A batch of a consumer."""
        self.arrived(len(batch))
        # `$JS.ACK.<stream>.<consumer>.1.` begins the reply subject of a first delivery: counting these in one text
        # takes a fraction of the time of parsing. Partitions take turns, so it is made anew for each batch.
        first = _beginning(batch[0].reply)
        self.redeliveries += len(batch) - b" ".join([one.reply for one in batch]).count(first)

    def arrived(self, messages: int) -> None:
        self.messages += messages
        if len(self._seconds) >= _COUNTED_AT_ONCE:
            self._count_seconds()

    def tried(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def _count_seconds(self) -> None:
        """Put what has gathered into the buckets. Where messages are many most is in the first: the rest is sorted."""
        with self._counting:
            seconds = self._seconds[:]
            del self._seconds[: len(seconds)]
            slow = sorted([one for one in seconds if one > LATENCY_BOUNDS_S[0]])
            fast = len(seconds) - len(slow)
            below = [fast + bisect_right(slow, bound) for bound in LATENCY_BOUNDS_S]
            counts = (after - before for before, after in pairwise([0, *below, len(seconds)]))
            self._latencies = [old + new for old, new in zip(self._latencies, counts, strict=True)]
            self._latency_s += sum(seconds)

    def latencies(self) -> list[object]:
        """The histogram of handlers that returned, as `Reading` has it."""
        self._count_seconds()
        self.outcomes["done"] = sum(self._latencies)
        return [list(self._latencies), self._latency_s]

    def tries(self, name: str, labels: dict[str, str]) -> Iterator[Reading]:
        """Handler calls by their outcome. Ask for `latencies` first."""
        others = self.outcomes.total() - sum(self.outcomes[one] for one in _OUTCOMES)
        for outcome in _OUTCOMES:
            count = self.outcomes[outcome] if outcome != "other" else others
            yield Reading(name, labels | {"outcome": outcome}, count)


def _beginning(reply: bytes) -> bytes:
    """What the reply subject of a first delivery of the same consumer begins with."""
    words = reply.split(b".")
    before = _ACK_WORDS_BEFORE_COUNT if len(words) < 11 else _ACK_WORDS_BEFORE_COUNT + 2
    return b".".join(words[:before]) + b".1."
