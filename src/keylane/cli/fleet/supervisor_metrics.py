"""The metrics and the health of all workers of `keylane fleet run` or `keylane run`, on one port.

The supervisor asks every worker when it is asked itself. A worker that does not answer in time is left out: its series
are absent, not 0.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from keylane.supervisor import Supervisor

if TYPE_CHECKING:
    from keylane.cli.metrics_port import MetricsOptions
    from keylane.metrics import HealthReport, Reading


@asynccontextmanager
async def served_metrics(
    supervisor: Supervisor, stream: str, fleet: str, options: MetricsOptions
) -> AsyncIterator[int | None]:
    """Serve while the block runs; yields the port, or None if metrics are not wanted.

    `stream`, `fleet`: the labels of the supervisor's own metrics.
    """
    if options.metrics_port is None:
        yield None
        return
    from keylane.metrics import Reading, serve_metrics

    labels = {"stream": stream, "fleet": fleet}

    async def readings() -> list[Reading]:
        found = [Reading(*one) for answer in (await supervisor.ask("metrics")).values() for one in answer or ()]
        own = {
            "supervisor_workers": len(supervisor.ready),
            "supervisor_workers_ready": sum(supervisor.ready),
            "supervisor_restarts_total": supervisor.restarts,
            "supervisor_crash_loops": len(supervisor.crash_loops),
        }
        return found + [Reading(name, labels, value) for name, value in own.items()]

    async with serve_metrics(
        readings,
        port=options.metrics_port,
        host=options.metrics_host,
        prefix=options.metrics_prefix,
        health=lambda: _health(supervisor),
    ) as port:
        yield port


async def _health(supervisor: Supervisor) -> HealthReport:
    from keylane.fleet import WorkerState
    from keylane.metrics import HealthReport

    answers = await supervisor.ask("health")
    at_work = {WorkerState.ACTIVE.value, WorkerState.LEADING.value}
    degraded = [
        f"worker {number}: {answer['state']}"
        for number, answer in answers.items()
        if answer is not None and WorkerState(answer["state"]).is_degraded
    ]
    silent = [f"worker {number}: no answer" for number, answer in answers.items() if answer is None]
    return HealthReport(
        failed=len(supervisor.crash_loops) == len(answers),
        ready=all(answer is not None and answer["state"] in at_work for answer in answers.values())
        and all(supervisor.ready),
        degraded=(*degraded, *(silent if all(supervisor.ready) else ()), *supervisor.crash_loops),
        details={"workers": list(answers.values())},
    )
