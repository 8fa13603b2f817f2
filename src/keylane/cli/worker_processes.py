"""The worker processes of `keylane run` and `keylane fleet run`: one supervisor, one line for each event, one port."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keylane.cli.metrics_port import MetricsOptions


def run_workers(
    target: str,
    settings: dict[str, Any],
    *,
    workers: int,
    name: str | None,
    log_json: bool,
    stop_timeout_s: float,
    metrics: MetricsOptions,
    labels: tuple[str, str],
    reload_from: Path | None = None,
) -> None:
    """Run `target` in each of the processes until a signal. `settings`: for all of them, and each gets a name.

    `labels`: of the metrics, stream and group. `reload_from`: the workers are replaced when a Python file below
    it changes.
    """
    from keylane.cli.app.file_changes import calls_on_changes
    from keylane.cli.command import exit_on_invalid_input
    from keylane.cli.event_lines import EventLines, run_consumer
    from keylane.cli.fleet.supervisor_metrics import served_metrics
    from keylane.supervisor import Supervisor, SupervisorTarget

    prefix = name or socket.gethostname()
    common = settings | {"log_json": log_json, "metrics": metrics.metrics_port is not None}

    async def run() -> None:
        lines = EventLines(as_json=log_json)
        supervisor = Supervisor(
            SupervisorTarget(function=target, settings=lambda number: common | {"name": f"{prefix}-{number}"}),
            workers,
            report=lambda event, text, facts: lines.write(event, text, **facts),
            stop_timeout_s=stop_timeout_s,
        )

        def changed(file: Path) -> None:
            lines.write("changed", f"{file} has changed", file=str(file))
            supervisor.roll()

        async with (
            served_metrics(supervisor, *labels, metrics) as port,
            calls_on_changes(reload_from, changed) if reload_from is not None else nullcontext(),
        ):
            if port is not None:
                lines.write("metrics", f"metrics, health and readiness on port {port}", port=port)
            await supervisor.run()

    with exit_on_invalid_input():
        run_consumer(run())
