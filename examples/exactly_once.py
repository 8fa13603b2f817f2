"""Exactly once: payments are added to balances in a database, and a process dies between its commit and its ack.

Starts its own server and its own worker processes, writes to SQLite, runs for a few seconds and needs nothing prepared
(pip install 'keylane[sql]' aiosqlite):

    python examples/exactly_once.py
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Self

from nats.js.api import StreamConfig
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, func, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

import keylane
from keylane import Connection, groups
from keylane.exactly_once import ExactlyOnce
from keylane.jetstream import ConsumerConfig, streams
from keylane.server import NatsServer

PAYMENTS = 200
FATAL = 60

metadata = MetaData()
balances = Table(
    "balances",
    metadata,
    Column("account", String, primary_key=True),
    Column("payments", Integer, nullable=False),
    Column("amount", Integer, nullable=False),
)


# ---- the worker, in a separate process ---------------------------------------------------------------


async def pay(message: groups.GroupMessage, connection: AsyncConnection) -> None:
    """Add a payment to its account. Done twice, the balance would be wrong."""
    amount = int(message.data)
    row = insert(balances).values(account=message.key, payments=1, amount=amount)
    await connection.execute(
        row.on_conflict_do_update(
            index_elements=["account"],
            set_={"payments": balances.c.payments + 1, "amount": balances.c.amount + amount},
        )
    )


async def work(url: str, database: str, fatal: int) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{database}")
    once = ExactlyOnce(engine)
    pay_once = once.handler(pay)

    async def handler(message: groups.GroupMessage) -> None:
        print("got", message.sequence, flush=True)
        await pay_once(message)
        if message.sequence == fatal:
            os.kill(os.getpid(), signal.SIGKILL)  # the payment is committed, but not acked yet

    def stop() -> None:
        asyncio.get_running_loop().remove_reader(sys.stdin)
        signal.raise_signal(signal.SIGTERM)

    asyncio.get_running_loop().add_reader(sys.stdin, stop)  # the parent process is gone
    settings = ConsumerConfig(ack_wait_s=1.0)
    try:
        async with (
            keylane.connect(url) as connection,
            groups.join(connection, "PAYMENTS", "ledger", "alice", handler, settings=settings) as member,
        ):
            await member.wait()
    finally:
        await engine.dispose()


# ---- the scenario ------------------------------------------------------------------------------------


class Worker:
    """A worker process and the messages delivered to it. Leaving the block stops it."""

    def __init__(self, url: str, database: str, fatal: int = 0) -> None:
        self.got: list[int] = []
        self._command = (sys.executable, __file__, "--worker", url, database, str(fatal))

    async def __aenter__(self) -> Self:
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the main process, which then stops its workers
        )
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.terminate()
        try:
            async with asyncio.timeout(30):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
        await self._listening

    async def _listen(self) -> None:
        if self.process.stdout is not None:
            async for line in self.process.stdout:
                self.got.append(int(line.split()[1]))


async def until_all_is_acked(connection: Connection) -> None:
    async with asyncio.timeout(30):
        while True:
            state = await streams.state(connection, "PAYMENTS-ledger")
            if state.last_sequence == PAYMENTS and state.messages == 0:
                return
            await asyncio.sleep(0.05)


async def main(directory: str) -> None:
    database = str(Path(directory) / "balances.db")
    engine = create_engine(f"sqlite:///{database}")
    metadata.create_all(engine)
    async with NatsServer.start() as server, keylane.connect(server.url) as connection:
        await streams.create(connection, StreamConfig(name="PAYMENTS", subjects=["payments.*"]))
        await groups.create_elastic(
            connection, "PAYMENTS", "ledger", partitions=4, partition_by="payments.*", members=["alice"]
        )
        for number in range(PAYMENTS):
            await connection.jetstream.publish(f"payments.account-{number % 10}", str(number).encode())
        print(f"{PAYMENTS} payments into 10 accounts, {sum(range(PAYMENTS))} in all", flush=True)
        async with Worker(server.url, database, FATAL) as first:
            await first.process.wait()
        print("A is killed after the commit of a payment and before its ack (kill -9)")
        async with Worker(server.url, database) as second:
            await until_all_is_acked(connection)
    again = sorted(set(first.got) & set(second.got))
    print(
        f"B went on; {len(again)} payments were delivered to both, the fatal one {'too' if FATAL in again else 'NOT'}"
    )
    with engine.connect() as found:
        accounts, payments, amount = found.execute(
            select(func.count(), func.sum(balances.c.payments), func.sum(balances.c.amount))
        ).one()
    engine.dispose()
    print(f"in the table: {payments} payments into {accounts} accounts, {amount} in all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        keylane.run(work(sys.argv[2], sys.argv[3], int(sys.argv[4])))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            keylane.run(main(temporary))
