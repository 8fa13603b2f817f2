"""A running app: one worker of a fleet, or one member of a group, for each handler, from its start to its end.

When one of them ends, all do. Handlers stop first, then the app's own `on_stop`, then the connection.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import fields
from typing import Any, TypeVar

from keylane import fleet, groups
from keylane.app.handler import AppHandler
from keylane.app.publishing import Publish, Results, publish_with
from keylane.app.stream_partitions import check_output, partitions_of, stream_of
from keylane.core.run_state import RunState
from keylane.jetstream import Connection, check_seconds, open_publisher, streams
from keylane.processing.handler_hooks import HandlerHooks
from keylane.processing.joined import STOP_TIMEOUT_S, Joined

_log = logging.getLogger("keylane.app")

Lifespan = Callable[[], Awaitable[None]] | Callable[[], None]
HooksOf = Callable[[AppHandler], HandlerHooks]
"""Hooks for a handler: `WorkerHooks` or `MemberHooks`, or what both have."""
_Hooks = TypeVar("_Hooks", bound=HandlerHooks)


class RunningApp(Joined):
    """The handle of an app that has started."""

    def __init__(self, stop_timeout_s: float) -> None:
        super().__init__(stop_timeout_s, _log)
        self.workers: dict[str, fleet.Worker | groups.Member] = {}
        """By `<stream>/<group>`."""
        self.state = RunState.RUNNING
        self._stop_wanted = asyncio.Event()
        self._longest_s = stop_timeout_s
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<RunningApp {self.state}: {', '.join(self.workers) or 'no handlers'}>"

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Finish what is at work, hand everything over, call `on_stop`, and end.

        Handlers that are still at work after `timeout_s` are cancelled.
        """
        self._longest_s = check_seconds(timeout_s, "timeout_s")
        self._stop_wanted.set()
        await asyncio.wait({self._ended})

    def watch(self, stack: AsyncExitStack) -> None:
        """Until the end. `stack`: what is called and closed then."""
        self._watching = asyncio.create_task(self._watch(stack), name="keylane app")

    async def _watch(self, stack: AsyncExitStack) -> None:
        waiting = {asyncio.ensure_future(one.wait()) for one in self.workers.values()}
        stopping = asyncio.ensure_future(self._stop_wanted.wait())
        done, _ = await asyncio.wait({*waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        self.state = RunState.STOPPING
        stopping.cancel()
        first = [one for one in waiting if one in done]
        errors = await _all([one.stop(self._longest_s) for one in self.workers.values()])
        await asyncio.wait(waiting)
        errors += [one.exception() for one in [*first, *(waiting - done)] if not one.cancelled()]
        errors += await _all([stack.aclose()])
        self.state = RunState.ENDED
        found = [error for error in errors if error is not None]
        for error in found[1:]:
            _log.error("the app also ended with: %s", error, exc_info=error)
        if found:
            self._ended.set_exception(found[0])
            self._ended.exception()  # seen: whoever waits gets it, and nobody has to
        else:
            self._ended.set_result("stopped")


async def start_handlers(
    handlers: Iterable[AppHandler],
    connection: Connection,
    *,
    name: str | None,
    create_streams: bool,
    stop_timeout_s: float,
    hooks_of: HooksOf | None,
    stack: AsyncExitStack,
) -> dict[str, fleet.Worker | groups.Member]:
    """Join for every handler. Everything is checked before the first one joins. `stack` ends what was started."""
    publish: Publish | None = None
    prepared = []
    for handler in handlers:
        info = await stream_of(connection, handler, may_create=create_streams)
        results = None
        if handler.publish is not None:
            await check_output(connection, handler)
            if publish is None:
                publish = publish_with(await stack.enter_async_context(open_publisher(connection)))
            created = (await streams.state(connection, handler.stream)).created.isoformat()
            results = Results(handler.publish, publish, created)
        source = await partitions_of(connection, handler, info.config) if handler.member is None else None
        prepared.append((handler, handler.bound(results), source))
    joined: dict[str, fleet.Worker | groups.Member] = {}
    try:
        for handler, function, source in prepared:
            options = {**handler.options, "stop_timeout_s": stop_timeout_s}
            if source is not None:
                joined[handler.name] = await fleet.join(
                    connection,
                    handler.stream,
                    handler.group,
                    function,
                    partitions=source,
                    name=name,
                    hooks=_hooks(fleet.WorkerHooks, handler, hooks_of),
                    **options,
                )
            else:
                assert handler.member is not None
                joined[handler.name] = await groups.join(
                    connection,
                    handler.stream,
                    handler.group,
                    handler.member,
                    function,
                    hooks=_hooks(groups.MemberHooks, handler, hooks_of),
                    **options,
                )
    except BaseException:
        await _all([one.stop(stop_timeout_s) for one in joined.values()])
        raise
    return joined


def _hooks(kind: type[_Hooks], handler: AppHandler, hooks_of: HooksOf | None) -> _Hooks:
    """Those that the handler was decorated with, then those of whoever starts the app."""
    own = _as(kind, handler.hooks)
    return own if hooks_of is None else own.and_also(_as(kind, hooks_of(handler)))


def _as(kind: type[_Hooks], given: HandlerHooks) -> _Hooks:
    return given if isinstance(given, kind) else kind(**{one.name: getattr(given, one.name) for one in fields(given)})


async def called(call: Lifespan) -> None:
    answer = call()
    if inspect.isawaitable(answer):
        await answer


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> list[BaseException | None]:
    """Wait for all of them; what they raised."""
    return [one for one in await asyncio.gather(*work, return_exceptions=True) if isinstance(one, BaseException)]
