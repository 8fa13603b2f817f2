"""Waiting for what nobody tells: `until` in coroutines, `wait_until` in plain code.

Both look again and again until what they see is good, and return it. At the deadline they fail, and say what they
waited for and what they saw last.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

DEADLINE_S = 30.0
"""For what takes a moment, on a machine that is busy with other things."""
LOOK_EVERY_S = 0.01
_MOST_SHOWN = 2000


@overload
async def until(
    look: Callable[[], Awaitable[T]], good: Callable[[T], object] = bool, deadline_s: float = DEADLINE_S
) -> T: ...
@overload
async def until(look: Callable[[], T], good: Callable[[T], object] = bool, deadline_s: float = DEADLINE_S) -> T: ...
async def until(
    look: Callable[[], Any], good: Callable[[Any], object] = bool, deadline_s: float = DEADLINE_S
) -> object:
    """Look until it is good. What a plain function saw still holds on return: nothing runs in between.

    >>> await until(lambda: consumers.info(connection, stream, name), lambda info: info.num_pending == 0)
    >>> await until(lambda: len(seen) == 10, deadline_s=5)
    """
    end = time.monotonic() + deadline_s
    while True:
        seen = look()
        if inspect.isawaitable(seen):
            seen = await seen
        if good(seen):
            return seen
        if time.monotonic() > end:
            raise AssertionError(_complaint(look, good, seen, deadline_s))
        await asyncio.sleep(LOOK_EVERY_S)


def wait_until(look: Callable[[], T], good: Callable[[T], object] = bool, deadline_s: float = DEADLINE_S) -> T:
    """The same in plain code."""
    end = time.monotonic() + deadline_s
    while True:
        seen = look()
        if good(seen):
            return seen
        if time.monotonic() > end:
            raise AssertionError(_complaint(look, good, seen, deadline_s))
        time.sleep(LOOK_EVERY_S)


def _complaint(look: Callable[[], Any], good: Callable[[Any], object], seen: object, deadline_s: float) -> str:
    known = [f"{name}={value!r}" for one in (look, good) for name, value in _variables(one).items()]
    wanted = [] if good is bool else [f"which should be: {_text(good)}"]
    lines = [f"not within {deadline_s:g} s: {_text(look)}", *wanted, f"last seen: {seen!r}"]
    return "\n".join(line[:_MOST_SHOWN] for line in [*lines, *(f"where {one}" for one in dict.fromkeys(known))])


def _text(function: Callable[..., object]) -> str:
    try:
        return " ".join(inspect.getsource(function).split())
    except (OSError, TypeError):  # it is not written in Python
        return repr(function)


def _variables(function: Callable[..., object]) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
