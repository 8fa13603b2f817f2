"""The hooks of a connection: functions that it calls when its link changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from keylane.hooks import Hooks, call_hook

_log = logging.getLogger("keylane.connection")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionHooks(Hooks):
    """Called when something happens to a connection. Plain functions; they must return at once."""

    on_disconnect: Callable[[str], None] | None = None
    """The link is lost, and why."""
    on_reconnect: Callable[[str], None] | None = None
    """There is a link again, to this server."""
    on_error: Callable[[Exception], None] | None = None
    """Something failed that did not end the connection by itself."""
    on_close: Callable[[str], None] | None = None
    """The connection has ended, and why."""


class HookList:
    """All hooks of one connection."""

    def __init__(self) -> None:
        self._all: list[ConnectionHooks] = []

    def add(self, hooks: ConnectionHooks) -> Callable[[], None]:
        """Add hooks; call the result to remove them."""
        self._all.append(hooks)

        def remove() -> None:
            # By identity: another part of the program may have added hooks that are equal.
            self._all = [each for each in self._all if each is not hooks]

        return remove

    def disconnected(self, reason: str) -> None:
        for hooks in list(self._all):
            call_hook(hooks.on_disconnect, reason, log=_log, who="connection")

    def reconnected(self, server: str) -> None:
        for hooks in list(self._all):
            call_hook(hooks.on_reconnect, server, log=_log, who="connection")

    def error(self, error: Exception) -> None:
        for hooks in list(self._all):
            call_hook(hooks.on_error, error, log=_log, who="connection")

    def closed(self, reason: str) -> None:
        for hooks in list(self._all):
            call_hook(hooks.on_close, reason, log=_log, who="connection")
