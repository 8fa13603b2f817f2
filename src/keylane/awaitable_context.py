"""Functions that open a long-lived object: `await` returns it, `async with` also closes it at the end of the block.

    async with keylane.connect(url) as connection:   # closed at the end of the block
        ...
    connection = await keylane.connect(url)           # closed by the caller

Owns nothing: the object's own `__aexit__` closes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T", bound=AbstractAsyncContextManager[Any])


class AwaitableContext(Coroutine[Any, Any, T], Generic[T]):
    """An object that is about to be opened. Use it once.

    It is also a coroutine, so `asyncio.create_task`, `asyncio.gather` and similar functions accept it.
    """

    __slots__ = ("_opened", "_opening")

    def __init__(self, opening: Coroutine[Any, Any, T]) -> None:
        self._opening = opening
        self._opened: T | None = None

    def __repr__(self) -> str:
        return f"<AwaitableContext {self._opening!r}>"

    def __await__(self) -> Generator[Any, Any, T]:
        return self._opening.__await__()

    def send(self, value: Any, /) -> Any:
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()

    async def __aenter__(self) -> T:
        self._opened = await self._opening
        await self._opened.__aenter__()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._opened is not None
        return await self._opened.__aexit__(kind, error, trace)


def awaitable_context(open_it: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, AwaitableContext[T]]:
    """Let the result of a coroutine function be awaited or entered.

    >>> @awaitable_context
    ... async def connect(url: str) -> Connection: ...
    """

    @functools.wraps(open_it)
    def call(*args: P.args, **kwargs: P.kwargs) -> AwaitableContext[T]:
        return AwaitableContext(open_it(*args, **kwargs))

    return call
