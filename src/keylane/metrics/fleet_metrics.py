"""What a fleet worker does, counted by its hooks."""

from __future__ import annotations

import re
from collections import Counter
from time import monotonic
from typing import Any

from keylane.fleet import FleetAssignment, Worker, WorkerHooks, WorkerState
from keylane.groups import GroupMessage
from keylane.metrics.catalogue import Reading
from keylane.metrics.handler_counts import Durations, HandlerCounts
from keylane.metrics.lag_sampler import LagSampler

_CAUSES = {
    r" lost\b": "crash",
    r" (left|leaving)\b": "leave",
    r" joined\b": "join",
    r"\bpartitions?\b|\bweights\b": "partitions",
    r"\bstore\b|\bleader\b": "restore",
    r"^[\d,]+ workers?$": "start",
}
"""What the reason of an assignment says, and the cause that it stands for; the first counts."""


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
        self._counts = HandlerCounts()
        self._updates = Durations()
        self._update_failures = 0
        self._rebalances: Counter[str] = Counter()
        self._rebalance_durations = Durations()
        self._assignment: FleetAssignment | None = None
        self._wanted: frozenset[str] | None = None
        """What the newest assignment gives to the worker, until it has it."""
        self._assigned_at = 0.0
        self._claims = 0
        self._releases = 0
        self._resets = 0
        self._crowded = 0

    def hooks(self, also: WorkerHooks | None = None) -> WorkerHooks:
        """The hooks that count; `also`: hooks of the program's own, which are called as well."""
        mine = WorkerHooks(
            on_delivered=self._counts.delivered,
            on_returned=self._counts.returned,
            on_outcome=self._counts.tried,
            on_reset=self._was_reset,
            on_crowded=self._was_crowded,
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

    def _was_reset(self) -> None:
        self._resets += 1

    def _was_crowded(self, _message: GroupMessage, _length: int) -> None:
        self._crowded += 1

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
        counts = self._counts
        labels = {"stream": worker.stream, "fleet": worker.fleet, "worker": worker.id or "none"}
        values: dict[str, Any] = {
            "handler_latency_seconds": counts.latencies(),
            "consumer_messages_total": counts.messages,
            "consumer_redeliveries_total": counts.redeliveries,
            "consumer_update_duration_seconds": self._updates.value,
            "consumer_update_failures_total": self._update_failures,
            "consumer_subject_count": len(worker.partitions),
            "dead_letters_total": counts.outcomes["dead"],
            "retries_total": counts.outcomes["failed"] + counts.outcomes["delayed"],
            "fleet_resets_total": self._resets,
            "fleet_crowded_lanes_total": self._crowded,
            "fleet_partitions": len(worker.partitions),
            "fleet_rebalance_duration_seconds": self._rebalance_durations.value,
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
        found.extend(counts.tries("handler_tries_total", labels))
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
