"""Hooks: functions that a connection calls when its link changes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from keylane.errors import InvalidInput

_log = logging.getLogger("keylane.connection")
_About = TypeVar("_About")


@dataclass(frozen=True, slots=True)
class Hooks:
    """Plain functions that a connection calls. They must return at once.

    `on_disconnect` gets the reason, `on_reconnect` the server, `on_error` an exception that did not end
    the connection by itself, `on_close` the reason of the end.
    """

    on_disconnect: Callable[[str], None] | None = None
    on_reconnect: Callable[[str], None] | None = None
    on_error: Callable[[Exception], None] | None = None
    on_close: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            hook = getattr(self, name)
            if hook is not None and (not callable(hook) or inspect.iscoroutinefunction(hook)):
                raise InvalidInput(f"{name}={hook!r}: a hook is a plain function; start a task from it if needed")


class HookList:
    """All hooks of one connection."""

    def __init__(self) -> None:
        self._all: list[Hooks] = []

    def add(self, hooks: Hooks) -> Callable[[], None]:
        """Add hooks; call the result to remove them."""
        self._all.append(hooks)

        def remove() -> None:
            # By identity: another part of the program may have added hooks that are equal.
            self._all = [each for each in self._all if each is not hooks]

        return remove

    def disconnected(self, reason: str) -> None:
        for hooks in list(self._all):
            _call(hooks.on_disconnect, reason)

    def reconnected(self, server: str) -> None:
        for hooks in list(self._all):
            _call(hooks.on_reconnect, server)

    def error(self, error: Exception) -> None:
        for hooks in list(self._all):
            _call(hooks.on_error, error)

    def closed(self, reason: str) -> None:
        for hooks in list(self._all):
            _call(hooks.on_close, reason)


def _call(hook: Callable[[_About], None] | None, about: _About) -> None:
    if hook is None:
        return
    try:
        hook(about)
    except Exception:  # noqa: BLE001 - a fault in a hook must not end the reconnect that calls it
        _log.exception("the hook %r failed", hook)
