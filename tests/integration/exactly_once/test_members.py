"""Exactly once with real groups: the table is the stream, whatever handlers and members do."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from keylane import groups
from keylane.errors import InvalidInput
from keylane.exactly_once import ExactlyOnce
from keylane.groups import GroupMessage
from tests.integration.exactly_once.rig import CALM, Database, drained, write, write_plainly
from tests.integration.groups.rig import Ground, flawless, make_ground


async def test_the_table_is_the_stream(ground: Ground, database: Database) -> None:
    await ground.elastic(members=["m1"])
    await ground.join("m1", ExactlyOnce(database.engine()).handler(write))
    sent = await ground.publish(f"k{number % 20}" for number in range(200))
    await drained(ground, 200)
    verdict = database.verdict(sent)
    assert flawless(verdict), verdict


async def test_plain_functions_in_a_static_group(ground: Ground, database: Database) -> None:
    partitioned = await _partitioned(ground)
    await partitioned.static(members=["m1"])
    seen = []

    def effect(message: GroupMessage, connection: Connection) -> None:
        seen.append(message.delivery_sequence)
        write_plainly(message, connection)

    await partitioned.join("m1", ExactlyOnce(database.plain_engine()).handler(effect), settings=CALM)
    sent = await partitioned.publish(f"k{number % 5}" for number in range(50))
    await database.wait_for(50)
    assert sorted(seen) == sent
    assert flawless(database.verdict(sent))


async def test_as_many_plain_functions_at_once_as_handlers_may_run(ground: Ground, on_postgres: Database) -> None:
    """asyncio's own pool has 6 threads on two cores."""
    await ground.elastic(members=["m1"])
    together = threading.Barrier(12)

    def effect(message: GroupMessage, connection: Connection) -> None:
        together.wait(20)
        write_plainly(message, connection)

    once = ExactlyOnce(on_postgres.plain_engine())
    await once.create_tables()
    await ground.join("m1", once.handler(effect), concurrency=12, settings=CALM)
    sent = await ground.publish(f"k{number}" for number in range(12))
    await drained(ground, 12)
    assert not together.broken
    assert flawless(on_postgres.verdict(sent))


async def test_a_failing_effect_leaves_nothing_and_is_tried_again(ground: Ground, database: Database) -> None:
    tries: Counter[int] = Counter()

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        await write(message, connection)
        tries[message.sequence] += 1
        if message.sequence % 4 == 0 and tries[message.sequence] < 3:
            raise RuntimeError("not yet")

    await ground.elastic(members=["m1"])
    await ground.join("m1", ExactlyOnce(database.engine()).handler(effect), settings=CALM)
    sent = await ground.publish(f"k{number % 3}" for number in range(12))
    await drained(ground, 12)
    assert flawless(database.verdict(sent))
    assert {sequence: times for sequence, times in tries.items() if times > 1} == {4: 3, 8: 3, 12: 3}


async def test_what_was_not_acked_comes_again_and_is_not_done_again(ground: Ground, database: Database) -> None:
    inner = ExactlyOnce(database.engine()).handler(write)
    deliveries: Counter[int] = Counter()

    async def handler(message: GroupMessage) -> None:
        await inner(message)
        deliveries[message.sequence] += 1
        if deliveries[message.sequence] > 1:
            message.ack()

    await ground.elastic(members=["m1"])
    await ground.join("m1", handler, manual_ack=True)
    sent = await ground.publish(f"k{number}" for number in range(5))
    await drained(ground, 5)
    assert deliveries.keys() == set(sent)
    assert min(deliveries.values()) > 1
    assert flawless(database.verdict(sent))


@pytest.mark.timeout(120)
async def test_members_come_and_go_under_load(ground: Ground, on_postgres: Database) -> None:
    """Each member has an engine of its own; the partitions go round, and every claim is for the right one."""
    names = ["m1", "m2", "m3"]
    await ground.elastic(partitions=6, members=names[:2])
    for name in names:
        await ground.join(name, ExactlyOnce(on_postgres.engine()).handler(write))
    sent: list[int] = []
    over = asyncio.Event()

    async def load() -> None:
        for number in count():
            sent.extend(await ground.publish([f"k{number % 30}"]))
            if over.is_set():
                return
            await asyncio.sleep(0.002)

    loading = asyncio.create_task(load())
    for _ in range(3):
        await on_postgres.wait_for(len(on_postgres.rows()) + 50)
        await groups.add_members(ground.connection, ground.stream, "g", ["m3"])
        await on_postgres.wait_for(len(on_postgres.rows()) + 50)
        await groups.drop_members(ground.connection, ground.stream, "g", ["m3"])
    over.set()
    await loading
    await drained(ground, len(sent))
    verdict = on_postgres.verdict(sent)
    assert flawless(verdict), verdict


async def _partitioned(ground: Ground) -> Ground:
    return await make_ground(ground.stack, ground.connection, f"{ground.stream}p", ground.url, partitions=4)


@pytest.mark.parametrize("options", [{"order": "none"}, {"manual_ack": True}])
async def test_without_order_or_with_acks_by_hand_it_is_refused(
    ground: Ground, database: Database, options: dict[str, Any]
) -> None:
    await ground.elastic(members=["m1"])
    with pytest.raises(InvalidInput, match="needs each key's messages in order"):
        await ground.join("m1", ExactlyOnce(database.engine()).handler(write), **options)
