"""Transactions on both kinds of engine: an asynchronous one in the event loop, a synchronous one in threads.

Owns how a step or an effect runs within a transaction. Knows nothing about claims and tables.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from keylane.dispatch import ThreadPool
from keylane.errors import InvalidInput
from keylane.groups import GroupMessage

T = TypeVar("T")
Handler = Callable[[GroupMessage], Coroutine[Any, Any, None]]
Step = Callable[[Connection], T]
Effect = Callable[..., Any]
"""Takes a message and a connection or session to write through."""

_MOST_THREADS = 1024
"""More than the number of concurrent handlers: threads start only as needed."""


class Database(Protocol):
    """The operations of both kinds of engine."""

    @property
    def dialect(self) -> str: ...

    def check_effect(self, effect: Effect) -> None:
        """Raise `InvalidInput` unless the effect fits the kind of engine."""
        ...

    async def run(self, step: Step[T]) -> T:
        """Run one step in a separate transaction."""
        ...

    async def perform(
        self, message: GroupMessage, effect: Effect, *, session: bool, before: Step[bool], after: Step[None]
    ) -> None:
        """Run `before`, and if it is true, the effect and `after`: one transaction, committed unless one raises."""
        ...

    async def acked(self, message: GroupMessage, effect: Effect, *, ready: Step[None]) -> None:
        """Run the effect, `ready` and a double ack in one transaction, committed if none of them raises."""
        ...


def database(engine: object) -> Database:
    if isinstance(engine, AsyncEngine):
        return _AsyncDatabase(engine)
    if isinstance(engine, Engine):
        return _ThreadedDatabase(engine)
    raise InvalidInput(
        f"engine is {engine!r}: give an engine of SQLAlchemy, from create_async_engine() or create_engine()"
    )


class _AsyncDatabase:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    def check_effect(self, effect: Effect) -> None:
        if not _is_async(effect):
            raise InvalidInput(
                f"effect is {effect!r}, not a coroutine function, but the engine is asynchronous: write it with "
                "async def, or use an engine from create_engine()"
            )

    async def run(self, step: Step[T]) -> T:
        async with self._engine.begin() as connection:
            return await connection.run_sync(step)

    async def perform(
        self, message: GroupMessage, effect: Effect, *, session: bool, before: Step[bool], after: Step[None]
    ) -> None:
        async with self._engine.begin() as connection:
            if await connection.run_sync(before):
                await _call(message, effect, connection, session=session)
                await connection.run_sync(after)

    async def acked(self, message: GroupMessage, effect: Effect, *, ready: Step[None]) -> None:
        async with self._engine.begin() as connection:
            await effect(message, connection)
            await connection.run_sync(ready)
            await message.ack_confirmed()


async def _call(message: GroupMessage, effect: Effect, connection: AsyncConnection, *, session: bool) -> None:
    if not session:
        await effect(message, connection)
        return
    async with AsyncSession(bind=connection, expire_on_commit=False) as own:
        await effect(message, own)
        await own.flush()


class _ThreadedDatabase:
    """A transaction stays in one thread from its beginning to its end: SQLite's connections require it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._threads: ThreadPool[Callable[[], Any]] = ThreadPool(lambda work: work(), _MOST_THREADS)

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    def check_effect(self, effect: Effect) -> None:
        if _is_async(effect):
            raise InvalidInput(
                f"effect is {effect!r}, a coroutine function, but the engine is synchronous: use an engine from "
                "create_async_engine(), or write the effect with def"
            )

    async def run(self, step: Step[T]) -> T:
        def transaction() -> T:
            with self._engine.begin() as connection:
                return step(connection)

        done: T = await self._threads.run(transaction)
        return done

    async def perform(
        self, message: GroupMessage, effect: Effect, *, session: bool, before: Step[bool], after: Step[None]
    ) -> None:
        def transaction() -> None:
            with self._engine.begin() as connection:
                if not before(connection):
                    return
                if session:
                    with Session(bind=connection, expire_on_commit=False) as own:
                        effect(message, own)
                        own.flush()
                else:
                    effect(message, connection)
                after(connection)

        await self._in_thread(message, transaction)

    async def acked(self, message: GroupMessage, effect: Effect, *, ready: Step[None]) -> None:
        loop = asyncio.get_running_loop()

        def transaction() -> None:
            with self._engine.begin() as connection:
                effect(message, connection)
                ready(connection)
                asyncio.run_coroutine_threadsafe(message.ack_confirmed(), loop).result()

        await self._in_thread(message, transaction)

    async def _in_thread(self, message: GroupMessage, work: Callable[[], None]) -> None:
        message.home = asyncio.get_running_loop()
        try:
            await self._threads.run(work)
        finally:
            message.home = None


def _is_async(effect: Effect) -> bool:
    if not callable(effect):
        raise InvalidInput(f"effect is {effect!r}: give a function of a message and a connection")
    return inspect.iscoroutinefunction(effect) or inspect.iscoroutinefunction(type(effect).__call__)
