"""Retries: the pause before the next try, the time after which nobody tries any more, and what is logged meanwhile.

`KeylaneError.is_transient` says which errors are worth another try.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from keylane.errors import KeylaneError

_log = logging.getLogger("keylane")

T = TypeVar("T")

_QUIET_S = 1.0


def backoff_s(failures: int, first_s: float = 0.1, longest_s: float = 30.0) -> float:
    """The pause after this many failures in a row: it doubles with each of them, up to `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 20))


class Backoff:
    """The pauses between the tries of one kind of call, which fail for at most `longest_s` in a row.

    Logs the first failure that comes after a second of failures, and when the call succeeds again. `on_error` is told
    of every failure. `since`: failures count from this time of `time.monotonic`, not from the first of them.

    >>> bounds = await Backoff("the log", 60).call(lambda: log.bounds(0))
    """

    def __init__(
        self,
        what: str,
        longest_s: float = math.inf,
        on_error: Callable[[KeylaneError], None] | None = None,
        *,
        log: logging.Logger = _log,
        longest_pause_s: float = 2.0,
        since: float | None = None,
    ) -> None:
        self._what = what
        self._longest_s = longest_s
        self._on_error = on_error
        self._log = log
        self._longest_pause_s = longest_pause_s
        self._since = since
        self._failures = 0
        self._has_warned = False

    @property
    def waited_s(self) -> float:
        """For how long the calls have failed."""
        return 0.0 if self._since is None else monotonic() - self._since

    def succeeded(self) -> None:
        if self._has_warned:
            self._log.info("%s: works again after %.1f s", self._what, self.waited_s)
        self._since, self._failures, self._has_warned = None, 0, False

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call `work` until it succeeds. Raises its error if that is not transient, or after `longest_s`."""
        while True:
            try:
                answer = await work()
            except KeylaneError as error:
                await self.after(error)
            else:
                self.succeeded()
                return answer

    async def after(self, error: KeylaneError) -> None:
        """Pause; or raise the error if it is not transient, or if the calls have failed for too long."""
        pause_s = self.pause_s(error, self._longest_s if error.is_transient else 0.0)
        if pause_s is None:
            raise error
        await asyncio.sleep(pause_s)

    def pause_s(self, error: KeylaneError, longest_s: float) -> float | None:
        """How long to pause before the next try; None if it would begin later than `longest_s` after the first."""
        if self._since is None:
            self._since = monotonic()
        pause_s, waited_s = backoff_s(self._failures + 1, 0.05, self._longest_pause_s), self.waited_s
        if waited_s + pause_s > longest_s:
            return None
        self._failures += 1
        is_news = waited_s >= _QUIET_S and not self._has_warned
        self._has_warned |= is_news
        self._log.log(
            logging.WARNING if is_news else logging.DEBUG, "%s: trying again in %g s: %s", self._what, pause_s, error
        )
        if self._on_error is not None:
            self._on_error(error)
        return pause_s
