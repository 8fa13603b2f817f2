"""Which workers of a fleet are set aside because of the trouble that they report.

A worker that cannot change its consumer says so in its lease (layout `worker`): partitions that it was given wait with
it. The leader gives them to others: for `relief_s` the worker gets nothing, then it is tried again.

- Once: a worker is set aside again only `relief_again_s` after the last time, whatever it reports meanwhile.
- A trouble that more than half of the workers have is not theirs, and to move partitions would not help: nobody is set
  aside then, and who was is taken back.
- A worker whose label no other worker without trouble has keeps its partitions: nobody else may have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keylane.core.assignment_strategies import LiveWorker


@dataclass(frozen=True, slots=True)
class Relief:
    """When a worker was last set aside."""

    instance: str
    since_s: float


def relieve(
    before: Mapping[int, Relief],
    live: tuple[LiveWorker, ...],
    troubled: frozenset[int],
    *,
    relief_s: float,
    relief_again_s: float,
    now_s: float,
) -> tuple[dict[int, Relief], frozenset[int]]:
    """What to remember, and who is set aside now."""
    instances = {worker.id: worker.instance for worker in live}
    kept = {
        worker: one
        for worker, one in before.items()
        if instances.get(worker) == one.instance and now_s < one.since_s + relief_again_s
    }
    aside = {worker for worker, one in kept.items() if now_s < one.since_s + relief_s}
    bad = (troubled & instances.keys()) | aside
    if 2 * len(bad) > len(live):
        return kept, frozenset()
    elsewhere = {label for worker in live if worker.id not in bad for label in worker.labels}
    for worker in live:
        if worker.id in troubled and worker.id not in kept and worker.labels <= elsewhere:
            kept[worker.id] = Relief(worker.instance, now_s)
            aside.add(worker.id)
    return kept, frozenset(aside)
