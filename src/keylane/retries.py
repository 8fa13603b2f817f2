"""When a message whose handler failed is tried again: how long later, and the timer that waits for it.

Whoever runs handlers in lanes uses both: a member of a group, and a Marshal consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0


def backoff_s(tries: int) -> float:
    return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(tries - 1, 20))


class RetryTimer:
    """One timer for all retries: it is set for the nearest.

    `due(now)` makes those ready whose time has come and says when the next one is; `wake` sets workers on them.
    """

    def __init__(self, due: Callable[[float], float | None], wake: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = due
        self._wake = wake
        self._handle: asyncio.Handle | None = None
        self._rings_at = 0.0  # uvloop's handle of a time that is past does not know it

    def __repr__(self) -> str:
        return f"<RetryTimer {'idle' if self._handle is None else f'at {self._rings_at:.3f}'}>"

    def set(self, retry_at: float) -> None:
        """There is a retry at this time of the event loop's clock."""
        if self._handle is None or retry_at < self._rings_at:
            self.cancel()
            self._rings_at = retry_at
            self._handle = self._loop.call_at(retry_at, self._rings)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _rings(self) -> None:
        self._handle = None
        following = self._due(self._loop.time())
        if following is not None:
            self.set(following)
        self._wake()
