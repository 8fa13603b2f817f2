"""Hooks: functions that a program gives to what runs for it, to be called when something happens there.

Every kind of hooks is a dataclass below `Hooks`, given as `hooks=`, and the same event has the same name in all of
them. docs/lifecycle.md lists them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

from keylane.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Plain functions, each of which may be left out. They must return at once; what they raise is logged."""

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            hook = getattr(self, name)
            if hook is not None and (not callable(hook) or inspect.iscoroutinefunction(hook)):
                raise InvalidInput(f"{name}={hook!r}: a hook is a plain function; start a task from it if needed")

    def and_also(self, other: Self) -> Self:
        """Hooks that call these, then those of `other`."""
        both = {one.name: _both(getattr(self, one.name), getattr(other, one.name)) for one in fields(self)}
        return type(self)(**both)


def call_hook(hook: Callable[..., object] | None, *about: object, log: logging.Logger, who: object) -> None:
    """Call it, if there is one: a fault in it must not end `who` calls it."""
    if hook is None:
        return
    try:
        hook(*about)
    except Exception:
        log.exception("%s: the hook %r failed", who, hook)


def _both(first: Callable[..., object] | None, second: Callable[..., object] | None) -> Callable[..., object] | None:
    if first is None or second is None:
        return first or second

    def call(*about: object) -> None:
        first(*about)
        second(*about)

    return call
