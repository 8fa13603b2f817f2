"""A worker process of `keylane run`: starts the user's app, and reports to the supervisor."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from keylane import fleet, groups
from keylane.app import App, AppHandler, HandlerHooks
from keylane.cli.command import ConnectionOptions
from keylane.cli.fleet.worker import log_to_stderr
from keylane.cli.fleet.worker_reports import WorkerReports
from keylane.errors import InvalidInput
from keylane.jetstream import Connection, connect
from keylane.supervisor import SupervisorLink
from keylane.supervisor.import_path import load_named

TARGET = f"{__name__}:serve"

_AT_WORK = (fleet.WorkerState.ACTIVE, fleet.WorkerState.LEADING)
_MEMBER_AT_WORK = (
    groups.MemberState.READY,
    groups.MemberState.STANDBY,
    groups.MemberState.ACTIVE,
    groups.MemberState.NOT_LISTED,  # a spare, which begins as soon as somebody adds it
    groups.MemberState.NO_PARTITIONS,
)


async def serve(link: SupervisorLink, settings: dict[str, Any]) -> None:
    """Until a signal, or until an error ends the app."""
    app = load_app(settings["app"])
    app.stop_timeout_s = settings["stop_timeout_s"]
    log_to_stderr(as_json=settings["log_json"], worker=settings["name"])
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(await _connect(app, settings["link"]))
        await link.loaded()
        reports = _AppReports(link, app, with_metrics=settings["metrics"], process=settings["name"])
        running = await stack.enter_async_context(
            app.start(connection=connection, name=settings["name"], hooks_of=reports.hooks)
        )
        link.answer("health", lambda: _health(running.workers))
        await reports.watch(running.workers, stack)
        await running.wait()


def load_app(path: str) -> App:
    app = load_named(path, "argument", "app", "shop:app")
    if not isinstance(app, App):
        raise InvalidInput(f"app {path!r} is {app!r}: name a keylane.App")
    if not app.handlers:
        raise InvalidInput(f"app {path!r} has no handlers: decorate functions with @app.handler(…)")
    return app


async def _connect(app: App, link: dict[str, Any] | None) -> Connection:
    """As the command line says, where it says something; else as the app."""
    if link is not None:
        return await ConnectionOptions(**link).connect()
    return await connect(app.url, **app.connection_options)


class _AppReports:
    """Tells the supervisor what happens to all workers and members of the app."""

    def __init__(self, link: SupervisorLink, app: App, *, with_metrics: bool, process: str) -> None:
        self._link = link
        self._waiting = {one.name for one in app.handlers.values()}
        self._metrics: dict[str, Any] = {}
        if with_metrics:
            from keylane.metrics import FleetMetrics, MemberMetrics

            self._metrics = {
                one.name: FleetMetrics() if one.member is None else MemberMetrics(process=process)
                for one in app.handlers.values()
            }
            link.answer("metrics", lambda: [one for metrics in self._metrics.values() for one in metrics.readings()])

    def hooks(self, handler: AppHandler) -> HandlerHooks:
        return self._worker_hooks(handler) if handler.member is None else self._member_hooks(handler)

    def _worker_hooks(self, handler: AppHandler) -> fleet.WorkerHooks:
        mine = WorkerReports(
            self._link, lambda: self._ready(handler.name), lambda: {"group": handler.name}, prefix=f"{handler.name}: "
        ).hooks()
        metrics = self._metrics.get(handler.name)
        return mine if metrics is None else metrics.hooks(mine)

    def _member_hooks(self, handler: AppHandler) -> groups.MemberHooks:
        def state(state: groups.MemberState, waiting_for: str | None) -> None:
            waits = f", waiting for {waiting_for}" if waiting_for else ""
            facts = {"group": handler.name, "state": str(state), "waiting_for": waiting_for}
            self._link.event("state", f"{handler.name}: {state}{waits}", **facts)
            if state in _MEMBER_AT_WORK:
                self._ready(handler.name)

        mine = groups.MemberHooks(on_state=state)
        metrics = self._metrics.get(handler.name)
        return mine if metrics is None else metrics.hooks(mine)

    async def watch(self, workers: dict[str, fleet.Worker | groups.Member], stack: AsyncExitStack) -> None:
        for name, metrics in self._metrics.items():
            sampler = metrics.watch(workers[name])
            if sampler is not None:
                await stack.enter_async_context(sampler)

    def _ready(self, name: str) -> None:
        if name in self._waiting:
            self._waiting.discard(name)
            if not self._waiting:
                self._link.ready("at work")


def _health(workers: dict[str, fleet.Worker | groups.Member]) -> dict[str, Any]:
    """The state of the process is that of its worst worker."""
    found = [_state(one) for one in workers.values()]
    worst = next((one for one in found if one.is_degraded), None) or next(
        (one for one in found if one not in _AT_WORK), fleet.WorkerState.ACTIVE
    )
    handlers = [
        {"group": name, "state": str(one.state), "waiting_for": one.waiting_for} for name, one in workers.items()
    ]
    return {"state": worst, "handlers": handlers}


def _state(one: fleet.Worker | groups.Member) -> fleet.WorkerState:
    if isinstance(one, fleet.Worker):
        return one.state
    return fleet.WorkerState.ACTIVE if one.state in _MEMBER_AT_WORK else fleet.WorkerState.JOINING
