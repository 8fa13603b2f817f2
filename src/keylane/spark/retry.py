"""Requests to the server from Spark's driver or an executor, retried while the error is transient.

An exception in the driver's part of a source ends the query, so a restart of the server must not become one. Every
retry has a deadline; then the last error is raised as one error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from keylane.errors import ApiError, JetStreamDisabled, KeylaneError, NotFound, PublishFailed
from keylane.jetstream import Connection
from keylane.retrying import Backoff
from keylane.spark.address import Address
from keylane.spark.sync_connection import shared_connection

_log = logging.getLogger("keylane.spark")

T = TypeVar("T")

FIRST_DEADLINE_S = 15.0
"""For a server that this process never reached: the address may be wrong."""
DEADLINE_S = 60.0
GONE_AFTER_S = 2.0
"""A server that has just started may not know its streams yet: for this long 'not found' is retried."""

_reached: set[Address] = set()


def ask(address: Address, work: Callable[[Connection], Coroutine[Any, Any, T]], doing: str) -> T:
    """Run `work` on this process's connection and return its result; retry while the error is transient.

    `doing` completes the sentence "trying to …": "look at stream 'ORDERS'".
    """
    backoff = Backoff(f"trying to {doing}", log=_log, longest_pause_s=1.0, since=time.monotonic())
    while True:
        try:
            link = shared_connection(address)
            answer = link.call(work(link.connection))
        except KeylaneError as error:
            pause_s = backoff.pause_s(error, _deadline_s(address, error))
            if pause_s is None:
                if not may_pass(error):
                    raise
                raise _kind(error)(f"gave up after {backoff.waited_s:.0f} s trying to {doing}: {error}") from error
            time.sleep(pause_s)
        else:
            backoff.succeeded()
            _reached.add(address)
            return answer


def may_pass(error: KeylaneError) -> bool:
    """Whether a request is made again: not a publish, and not at a server without JetStream. A 500 may be a restart."""
    if isinstance(error, ApiError):
        return error.code >= 500
    return error.is_transient and not isinstance(error, PublishFailed | JetStreamDisabled)


def _deadline_s(address: Address, error: KeylaneError) -> float:
    if may_pass(error):
        return DEADLINE_S if address in _reached else FIRST_DEADLINE_S
    return GONE_AFTER_S if isinstance(error, NotFound) else 0.0


def _kind(error: KeylaneError) -> type[KeylaneError]:
    """The class of an error with another text. An `ApiError` is built from the server's answer, so it becomes plain."""
    return KeylaneError if isinstance(error, ApiError) else type(error)
