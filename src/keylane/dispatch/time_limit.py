"""How long a handler may take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(limit_s: float, doing: Awaitable[T]) -> T:
    """Cancels it after that time and raises a `TimeoutError` that says so. It may return nevertheless."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await doing
    except (TimeoutError, asyncio.CancelledError) as error:
        # A task group of the handler may have marked the task: then the timeout lets its own cancellation through.
        if not limit.expired():
            raise
        raise TimeoutError(f"the handler was not done within its time_limit_s of {limit_s:g} s") from error
