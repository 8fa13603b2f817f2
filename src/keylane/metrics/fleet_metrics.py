"""What a fleet worker does, counted by its hooks.

Counts in plain numbers, once for a batch where that is possible; prometheus-client comes in when somebody asks.
`readings` may be called from another thread: a number that is a moment old is right too.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import pairwise
from threading import Lock
from time import monotonic
from typing import Any

from keylane.fleet import FleetAssignment, Worker, WorkerHooks, WorkerState
from keylane.jetstream import Message
from keylane.metrics.catalogue import LATENCY_BOUNDS_S, STEP_BOUNDS_S, Reading
from keylane.metrics.lag_sampler import LagSampler

_COUNTED_AT_ONCE = 512
_OUTCOMES = ("done", "failed", "dead", "parked", "cancelled", "other")
_CAUSES = {
    r" lost\b": "crash",
    r" (left|leaving)\b": "leave",
    r" joined\b": "join",
    r"\bpartitions?\b|\bweights\b": "partitions",
    r"\bstore\b|\bleader\b": "restore",
    r"^[\d,]+ workers?$": "start",
}
"""What the reason of an assignment says, and the cause that it stands for; the first counts."""
_ACK_WORDS_BEFORE_COUNT = 4


class _Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class FleetMetrics:
    """The metrics of one worker: give its `hooks` to `fleet.join`, and the worker to `watch`.

    >>> metrics = FleetMetrics()
    >>> async with fleet.join(…, hooks=metrics.hooks()) as worker, metrics.watch(worker):
    ...     async with serve_metrics(metrics.readings, port=9464):
    ...         await worker.wait()
    """

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._lag: LagSampler | None = None
        self._messages = 0
        self._redeliveries = 0
        self._outcomes: Counter[str] = Counter()
        self._latencies = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._latency_s = 0.0
        self._seconds: list[float] = []
        """Of handlers that returned, not yet in the buckets."""
        self._counting = Lock()
        self._updates = _Durations()
        self._update_failures = 0
        self._rebalances: Counter[str] = Counter()
        self._rebalance_durations = _Durations()
        self._assignment: FleetAssignment | None = None
        self._wanted: frozenset[str] | None = None
        """What the newest assignment gives to the worker, until it has it."""
        self._assigned_at = 0.0
        self._claims = 0
        self._releases = 0

    def hooks(self, also: WorkerHooks | None = None) -> WorkerHooks:
        """The hooks that count; `also`: hooks of the program's own, which are called as well."""
        mine = WorkerHooks(
            on_delivered=self._delivered,
            on_returned=self._seconds.append,
            on_outcome=self._tried,
            on_partitions=self._partitions_changed,
            on_assignment=self._assigned,
            on_consumer_update=self._consumer_updated,
        )
        return mine.and_also(also) if also is not None else mine

    def watch(self, worker: Worker) -> LagSampler:
        """Sample the lag of this worker while the block runs."""
        self._worker = worker
        self._lag = LagSampler(worker)
        return self._lag

    # ---- hooks ----------------------------------------------------------------------------------------------

    def _delivered(self, batch: list[Message]) -> None:
        self._messages += len(batch)
        if len(self._seconds) >= _COUNTED_AT_ONCE:
            self._count_seconds()
        # `$JS.ACK.<stream>.<consumer>.1.` begins the reply subject of a first delivery: counting these in one text
        # takes a fraction of the time of parsing. Partitions take turns, so it is made anew for each batch.
        first = _beginning(batch[0].reply)
        self._redeliveries += len(batch) - b" ".join([one.reply for one in batch]).count(first)

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

    def _tried(self, outcome: str) -> None:
        self._outcomes[outcome] += 1

    def _assigned(self, assignment: FleetAssignment, mine: frozenset[str]) -> None:
        self._assignment = assignment
        owned = frozenset(self._worker.partitions) if self._worker is not None else frozenset()
        if mine != owned:
            self._rebalances[cause_of(assignment.reason)] += 1
            self._wanted, self._assigned_at = mine, monotonic()

    def _partitions_changed(self, before: tuple[str, ...], after: tuple[str, ...]) -> None:
        self._claims += len(set(after) - set(before))
        self._releases += len(set(before) - set(after))
        if self._wanted is not None and self._wanted == set(after):
            self._wanted = None
            self._rebalance_durations.add(monotonic() - self._assigned_at)

    def _consumer_updated(self, seconds: float, error: Exception | None) -> None:
        if error is not None:
            self._update_failures += 1
        else:
            self._updates.add(seconds)

    # ---- readings -------------------------------------------------------------------------------------------

    def readings(self) -> list[Reading]:
        """What is known now. What is not known is left out."""
        worker = self._worker
        if worker is None:
            return []
        self._count_seconds()
        self._outcomes["done"] = sum(self._latencies)
        labels = {"stream": worker.stream, "fleet": worker.fleet, "worker": worker.id or "none"}
        values: dict[str, Any] = {
            "consumer_messages_total": self._messages,
            "consumer_redeliveries_total": self._redeliveries,
            "consumer_update_duration_seconds": [list(self._updates.counts), self._updates.total_s],
            "consumer_update_failures_total": self._update_failures,
            "consumer_subject_count": len(worker.partitions),
            "handler_latency_seconds": [list(self._latencies), self._latency_s],
            "dead_letters_total": self._outcomes["dead"],
            "retries_total": self._outcomes["failed"],
            "fleet_partitions": len(worker.partitions),
            "fleet_rebalance_duration_seconds": [
                list(self._rebalance_durations.counts),
                self._rebalance_durations.total_s,
            ],
            "fleet_claims_total": self._claims,
            "fleet_releases_total": self._releases,
            "fleet_leader": int(worker.is_leader),
            "fleet_degraded": int(worker.state.is_degraded),
        }
        if worker.consumer_counts is not None:
            values["consumer_update_skipped_total"] = worker.consumer_counts.skipped
            values["consumer_duplicate_subjects_total"] = worker.consumer_counts.duplicates
            values["consumer_subject_limit"] = worker.max_subjects
        if self._assignment is not None:
            values["fleet_assignment_version"] = self._assignment.version
            values["fleet_assignment_epoch"] = self._assignment.epoch
        if self._lag is not None:
            values |= self._lag.values()
        found = [Reading(name, labels, value) for name, value in values.items()]
        others = self._outcomes.total() - sum(self._outcomes[one] for one in _OUTCOMES)
        for outcome in _OUTCOMES:
            count = self._outcomes[outcome] if outcome != "other" else others
            found.append(Reading("handler_tries_total", labels | {"outcome": outcome}, count))
        found.extend(
            Reading("fleet_rebalances_total", labels | {"cause": cause}, self._rebalances[cause])
            for cause in (*_CAUSES.values(), "other")
        )
        found.extend(
            Reading("fleet_worker_state", labels | {"state": state.value}, int(worker.state is state))
            for state in WorkerState
        )
        return found


def cause_of(reason: str) -> str:
    """The cause that the reason of an assignment names.

    >>> cause_of("worker 3 joined"), cause_of("workers 1, 2 lost"), cause_of("something new")
    ('join', 'crash', 'other')
    """
    return next((cause for words, cause in _CAUSES.items() if re.search(words, reason)), "other")


def _beginning(reply: bytes) -> bytes:
    """What the reply subject of a first delivery of the same consumer begins with."""
    words = reply.split(b".")
    before = _ACK_WORDS_BEFORE_COUNT if len(words) < 11 else _ACK_WORDS_BEFORE_COUNT + 2
    return b".".join(words[:before]) + b".1."
