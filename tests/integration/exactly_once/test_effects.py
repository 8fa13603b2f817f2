"""What an effect may do with what it is given, and what becomes of one that hides an error."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Session

from keylane.errors import InvalidInput
from keylane.exactly_once import ExactlyOnce
from keylane.groups import GroupMessage
from tests.integration.exactly_once.rig import Database, Instance, effects, write


class Mapped(DeclarativeBase):
    metadata = effects.metadata


class Line(Mapped):
    __table__ = effects


def line(message: GroupMessage) -> Line:
    return Line(lane=message.key, sequence=message.sequence, who="orm")


async def test_an_effect_with_a_session(database: Database) -> None:
    async def effect(message: GroupMessage, session: AsyncSession) -> None:
        session.add(line(message))

    handle = ExactlyOnce(database.engine()).session_handler(effect)
    owner = Instance(5, 100)
    for sequence in (1, 2, 2):
        await handle(owner.message(sequence))
    assert database.rows() == [("k", 1, "orm"), ("k", 2, "orm")]


async def test_a_plain_effect_with_a_session(database: Database) -> None:
    def effect(message: GroupMessage, session: Session) -> None:
        session.add(line(message))

    handle = ExactlyOnce(database.plain_engine()).session_handler(effect)
    owner = Instance(5, 100)
    for sequence in (1, 2, 2):
        await handle(owner.message(sequence))
    assert database.rows() == [("k", 1, "orm"), ("k", 2, "orm")]


async def test_a_commit_of_the_session_commits_nothing_yet(database: Database) -> None:
    async def effect(message: GroupMessage, session: AsyncSession) -> None:
        session.add(line(message))
        await session.commit()
        if message.sequence == 1:
            raise RuntimeError("after the commit")

    handle = ExactlyOnce(database.engine()).session_handler(effect)
    owner = Instance(5, 100)
    with pytest.raises(RuntimeError):
        await handle(owner.message(1))
    assert database.rows() == []
    assert database.ask("SELECT * FROM keylane_progress") == []
    await handle(owner.message(2))
    assert database.rows() == [("k", 2, "orm")]


async def test_an_effect_that_hides_an_error_of_the_database_is_not_taken_for_done(on_postgres: Database) -> None:
    """PostgreSQL answers a commit of such a transaction with a rollback and no error."""

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        await write(message, connection)
        with suppress(DBAPIError):
            await connection.exec_driver_sql("SELECT 1 FROM nowhere")

    with pytest.raises(DBAPIError, match="current transaction is aborted"):
        await ExactlyOnce(on_postgres.engine()).handler(effect)(Instance(5, 100).message(1))
    assert on_postgres.rows() == []


async def test_an_effect_that_ends_the_transaction_is_not_taken_for_done(database: Database) -> None:
    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        await write(message, connection)
        await connection.rollback()

    with pytest.raises(InvalidInput, match="sequence 1 ended the transaction"):
        await ExactlyOnce(database.engine()).handler(effect)(Instance(5, 100).message(1))
    assert database.rows() == []
    assert database.ask("SELECT * FROM keylane_progress") == []


async def test_an_effect_that_ends_sqlites_transaction_is_told(on_sqlite: Database) -> None:
    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        await connection.exec_driver_sql("ROLLBACK")

    with pytest.raises(InvalidInput, match="sequence 1 ended the transaction"):
        await ExactlyOnce(on_sqlite.engine()).handler(effect)(Instance(5, 100).message(1))
    assert on_sqlite.ask("SELECT * FROM keylane_progress") == []


async def test_a_cancelled_effect_leaves_nothing(database: Database) -> None:
    begun = asyncio.Event()

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        await write(message, connection)
        if message.sequence == 1:
            begun.set()
            await asyncio.Event().wait()

    handle = ExactlyOnce(database.engine()).handler(effect)
    owner = Instance(5, 100)
    task = asyncio.create_task(handle(owner.message(1)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await handle(owner.message(2))
    assert database.rows() == [("k", 2, "")]
