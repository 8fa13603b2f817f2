"""Makes one kind of call of every kind of handler: a coroutine, with a time limit if there is one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from keylane.errors import InvalidInput
from keylane.groups.message import GroupMessage

Handler = Callable[[GroupMessage], Awaitable[None]] | Callable[[GroupMessage], None]


def is_coroutine_function(handler: object) -> bool:
    return inspect.iscoroutinefunction(handler) or (
        callable(handler) and inspect.iscoroutinefunction(type(handler).__call__)
    )


def as_coroutine(handler: Handler, time_limit_s: float | None) -> Callable[[GroupMessage], Awaitable[Any]]:
    """A plain function runs in a thread, so that it never blocks the event loop."""
    if not callable(handler):
        raise InvalidInput(f"handler is {handler!r}: give a function of one message")
    if is_coroutine_function(handler):
        coroutine: Callable[[GroupMessage], Awaitable[None]] = handler  # type: ignore[assignment]  # just seen
        return coroutine if time_limit_s is None else _limited(coroutine, time_limit_s)
    if time_limit_s is not None:
        raise InvalidInput(
            "time_limit_s needs an async handler: a plain function runs in a thread, and nothing can end a thread"
        )

    async def in_thread(message: GroupMessage) -> None:
        message.home = asyncio.get_running_loop()
        try:
            result = await asyncio.to_thread(handler, message)
        finally:
            message.home = None
        if inspect.isawaitable(result):
            await result  # a plain function around a coroutine function

    return in_thread


def _limited(
    handler: Callable[[GroupMessage], Awaitable[None]], limit_s: float
) -> Callable[[GroupMessage], Awaitable[None]]:
    async def limited(message: GroupMessage) -> None:
        try:
            async with asyncio.timeout(limit_s) as limit:
                await handler(message)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"the handler was not done within its time_limit_s of {limit_s:g} s") from error

    return limited
