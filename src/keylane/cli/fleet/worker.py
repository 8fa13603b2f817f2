"""A worker process of `keylane fleet run`: joins the fleet with the user's handler, and reports to the supervisor."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane import fleet
from keylane.cli.command import ConnectionOptions
from keylane.cli.formatting import as_utc
from keylane.core.fleet_partitions import source_from_wire
from keylane.core.plans import ranges
from keylane.supervisor import SupervisorLink
from keylane.supervisor.import_path import load_handler

if TYPE_CHECKING:
    from keylane.metrics import FleetMetrics

TARGET = f"{__name__}:serve"

_AT_WORK = (fleet.WorkerState.ACTIVE, fleet.WorkerState.LEADING)
_NO_PARTITIONS_S = 3.0
"""A worker that gets no partitions is at work too: there may be more workers than partitions."""
_ONE_CHANGE_S = 0.1


def link_settings(link: ConnectionOptions) -> dict[str, Any]:
    """The options of a connection as JSON can hold them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(link).items()}


async def serve(link: SupervisorLink, settings: dict[str, Any]) -> None:
    """Until a signal, or until an error ends the worker."""
    handler = load_handler(settings["handler"])
    source: Any = source_from_wire(settings["source"])  # `join` refuses what it does not take
    _log_to_stderr(as_json=settings["log_json"], worker=settings["name"])
    async with await ConnectionOptions(**settings["link"]).connect() as connection:
        await link.loaded()
        reports = _WorkerReports(link)
        hooks = fleet.FleetHooks(on_state=reports.state, on_partitions=reports.partitions)
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
            reports.worker = worker
            link.answer("health", lambda: {"id": worker.id, "state": worker.state, "waiting_for": worker.waiting_for})
            async with metrics.watch(worker) if metrics is not None else nullcontext():
                await worker.wait()


def _metrics_for(link: SupervisorLink) -> FleetMetrics:
    from keylane.metrics import FleetMetrics

    metrics = FleetMetrics()
    link.answer("metrics", metrics.readings)
    return metrics


class _WorkerReports:
    """Tells the supervisor what happens to the worker."""

    worker: fleet.Worker

    def __init__(self, link: SupervisorLink) -> None:
        self._link = link
        self._is_ready = False
        self._timer: asyncio.TimerHandle | None = None
        self._shown: tuple[str, str | None] | None = None
        self._before: tuple[str, ...] | None = None
        """What the worker owned before the changes that are not reported yet."""

    def state(self, state: fleet.WorkerState, waiting_for: str | None) -> None:
        if state is fleet.WorkerState.LEFT:
            self.report_partitions()
        waits = f", waiting for {waiting_for}" if waiting_for else ""
        if self._shown != (state, waiting_for):
            self._shown = (state, waiting_for)
            self._link.event("state", f"{state}{waits}", state=str(state), waiting_for=waiting_for)
        if state in _AT_WORK and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_NO_PARTITIONS_S, self._ready)

    def partitions(self, before: tuple[str, ...], after: tuple[str, ...]) -> None:
        """Partitions come and go one by one: a change of many is one event."""
        if self._before is None:
            self._before = before
            asyncio.get_running_loop().call_later(_ONE_CHANGE_S, self.report_partitions)
        if after:
            self._ready()

    def report_partitions(self) -> None:
        before, self._before = self._before, None
        after = self.worker.partitions
        if before is not None and before != after:
            text = f"owns {owns(after)} (before: {owns(before)})"
            self._link.event("partitions", text, id=self.worker.id, before=list(before), after=list(after))

    def _ready(self) -> None:
        if not self._is_ready and self.worker.state in _AT_WORK:
            self._is_ready = True
            self._link.ready(f"at work as {self.worker.id}", id=self.worker.id)


def owns(partitions: tuple[str, ...]) -> str:
    """Partitions in few words: `0-7, 9`."""
    if not partitions:
        return "nothing"
    if all(one.isdecimal() for one in partitions):
        return ranges(sorted(map(int, partitions)))
    return ", ".join(partitions)


def _log_to_stderr(*, as_json: bool, worker: str) -> None:
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
        return json.dumps(line)
