"""Real processes that die and freeze at the worst moment; in the end the table is the stream."""

from __future__ import annotations

import signal

import pytest

from tests.integration.exactly_once.processes import worker
from tests.integration.exactly_once.rig import Database, drained
from tests.integration.groups.rig import Ground, flawless

COUNT = 60


@pytest.mark.timeout(120)
async def test_killed_between_the_commit_and_the_ack(ground: Ground, database: Database) -> None:
    await ground.elastic(members=["m1"])
    async with worker(ground, database, "first", kill_at=30) as first:
        sent = await ground.publish(f"k{number % 6}" for number in range(COUNT))
        assert await first.ended() == -signal.SIGKILL
    assert 30 in {sequence for _, sequence, _ in database.rows()}, "its effect was committed"
    async with worker(ground, database, "second") as second:
        await drained(ground, COUNT)
        await second.says("got 30")  # it was delivered again
    verdict = database.verdict(sent)
    assert flawless(verdict), verdict


@pytest.mark.timeout(120)
async def test_frozen_in_the_middle_of_a_transaction(ground: Ground, on_postgres: Database) -> None:
    await ground.elastic(members=["m1"])
    async with worker(ground, on_postgres, "first", freeze_at=30, idle_timeout_s=2.0) as first:
        sent = await ground.publish(f"k{number % 6}" for number in range(COUNT))
        await first.says("freezing 30")
        async with worker(ground, on_postgres, "second", idle_timeout_s=2.0) as second:
            await drained(ground, COUNT)
            await second.says("got 30")
            first.wake()
            await first.says("failed 30", "inactive")
            sent += await ground.publish(f"k{number % 6}" for number in range(COUNT))
            await drained(ground, 2 * COUNT)
    verdict = on_postgres.verdict(sent)
    assert flawless(verdict), verdict
    assert [who for _, sequence, who in on_postgres.rows() if sequence == 30] == ["second"]
