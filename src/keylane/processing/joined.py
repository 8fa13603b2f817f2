"""The handle of something that has joined and runs until its end: waiting for it, and stopping it with its block."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from keylane.jetstream import check_seconds

STOP_TIMEOUT_S = 25.0
"""Below the 30 s after which Kubernetes kills what it has asked to stop: there is time to hand over."""


class Joined(ABC):
    """Something that runs until it is stopped, or until an error ends it: a member, a worker, an app, a consumer.

    `_ended` gets the reason of its end, or the error that ended it.
    """

    def __init__(self, stop_timeout_s: float, log: logging.Logger) -> None:
        self._stop_timeout_s = check_seconds(stop_timeout_s, "stop_timeout_s")
        self._log = log
        self._failure_was_raised = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @abstractmethod
    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None: ...

    async def wait(self) -> str:
        """Wait for the end and return its reason; raises the error if one ended it."""
        try:
            return await asyncio.shield(self._ended)
        except Exception:
            self._failure_was_raised = True
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop. Raises the error that ended it before, unless `wait` has raised it."""
        await self.stop(self._stop_timeout_s)
        failure = None if self._ended.cancelled() else self._ended.exception()
        if failure is None or self._failure_was_raised:
            return
        if error is None:
            raise failure
        self._log.error("%r ended with %r while another error was on its way", self, failure)
