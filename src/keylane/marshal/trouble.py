"""Trouble with a log or a source: which may pass by itself, and how long a consumer waits for that.

A consumer tries again while it may pass; its claims run out meanwhile if that takes long. Everything else ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from keylane.errors import (
    ApiError,
    ApiUnavailable,
    BrokerUnavailable,
    Disconnected,
    JetStreamDisabled,
    KeylaneError,
    NotStored,
    OutcomeUnknown,
    ReadIncomplete,
    RequestTimeout,
)

_log = logging.getLogger("keylane.marshal")

_UNAVAILABLE = 503
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

_PASSING = (
    ApiUnavailable,
    BrokerUnavailable,
    Disconnected,
    JetStreamDisabled,
    NotStored,
    OutcomeUnknown,
    ReadIncomplete,
    RequestTimeout,
)

Tell = Callable[[KeylaneError], None]


def may_pass(error: KeylaneError) -> bool:
    """Whether the same call may succeed later, with nobody changing anything."""
    if isinstance(error, ApiError):
        return error.code == _UNAVAILABLE
    return isinstance(error, _PASSING)


class Patience:
    """How long the trouble with one thing has lasted. `longest_s` ends it: the error is raised.

    >>> while True:
    ...     try:
    ...         answer = await log.bounds(0)
    ...     except KeylaneError as error:
    ...         await patience.after(error)
    ...     else:
    ...         patience.worked()
    ...         break
    """

    def __init__(self, what: str, longest_s: float, tell: Tell | None = None) -> None:
        self._what = what
        self._longest_s = longest_s
        self._tell = tell
        self._since: float | None = None
        self._failures = 0

    def worked(self) -> None:
        if self._failures:
            _log.info("%s: all is well again", self._what)
        self._since, self._failures = None, 0

    async def after(self, error: KeylaneError) -> None:
        """Wait a while; or raise the error if it cannot pass, or if the trouble has lasted too long."""
        if not may_pass(error):
            raise error
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        if now - self._since > self._longest_s:
            raise error
        self._failures += 1
        _log.warning("%s: trying again: %s", self._what, error)
        if self._tell is not None:
            self._tell(error)
        await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10)))


@contextmanager
def first_error() -> Iterator[None]:
    """Around a task group: its first error comes out as itself, so that callers can tell which it is."""
    try:
        yield
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__ or group
