"""A worker process of `keylane fleet run`: joins the fleet with the user's handler, and reports to the supervisor."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane import fleet
from keylane.cli.command import ConnectionOptions
from keylane.cli.fleet.worker_reports import WorkerReports
from keylane.cli.formatting import as_utc, json_text
from keylane.core.fleet_partitions import source_from_wire
from keylane.supervisor import SupervisorLink
from keylane.supervisor.import_path import load_handler

if TYPE_CHECKING:
    from keylane.metrics import FleetMetrics

TARGET = f"{__name__}:serve"


def link_settings(link: ConnectionOptions) -> dict[str, Any]:
    """The options of a connection as JSON can hold them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(link).items()}


async def serve(link: SupervisorLink, settings: dict[str, Any]) -> None:
    """Until a signal, or until an error ends the worker."""
    handler = load_handler(settings["handler"])
    source: Any = source_from_wire(settings["source"])  # `join` refuses what it does not take
    log_to_stderr(as_json=settings["log_json"], worker=settings["name"])
    async with ConnectionOptions(**settings["link"]).open() as connection:
        await link.loaded()
        reports = WorkerReports(
            link, lambda: link.ready(f"at work as {worker.id}", id=worker.id), lambda: {"id": worker.id}
        )
        hooks = reports.hooks()
        metrics = _metrics_for(link) if settings["metrics"] else None
        async with fleet.join(
            connection,
            settings["stream"],
            settings["fleet"],
            handler,
            partitions=source,
            name=settings["name"],
            hooks=hooks if metrics is None else metrics.hooks(hooks),
            **settings["join"],
        ) as worker:
            link.answer("health", lambda: {"id": worker.id, "state": worker.state, "waiting_for": worker.waiting_for})
            async with metrics.watch(worker) if metrics is not None else nullcontext():
                await worker.wait()


def _metrics_for(link: SupervisorLink) -> FleetMetrics:
    from keylane.metrics import FleetMetrics

    metrics = FleetMetrics()
    link.answer("metrics", metrics.readings)
    return metrics


def log_to_stderr(*, as_json: bool, worker: str) -> None:
    """Unless the user's module has set up logging: what it logs from INFO on, and keylane's warnings."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonLines(worker) if as_json else logging.Formatter(f"%(asctime)s {worker} %(levelname)s %(message)s")
    )
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("keylane").setLevel(logging.WARNING)  # its states are events of the supervisor


class _JsonLines(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": as_utc(datetime.fromtimestamp(record.created, UTC)),
            "event": "log",
            "name": self._worker,
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_text(line)
