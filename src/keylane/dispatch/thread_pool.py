"""Plain functions in threads of our own: asyncio's pool is shared, and has 6 threads on a machine with 2 cores."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ThreadPool(Generic[T]):
    """Runs one function, in up to `size` threads at once. A thread cannot be ended: `close` waits for none."""

    def __init__(self, function: Callable[[T], Any], size: int) -> None:
        self._function = function
        self._executor = ThreadPoolExecutor(size, thread_name_prefix="keylane-handler")

    async def run(self, item: T) -> Any:
        """The result of the function, or what it raised, whatever that is."""
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
