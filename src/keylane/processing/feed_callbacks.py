"""Callbacks of the feed that is read now: those of an earlier feed are ignored.

A feed that is being closed still hands out what was on its way, and still hears of its pin. By then its reader has
dropped what waited, to get it again in order: what such a feed hands out would be handled before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class FeedCallbacks:
    """The callbacks of one reader's feeds, one feed after the other."""

    __slots__ = ("_current",)

    def __init__(self) -> None:
        self._current = object()

    def renew(self) -> None:
        """Ignore all callbacks so far: their feed is not read any more."""
        self._current = object()

    def of_current(self, do: Callable[[T], None]) -> Callable[[T], None]:
        """A callback for the feed that is opened now."""
        made_for = self._current

        def hear(told: T) -> None:
            if self._current is made_for:
                do(told)

        return hear
