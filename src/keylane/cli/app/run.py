"""`keylane run module:app`: the worker processes of an app, under one supervisor."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from keylane.cli.command import ConnectionOptions, single_command
from keylane.cli.metrics_port import MetricsOptions


def run_app(
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The app, such as shop:app.")],
    *,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Worker processes.")] = 1,
    reload: Annotated[
        bool, typer.Option("--reload", help="Replace the workers when a Python file here changes.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Begin the names of the workers with it; else the host's name.")
    ] = None,
    stop_timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long handlers may take to finish at a stop.")
    ] = 25.0,
    log_json: Annotated[bool, typer.Option("--log-json", help="Print one JSON object for each event.")] = False,
    metrics: MetricsOptions,
    link: ConnectionOptions,
) -> None:
    """Run an app until Ctrl-C or SIGTERM. SIGHUP replaces its workers one by one."""
    from keylane.cli.app.file_changes import calls_on_changes
    from keylane.cli.app.worker import TARGET
    from keylane.cli.command import exit_on_invalid_input
    from keylane.cli.event_lines import EventLines, run_consumer
    from keylane.cli.fleet.supervisor_metrics import served_metrics
    from keylane.cli.fleet.worker import link_settings
    from keylane.supervisor import Supervisor, SupervisorTarget

    with exit_on_invalid_input():
        metrics.check()
    common = {
        "app": app,
        "link": link_settings(link) if link != ConnectionOptions() else None,
        "stop_timeout_s": stop_timeout,
        "log_json": log_json,
        "metrics": metrics.metrics_port is not None,
    }
    prefix = name or socket.gethostname()

    async def run() -> None:
        lines = EventLines(as_json=log_json)
        supervisor = Supervisor(
            SupervisorTarget(function=TARGET, settings=lambda number: common | {"name": f"{prefix}-{number}"}),
            workers,
            report=lambda event, text, facts: lines.write(event, text, **facts),
            stop_timeout_s=stop_timeout,
        )

        def changed(file: Path) -> None:
            lines.write("changed", f"{file} has changed", file=str(file))
            supervisor.roll()

        async with (
            served_metrics(supervisor, "", app, metrics) as port,
            calls_on_changes(Path.cwd(), changed) if reload else nullcontext(),
        ):
            if port is not None:
                lines.write("metrics", f"metrics, health and readiness on port {port}", port=port)
            await supervisor.run()

    with exit_on_invalid_input():
        run_consumer(run())


app = single_command(run_app)
