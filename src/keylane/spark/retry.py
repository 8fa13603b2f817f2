"""Requests to the server from Spark's driver or an executor, retried while the error is one that passes.

An exception in the driver's part of a source ends the query, so a restart of the server must not become one. Every
retry has a deadline; then the last error is raised as one error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from keylane.errors import (
    ApiError,
    ApiUnavailable,
    Disconnected,
    KeylaneError,
    NotFound,
    ReadIncomplete,
    RequestTimeout,
    ServerUnreachable,
)
from keylane.jetstream.connection import Connection
from keylane.spark.address import Address
from keylane.spark.sync_connection import shared_connection

_log = logging.getLogger("keylane.spark")

T = TypeVar("T")

FIRST_DEADLINE_S = 15.0
"""For a server that this process never reached: the address may simply be wrong."""
DEADLINE_S = 60.0
GONE_AFTER_S = 2.0
"""A server that has just started may not know its streams yet, so that long 'not found' is not believed."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_PASSING = (ServerUnreachable, RequestTimeout, Disconnected, ApiUnavailable, ReadIncomplete)

_reached: set[Address] = set()


def ask(address: Address, work: Callable[[Connection], Coroutine[Any, Any, T]], doing: str) -> T:
    """What `work` answers; tries again while the trouble is of a kind that passes.

    `doing` says what it is for: "look at stream 'ORDERS'".
    """
    begun = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            link = shared_connection(address)
            answer = link.call(work(link.connection))
        except KeylaneError as trouble:
            waited_s = time.monotonic() - begun
            patience_s = _patience_s(address, trouble)
            if waited_s + pause_s > patience_s:
                if not _passes(trouble):
                    raise  # it says all there is to say
                raise _kind(trouble)(f"could not {doing} for {waited_s:.0f} s: {trouble}") from trouble
            if waited_s > 1 and pause_s < _LONGEST_PAUSE_S:
                _log.warning("could not %s, trying again: %s", doing, trouble)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            _reached.add(address)
            return answer


def _patience_s(address: Address, trouble: KeylaneError) -> float:
    if _passes(trouble):
        return DEADLINE_S if address in _reached else FIRST_DEADLINE_S
    return GONE_AFTER_S if isinstance(trouble, NotFound) else 0.0


def _passes(trouble: KeylaneError) -> bool:
    return isinstance(trouble, _PASSING) or (isinstance(trouble, ApiError) and trouble.code >= 500)


def _kind(trouble: KeylaneError) -> type[KeylaneError]:
    """The class that tells of a trouble in other words; an API error is made from the server's, so it becomes plain."""
    return KeylaneError if isinstance(trouble, ApiError) else type(trouble)
