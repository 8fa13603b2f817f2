"""Exactly once into a database: the table that handlers write to, and what is in it in the end.

Nothing in the table is unique: what is written twice is seen twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import BigInteger, Column, Identity, MetaData, Table, Text, create_engine, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from chaos.evidence import Handled
from keylane.core.partitions import partition_number
from keylane.exactly_once import ExactlyOnce
from keylane.groups import GroupMessage
from tests.integration.exactly_once.postgres import postgres

CONCURRENCY = 12
"""Handlers at once in a process, and connections to the database."""

_metadata = MetaData()
_effects = Table(
    "effects",
    _metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("at_ns", BigInteger, nullable=False),
    Column("lane", Text, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("by", Text, nullable=False),
)


@contextmanager
def database() -> Iterator[str]:
    """A real PostgreSQL for as long as the block lasts, with the table in it; gives its URL."""
    with postgres() as at:
        url = f"postgresql+psycopg://{at}/postgres"
        engine = create_engine(url)
        _metadata.create_all(engine)
        engine.dispose()
        yield url


def writing_once(
    url: str,
    by: str,
    chance: random.Random,
    fails: Callable[[int], bool],
    fail: Callable[[GroupMessage], Awaitable[None]],
) -> Callable[[GroupMessage], Awaitable[None]]:
    """A handler whose effect is one row. It may `fail` before the row is written or after it."""

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        sequence = message.sequence
        failing = fails(sequence)
        if failing and chance.random() < 0.5:
            await fail(message)
        row = {"at_ns": time.monotonic_ns(), "lane": message.key, "sequence": sequence, "by": by}
        await connection.execute(insert(_effects).values(row))
        if failing:
            await fail(message)

    engine = create_async_engine(url, pool_size=CONCURRENCY, max_overflow=0)
    return ExactlyOnce(engine).handler(effect)


def rows(url: str, partitions: int) -> list[Handled]:
    """All rows in the order in which they were written."""
    engine = create_engine(url)
    with engine.connect() as connection:
        found = connection.execute(select(_effects).order_by(_effects.c.id)).all()
    engine.dispose()
    return [
        Handled(row.at_ns / 1e9, row.lane, partition_number(row.lane, partitions), row.sequence, row.by)
        for row in found
    ]
