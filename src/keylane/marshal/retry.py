"""Retrying calls to a log or a source: which errors are transient, and how long a consumer retries.

A consumer retries transient errors; its claims expire meanwhile if that takes long. Any other error ends it.
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

_TRANSIENT = (
    ApiUnavailable,
    BrokerUnavailable,
    Disconnected,
    JetStreamDisabled,
    NotStored,
    OutcomeUnknown,
    ReadIncomplete,
    RequestTimeout,
)


def is_transient(error: KeylaneError) -> bool:
    """Whether the same call may succeed later without anybody changing anything."""
    if isinstance(error, ApiError):
        return error.code == _UNAVAILABLE
    return isinstance(error, _TRANSIENT)


class Backoff:
    """The pauses between retries of one kind of call. After `longest_s` of failures the error is raised.

    >>> while True:
    ...     try:
    ...         answer = await log.bounds(0)
    ...     except KeylaneError as error:
    ...         await backoff.after(error)
    ...     else:
    ...         backoff.succeeded()
    ...         break
    """

    def __init__(self, what: str, longest_s: float, on_error: Callable[[KeylaneError], None] | None = None) -> None:
        self._what = what
        self._longest_s = longest_s
        self._on_error = on_error
        self._since: float | None = None
        self._failures = 0

    def succeeded(self) -> None:
        if self._failures:
            _log.info("%s: works again", self._what)
        self._since, self._failures = None, 0

    async def after(self, error: KeylaneError) -> None:
        """Pause; or raise the error if it is not transient, or if the calls have failed for too long."""
        if not is_transient(error):
            raise error
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        if now - self._since > self._longest_s:
            raise error
        self._failures += 1
        _log.warning("%s: trying again: %s", self._what, error)
        if self._on_error is not None:
            self._on_error(error)
        await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10)))


@contextmanager
def first_error() -> Iterator[None]:
    """Around a task group: raises its first error instead of a group, so that callers can catch it by its class."""
    try:
        yield
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__ or group
