"""Makes one kind of call of every kind of handler: awaited with a message, with a time limit if there is one.

An async function runs in the task of whoever calls it. A plain function runs in a thread or, with `executor="process"`,
in a process, so that it never blocks the event loop.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal, TypeVar, get_args

from keylane.dispatch.process_pool import ProcessPool
from keylane.dispatch.thread_pool import ThreadPool
from keylane.dispatch.time_limit import within
from keylane.errors import InvalidInput

T = TypeVar("T")

Executor = Literal["thread", "process"]
Lend = Callable[[T], AbstractContextManager[None]]


class HandlerCall(Generic[T]):
    """One handler as a dispatcher calls it: `await call.run(message)`.

    `lend`: entered while a thread has the message.
    """

    def __init__(
        self,
        handler: Callable[[T], Any],
        *,
        concurrency: int,
        executor: Executor = "thread",
        time_limit_s: float | None = None,
        lend: Lend[T] = lambda _: nullcontext(),
    ) -> None:
        _check(handler, executor, time_limit_s)
        self.concurrency = concurrency
        self.is_cancellable = True
        """Whether a handler at work can be ended: a thread cannot."""
        self._pool: ThreadPool[T] | ProcessPool[T] | None = None
        self.run: Callable[[T], Awaitable[Any]] = handler
        if executor == "process":
            self.concurrency = min(concurrency, _cpus())
            self._pool = ProcessPool(handler, self.concurrency, time_limit_s)
            self.run = self._pool.run
        elif not is_coroutine_function(handler):
            self.is_cancellable = False
            self._pool = ThreadPool(handler, concurrency)
            self.run = _in_thread(self._pool, lend)
        elif time_limit_s is not None:
            self.run = _limited(handler, time_limit_s)

    async def start(self) -> None:
        """Raises if the handler cannot be called where it is to run."""
        if isinstance(self._pool, ProcessPool):
            await self._pool.start()

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


def is_coroutine_function(handler: object) -> bool:
    return inspect.iscoroutinefunction(handler) or (
        callable(handler) and inspect.iscoroutinefunction(type(handler).__call__)
    )


def check_executor(executor: str) -> None:
    if executor not in get_args(Executor):
        raise InvalidInput(f"executor is {executor!r}: use one of {', '.join(get_args(Executor))}")


def _check(handler: object, executor: str, time_limit_s: float | None) -> None:
    if not callable(handler):
        raise InvalidInput(f"handler is {handler!r}: give a function of one message")
    check_executor(executor)
    is_async = is_coroutine_function(handler)
    if executor == "process" and is_async:
        raise InvalidInput(
            f"handler is {handler!r}, an async function: executor='process' is for plain functions; leave it out"
        )
    if time_limit_s is not None and executor == "thread" and not is_async:
        raise InvalidInput(
            "time_limit_s needs an async handler or executor='process': a plain function runs in a thread, and nothing "
            "can end a thread"
        )


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_thread(pool: ThreadPool[T], lend: Lend[T]) -> Callable[[T], Awaitable[Any]]:
    async def in_thread(message: T) -> None:
        with lend(message):
            result = await pool.run(message)
        if inspect.isawaitable(result):
            await result  # a plain function around a coroutine function

    return in_thread


def _limited(run: Callable[[T], Awaitable[Any]], limit_s: float) -> Callable[[T], Awaitable[Any]]:
    async def limited(message: T) -> None:
        await within(limit_s, run(message))

    return limited
