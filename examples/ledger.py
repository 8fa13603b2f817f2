"""A ledger: every posting exactly once into SQLite; an account that is closed is parked, the others go on.

When the account is open again, `keylane dlq release` posts what waited, in order. Starts its own server, runs for a few
seconds and needs nothing prepared (pip install 'keylane[sql]' aiosqlite):

    python examples/ledger.py
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from pathlib import Path

from sqlalchemy import Column, Integer, MetaData, String, Table, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

import keylane
from keylane import groups
from keylane.exactly_once import ExactlyOnce
from keylane.jetstream import Outgoing, StreamConfig, publish_many, streams
from keylane.overview import overview
from keylane.server import NatsServer

ACCOUNTS = ("ann", "bob", "carol")
POSTINGS = 30

metadata = MetaData()
postings = Table(
    "postings",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("account", String, nullable=False),
    Column("amount", Integer, nullable=False),
)
closed = {"carol"}


async def post(message: groups.GroupMessage, connection: AsyncConnection) -> None:
    if message.key in closed:
        raise RuntimeError(f"account {message.key} is closed")
    await connection.execute(postings.insert().values(account=message.key, amount=int(message.data)))


async def amounts(engine: AsyncEngine, account: str) -> list[int]:
    wanted = select(postings.c.amount).where(postings.c.account == account).order_by(postings.c.number)
    async with engine.connect() as connection:
        return list((await connection.execute(wanted)).scalars())


async def posted(engine: AsyncEngine, count: int) -> None:
    """Until so many are in the table."""
    async with asyncio.timeout(60):
        while True:
            async with engine.connect() as connection:
                if (await connection.execute(select(func.count()).select_from(postings))).scalar_one() >= count:
                    return
            await asyncio.sleep(0.1)


async def parked(connection: keylane.Connection, count: int) -> None:
    """Until so many messages wait behind the one that failed."""
    async with asyncio.timeout(60):
        while True:
            group = (await overview(connection)).group("LEDGER", "books")
            if group is not None and group.parked_messages == count:
                return
            await asyncio.sleep(0.1)


async def keylane_command(url: str, *words: str) -> str:
    command = [sys.executable, "-m", "keylane.cli.main", *words, "-s", url]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    return said.decode().strip()


async def show(engine: AsyncEngine) -> None:
    found = [f"{account} {len(await amounts(engine, account))}" for account in ACCOUNTS]
    print(f"in the table: {', '.join(found)}")


async def main() -> None:
    logging.getLogger("keylane").addHandler(logging.NullHandler())  # it has the traceback of every failure
    with tempfile.TemporaryDirectory() as directory, NatsServer.start() as server:
        engine = create_async_engine(f"sqlite+aiosqlite:///{Path(directory, 'ledger.db')}")
        try:
            await keep_books(server, engine)
        finally:
            await engine.dispose()


async def keep_books(server: NatsServer, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    handler = ExactlyOnce(engine).handler(post)
    async with keylane.connect(server.url) as nats:
        await streams.create(nats, StreamConfig(name="LEDGER", subjects=["ledger.*"]))
        await groups.create_elastic(nats, "LEDGER", "books", partitions=4, partition_by="ledger.*", members=["a"])
        await publish_many(
            nats, [Outgoing(f"ledger.{ACCOUNTS[one % 3]}", str(one).encode()) for one in range(POSTINGS)]
        )
        async with groups.join(nats, "LEDGER", "books", "a", handler, concurrency=4, max_tries=2, after_tries="park"):
            print(f"{POSTINGS} postings for {', '.join(ACCOUNTS)}; carol is closed")
            await posted(engine, POSTINGS * 2 // 3)
            await parked(nats, POSTINGS // 3)
            await show(engine)
            closed.clear()
            print("carol is open again: keylane dlq release LEDGER books carol")
            print(await keylane_command(server.url, "dlq", "release", "LEDGER", "books", "carol"))
            await posted(engine, POSTINGS)
            await show(engine)
    expected = {account: list(range(index, POSTINGS, 3)) for index, account in enumerate(ACCOUNTS)}
    exact = all([await amounts(engine, account) == numbers for account, numbers in expected.items()])
    print(f"every posting once, each account in order: {'yes' if exact else 'no'}")


if __name__ == "__main__":
    keylane.run(main())
