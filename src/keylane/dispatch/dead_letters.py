"""Gives a message up: it must be safe elsewhere before its lane goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from keylane.errors import KeylaneError
from keylane.retries import backoff_s

T = TypeVar("T")

GiveUp = Callable[[T, BaseException, int], Awaitable[None]]
"""Stores a message elsewhere, with the error and the number of tries. A `KeylaneError` says that it could not."""


async def put_away(
    give_up: GiveUp[T],
    message: Callable[[], T],
    error: BaseException,
    tries: int,
    *,
    log: logging.Logger,
    until: Callable[[], bool] = lambda: False,
) -> bool:
    """Try until it has worked, or `until` says that it is not ours to do: then False."""
    attempt = 0
    while not until():
        try:
            await give_up(message(), error, tries)
        except KeylaneError as trouble:
            attempt += 1
            pause_s = backoff_s(attempt)
            log.error("%r cannot be put away, trying again in %g s: %s", message(), pause_s, trouble)  # noqa: TRY400
            await asyncio.sleep(pause_s)
        else:
            return True
    return False
