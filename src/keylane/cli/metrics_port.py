"""The options that say where a command serves metrics, and the port of a command that is one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from keylane.cli.event_lines import EventLines
    from keylane.metrics import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """Where metrics are served: one port for everything that the command runs."""

    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", help="Serve /metrics, /healthz and /readyz here; 0: any port."),
    ] = None
    metrics_host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen on this address.")] = "0.0.0.0"  # noqa: S104
    metrics_prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Begin the names of metrics with it; parti_ for dashboards of parti.")
    ] = "keylane_"

    def check(self) -> None:
        if self.metrics_port is not None:
            from keylane.metrics import check_prefix, require_client

            require_client()
            check_prefix(self.metrics_prefix)


@asynccontextmanager
async def metrics_port(
    options: MetricsOptions, readings: Callable[[], list[Reading]], is_ready: Callable[[], bool], lines: EventLines
) -> AsyncIterator[None]:
    """Serve while the block runs, if that is wanted."""
    if options.metrics_port is None:
        yield
        return
    from keylane.metrics import HealthReport, serve_metrics

    async with serve_metrics(
        readings,
        port=options.metrics_port,
        host=options.metrics_host,
        prefix=options.metrics_prefix,
        health=lambda: HealthReport(ready=is_ready()),
    ) as port:
        lines.write("metrics", f"metrics, health and readiness on port {port}", port=port)
        yield
