"""Ways in which handlers fail, or return, that leave something behind in their task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio


class Odd(BaseException):
    """No `Exception`."""


async def _raise(error: BaseException) -> None:
    raise error


def _me() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def task_group() -> None:
    """Python 3.11 and 3.12 leave `cancelling()` at 1 after this."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_raise(ValueError("a child")))


async def task_group_with_a_busy_body() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_raise(ValueError("a child")))
        await asyncio.sleep(60)


async def nested_task_groups() -> None:
    async with asyncio.TaskGroup() as outer:
        outer.create_task(asyncio.sleep(60))
        await task_group()


async def timed_out() -> None:
    async with asyncio.timeout(0.001):
        await asyncio.sleep(60)


async def timed_out_in_a_task_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(timed_out())


class Scope:
    """A cancel scope as anyio has it: it cancels its own task, and takes that back when the block ends."""

    def __init__(self) -> None:
        self._task = _me()
        self._handle = asyncio.get_running_loop().call_later(0.001, self._task.cancel)

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self._handle.cancel()
        self._task.uncancel()
        return kind is asyncio.CancelledError


async def raised_in_a_cancelled_scope() -> None:
    async with Scope():
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("cleaning up")


async def leaked_scope() -> None:
    """Cancelled by a scope that is never left."""
    scope = Scope()
    try:
        await asyncio.sleep(60)
    finally:
        del scope


async def timed_out_in_anyio() -> None:
    with anyio.fail_after(0.001):
        await anyio.sleep(60)


async def anyio_task_group() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_raise, ValueError("a child"))
        await anyio.sleep(60)


async def raised_in_a_cancelled_anyio_scope() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep(60)
        finally:
            raise ValueError("cleaning up")


async def cancelled_itself() -> None:
    _me().cancel()
    await asyncio.sleep(0)


async def cancelled_itself_and_raised() -> None:
    _me().cancel()
    raise ValueError("without waiting")


async def cancelled_and_uncancelled_and_raised() -> None:
    """Up to Python 3.12 a cancellation is still to come, and `cancelling()` is 0."""
    _me().cancel()
    _me().uncancel()
    raise ValueError("without waiting")


async def waited_for_something_cancelled() -> None:
    other = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(other.cancel)
    await other


async def raised_cancelled() -> None:
    raise asyncio.CancelledError


async def raised_a_group_of_cancelled() -> None:
    raise BaseExceptionGroup("children", [asyncio.CancelledError(), ValueError("a child")])


FAILING: dict[str, Callable[[], Awaitable[None]]] = {
    one.__name__: one
    for one in (
        task_group,
        task_group_with_a_busy_body,
        nested_task_groups,
        timed_out,
        timed_out_in_a_task_group,
        raised_in_a_cancelled_scope,
        leaked_scope,
        timed_out_in_anyio,
        anyio_task_group,
        raised_in_a_cancelled_anyio_scope,
        cancelled_itself,
        cancelled_itself_and_raised,
        cancelled_and_uncancelled_and_raised,
        waited_for_something_cancelled,
        raised_cancelled,
        raised_a_group_of_cancelled,
    )
}
"""Each of them raises: one failed try."""


async def caught_a_task_group() -> None:
    with suppress(ExceptionGroup):
        await task_group()


async def caught_a_task_group_and_waited() -> None:
    await caught_a_task_group()
    await asyncio.sleep(0.001)


async def caught_a_timeout() -> None:
    with suppress(TimeoutError):
        await timed_out()


async def left_a_scope() -> None:
    async with Scope():
        await asyncio.sleep(60)


async def moved_on_in_anyio() -> None:
    with anyio.move_on_after(0.001):
        await anyio.sleep(60)


async def caught_its_own_cancellation() -> None:
    with suppress(asyncio.CancelledError):
        await cancelled_itself()


async def cancelled_itself_and_returned() -> None:
    _me().cancel()


async def cancelled_and_uncancelled_and_returned() -> None:
    _me().cancel()
    _me().uncancel()


RETURNING: dict[str, Callable[[], Awaitable[None]]] = {
    one.__name__: one
    for one in (
        caught_a_task_group,
        caught_a_task_group_and_waited,
        caught_a_timeout,
        left_a_scope,
        moved_on_in_anyio,
        caught_its_own_cancellation,
        cancelled_itself_and_returned,
        cancelled_and_uncancelled_and_returned,
    )
}
"""Each of them returns: its message is done."""
