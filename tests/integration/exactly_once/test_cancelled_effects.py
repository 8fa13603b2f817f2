"""Effects that leave something in their task: a row that was rolled back is written again, and never taken for done."""

from __future__ import annotations

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from keylane.exactly_once import ExactlyOnce
from keylane.groups import GroupMessage, MemberHooks
from tests.integration.exactly_once.rig import CALM, Database, drained, write
from tests.integration.groups.rig import Ground, flawless
from tests.integration.odd_handlers import FAILING, RETURNING

LEFT_BEHIND = ("cancelled_itself_and_returned", "cancelled_and_uncancelled_and_returned")
"""Their cancellation comes when the row is noted, after the effect has returned: the row is rolled back."""


@pytest.mark.parametrize("way", FAILING)
@pytest.mark.parametrize("when", ["before the row", "after the row"])
async def test_a_row_that_was_rolled_back_is_written_again(
    ground: Ground, on_sqlite: Database, way: str, when: str
) -> None:
    await failing_once(ground, on_sqlite, way, when)


@pytest.mark.parametrize("way", ["task_group", "leaked_scope", "cancelled_itself_and_raised"])
async def test_the_same_on_postgres(ground: Ground, on_postgres: Database, way: str) -> None:
    await failing_once(ground, on_postgres, way, "after the row")


async def failing_once(ground: Ground, database: Database, way: str, when: str) -> None:
    await ground.elastic(members=["a"])
    sent = await ground.publish(["k", "k", "k", "other", "k"])
    failures: list[tuple[int, int]] = []
    first = [True]

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        fails = message.sequence == sent[1] and bool(first)
        if fails and when == "before the row":
            first.clear()
            await FAILING[way]()
        await write(message, connection)
        if fails:
            first.clear()
            await FAILING[way]()

    hooks = MemberHooks(on_failure=lambda message, error, tries: failures.append((message.sequence, tries)))
    once = ExactlyOnce(database.engine())
    await ground.join("a", once.handler(effect), settings=CALM, hooks=hooks)
    await drained(ground, len(sent))
    assert flawless(database.verdict(sent))
    assert failures == [(sent[1], 1)]


@pytest.mark.parametrize("way", RETURNING)
async def test_an_effect_that_returns_has_one_row(ground: Ground, database: Database, way: str) -> None:
    await ground.elastic(members=["a"])
    sent = await ground.publish(["k", "k", "k", "other", "k"])
    failures: list[tuple[int, int]] = []
    first = [True]

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        await write(message, connection)
        if message.sequence == sent[1] and first:
            first.clear()
            await RETURNING[way]()

    hooks = MemberHooks(on_failure=lambda message, error, tries: failures.append((message.sequence, tries)))
    once = ExactlyOnce(database.engine())
    await ground.join("a", once.handler(effect), concurrency=1, settings=CALM, hooks=hooks)
    await drained(ground, len(sent))
    assert flawless(database.verdict(sent))
    assert set(failures) <= ({(sent[1], 1)} if way in LEFT_BEHIND else set())
