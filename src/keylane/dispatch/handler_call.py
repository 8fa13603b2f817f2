"""Makes every kind of handler awaitable: an async function, a plain one in a thread or a process, with a time limit.

An async function runs in the task of whoever calls it. A plain function runs in a thread or, with `executor="process"`,
in a process, so that it never blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal, TypeVar, get_args

from keylane.dispatch.process_pool import ProcessPool, within
from keylane.errors import InvalidInput

T = TypeVar("T")


class ThreadPool(Generic[T]):
    """Runs one function, in up to `size` threads at once. A thread cannot be ended: `close` waits for none.

    asyncio's own pool is shared, and has 6 threads on a machine with 2 cores.
    """

    def __init__(self, function: Callable[[T], Any], size: int) -> None:
        self._function = function
        self._executor = ThreadPoolExecutor(size, thread_name_prefix="keylane-handler")

    async def run(self, item: T) -> Any:
        """Return the result of the function, or raise what it raised."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        result, error = await loop.run_in_executor(self._executor, context.run, self._outcome, item)
        if error is not None:
            raise error
        return result

    def _outcome(self, item: T) -> tuple[Any, BaseException | None]:
        # Not every exception gets through a future: Python 3.11 loses a StopIteration, and whoever waits for it hangs.
        try:
            return self._function(item), None
        except BaseException as error:  # noqa: BLE001 - raised again in the event loop
            return None, error

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


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
            self.run = _in_process(self._pool, handler)
        elif not is_coroutine_function(handler):
            self.is_cancellable = False
            self._pool = ThreadPool(handler, concurrency)
            self.run = _in_thread(self._pool, lend)
        elif time_limit_s is not None:
            self.run = _limited(handler, time_limit_s)
        self.handle = self.run
        """Calls the handler itself: `run` may be replaced by what decides whether it is called."""

    async def start(self) -> None:
        """Raise if the handler cannot be called where it is to run."""
        if not isinstance(self._pool, ProcessPool):
            return
        try:
            await self._pool.start()
        except BaseException:
            await self.close()
            raise

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


def _in_process(pool: ProcessPool[T], handler: Callable[[T], Any]) -> Callable[[T], Awaitable[Any]]:
    returned: Callable[[T, bytes], Awaitable[None]] | None = getattr(handler, "returned", None)
    if returned is None:
        return pool.run

    async def in_process(message: T) -> None:
        result = await pool.run(message)
        if result is not None:
            await returned(message, result)

    return in_process


def _limited(run: Callable[[T], Awaitable[Any]], limit_s: float) -> Callable[[T], Awaitable[Any]]:
    async def limited(message: T) -> None:
        await within(limit_s, run(message))

    return limited
