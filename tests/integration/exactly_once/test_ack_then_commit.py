"""Prepare, double ack, commit or roll back: what it does, and the two ways in which it is weaker."""

from __future__ import annotations

import asyncio
from collections import Counter

from sqlalchemy import Connection, event, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from keylane.exactly_once import ack_then_commit
from keylane.groups import GroupMessage, MemberHooks
from keylane.jetstream import Message, consumers
from tests.integration.exactly_once.rig import CALM, Database, drained, effects, write, write_plainly
from tests.integration.groups.rig import Ground, flawless
from tests.waiter import until


async def test_it_acks_and_commits(ground: Ground, database: Database) -> None:
    await ground.elastic(members=["m1"])
    await ground.join("m1", ack_then_commit(database.engine(), write), settings=CALM)
    sent = await ground.publish(f"k{number % 5}" for number in range(30))
    await drained(ground, 30)
    await database.wait_for(30)
    assert flawless(database.verdict(sent))


async def test_plain_functions(ground: Ground, database: Database) -> None:
    await ground.elastic(members=["m1"])
    await ground.join("m1", ack_then_commit(database.plain_engine(), write_plainly), settings=CALM)
    sent = await ground.publish(f"k{number % 5}" for number in range(30))
    await drained(ground, 30)
    await database.wait_for(30)
    assert flawless(database.verdict(sent))


async def test_a_failing_effect_is_not_acked(ground: Ground, database: Database) -> None:
    tries: Counter[int] = Counter()

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        await write(message, connection)
        tries[message.sequence] += 1
        if tries[message.sequence] == 1:
            raise RuntimeError("not yet")

    await ground.elastic(members=["m1"])
    await ground.join("m1", ack_then_commit(database.engine(), effect), settings=CALM)
    sent = await ground.publish(["a", "b"])
    await database.wait_for(2)
    assert tries == dict.fromkeys(sent, 2)
    assert flawless(database.verdict(sent))


async def test_without_a_confirmation_it_rolls_back_and_tries_again(ground: Ground, database: Database) -> None:
    """The consumer is gone when the ack is sent: nobody answers."""
    failures: list[str] = []
    removed = 0

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        nonlocal removed
        await write(message, connection)
        if not removed:
            removed += 1
            await consumers.delete(ground.connection, f"{ground.stream}-g", "m1")

    await ground.elastic(members=["m1"])
    hooks = MemberHooks(on_failure=lambda _message, error, _tries: failures.append(type(error).__name__))
    await ground.join("m1", ack_then_commit(database.engine(), effect), hooks=hooks)
    sent = await ground.publish(["a"])
    await database.wait_for(1)
    assert failures
    assert set(failures) == {"AckFailed"}
    assert flawless(database.verdict(sent))


async def test_what_a_commit_would_refuse_is_refused_before_the_ack(ground: Ground, on_postgres: Database) -> None:
    on_postgres.do("ALTER TABLE effects ADD CONSTRAINT one UNIQUE (sequence) DEFERRABLE INITIALLY DEFERRED")
    failures: list[str] = []

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        await write(message, connection)
        if not failures:
            await connection.execute(insert(effects).values(lane="x", sequence=message.sequence, who=""))

    await ground.elastic(members=["m1"])
    hooks = MemberHooks(on_failure=lambda _message, error, _tries: failures.append(type(error).__name__))
    await ground.join("m1", ack_then_commit(on_postgres.engine(), effect), hooks=hooks, settings=CALM)
    sent = await ground.publish(["a"])
    await on_postgres.wait_for(1)
    assert failures == ["IntegrityError"]
    assert flawless(on_postgres.verdict(sent))


async def test_a_commit_that_fails_after_the_ack_has_lost_the_effect_and_is_reported(
    ground: Ground, on_sqlite: Database
) -> None:
    """The documented hole, also of a process that dies there."""
    failures: list[str] = []

    engine = on_sqlite.plain_engine()

    @event.listens_for(engine, "commit")
    def refuse(_connection: Connection) -> None:
        raise RuntimeError("the disk is gone")

    await ground.elastic(members=["m1"])
    hooks = MemberHooks(on_failure=lambda _message, error, _tries: failures.append(type(error).__name__))
    await ground.join("m1", ack_then_commit(engine, write_plainly), hooks=hooks, settings=CALM)
    await ground.publish(["a"])
    await until(lambda: failures, deadline_s=30)
    await drained(ground, 1)
    assert failures == ["RuntimeError"]
    assert on_sqlite.rows() == []


async def test_the_server_confirms_an_ack_twice(ground: Ground) -> None:
    """Why a confirmed ack does not say that nobody else has done the message."""
    confirmed = asyncio.Event()
    client = (await ground.client()).nats

    async def handler(message: GroupMessage) -> None:
        first = message.delivery
        again = Message(client, first.raw_subject, first.reply, first.raw_headers, first.data)
        await message.ack_confirmed()
        await again.ack_confirmed()
        confirmed.set()

    await ground.elastic(members=["m1"])
    await ground.join("m1", handler)
    await ground.publish(["a"])
    async with asyncio.timeout(20):
        await confirmed.wait()
