"""When failed messages are tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from keylane.retries import RetryTimer

Runner = Callable[[Coroutine[Any, Any, None]], None]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_retry_that_is_due_already_does_not_disturb_the_next(run: Runner) -> None:
    """A busy event loop sets a timer late: uvloop then gives a handle without a time."""

    async def main() -> None:
        rang: list[float] = []
        awake = asyncio.Event()
        timer = RetryTimer(rang.append, awake.set)
        now = asyncio.get_running_loop().time()
        timer.set(now - 1)
        timer.set(now - 2)
        timer.set(now + 60)
        assert "at" in repr(timer)
        async with asyncio.timeout(5):
            await awake.wait()
        assert len(rang) == 1

    run(main())
