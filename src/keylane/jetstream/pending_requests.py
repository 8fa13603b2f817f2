"""The requests that wait for an answer, and what ends them without one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from nats.aio.msg import Msg

from keylane.errors import KeylaneError, PermissionDenied


class Outstanding:
    """The requests that wait for an answer, so that what makes an answer impossible ends them at once."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[Msg], str] = {}
        self._barred: tuple[type[KeylaneError], str] | None = None

    @contextmanager
    def waiting_on(self, subject: str) -> Iterator[asyncio.Future[Msg]]:
        """A future that fails when the answer cannot come any more."""
        if self._barred is not None:
            kind, text = self._barred
            raise kind(f"{subject} was not asked: {text}")
        trouble: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[trouble] = subject
        try:
            yield trouble
        finally:
            del self._waiting[trouble]
            let_go(trouble)

    def fail(self, kind: type[KeylaneError], text: str) -> None:
        """End all requests."""
        for trouble, subject in self._waiting.items():
            if not trouble.done():
                trouble.set_exception(kind(f"no answer on {subject}: {text}"))

    def deny(self, denied: PermissionDenied) -> None:
        """End the requests that the server does not allow."""
        for trouble, subject in self._waiting.items():
            if subject == denied.subject and not trouble.done():
                trouble.set_exception(PermissionDenied(str(denied), operation=denied.operation, subject=denied.subject))

    def bar(self, kind: type[KeylaneError], text: str) -> None:
        """End all requests, and refuse new ones until `unbar`."""
        self._barred = (kind, text)
        self.fail(kind, text)

    @property
    def barred(self) -> bool:
        return self._barred is not None

    def unbar(self) -> None:
        self._barred = None


def let_go(future: asyncio.Future[Msg]) -> None:
    """Cancel what nobody waits for any more, or take note of how it ended."""
    if not future.done():
        future.cancel()
    elif not future.cancelled():
        future.exception()
