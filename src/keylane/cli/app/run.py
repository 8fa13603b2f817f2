"""`keylane run module:app`: the worker processes of an app, under one supervisor."""

from __future__ import annotations

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
    from keylane.cli.app.worker import TARGET
    from keylane.cli.command import exit_on_invalid_input
    from keylane.cli.fleet.worker import link_settings
    from keylane.cli.worker_processes import run_workers

    with exit_on_invalid_input():
        metrics.check()
    settings = {
        "app": app,
        "link": link_settings(link) if link != ConnectionOptions() else None,
        "stop_timeout_s": stop_timeout,
    }
    run_workers(
        TARGET,
        settings,
        workers=workers,
        name=name,
        log_json=log_json,
        stop_timeout_s=stop_timeout,
        metrics=metrics,
        labels=("", app),
        reload_from=Path.cwd() if reload else None,
    )


app = single_command(run_app)
