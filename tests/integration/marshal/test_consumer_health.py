"""Pauses of a group, consumers that fall behind, and what an admin sees."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from keylane.errors import InvalidInput
from keylane.marshal import Admin, Appetite, ConsumerHooks, Freshness, MarshalMessage, MemorySource
from tests.integration.marshal.rig import (
    GROUP,
    INTERVAL_S,
    TOPIC,
    LiveLog,
    Seen,
    View,
    check_log,
    consumer,
    fill,
)
from tests.waiter import until


def admin_of(log: LiveLog) -> Admin:
    return Admin(View(log), heartbeat_interval_s=INTERVAL_S)


def at(log: LiveLog, *, in_s: float) -> datetime:
    return datetime.fromtimestamp(log.now_ms / 1000 + in_s, UTC)


async def test_a_paused_group_releases_and_goes_on_after_resume() -> None:
    log, source, seen = LiveLog(partitions=4), MemorySource({TOPIC: 4}), Seen()
    log.ahead_ms += 400_000_000_000  # the expiry is far ahead of this machine's clock as well
    fill(source, 4, 10)
    gone: list[str] = []
    hooks = ConsumerHooks(on_released=lambda _, why: gone.append(why))
    async with consumer(View(log), source, "anna", seen, hooks=hooks) as anna:
        await seen.until(lambda one: len(one.messages) == 40)
        await admin_of(log).release_group(GROUP, at(log, in_s=3600))
        await until(lambda: anna.partitions == ())
        assert gone == ["the group is paused"] * 4
        fill(source, 4, 5, first=10)
        async with consumer(View(log), source, "bert", seen) as bert:
            await asyncio.sleep(3 * INTERVAL_S)
            assert (anna.partitions, bert.partitions) == ((), ())
            assert len(seen.began) == 40
        assert len((await admin_of(log).world()).pauses(GROUP)) == 4
        await admin_of(log).resume(GROUP)
        await seen.until(lambda one: len(one.messages) == 60)
    assert set(seen.times.values()) == {1}
    await check_log(log)


async def test_a_pause_ends_by_itself() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 2}), Seen()
    log.ahead_ms += 400_000_000_000
    async with consumer(View(log), source, "anna", seen) as anna:
        await until(lambda: len(anna.partitions) == 2)
        await admin_of(log).release_group(GROUP, at(log, in_s=2.0))
        await until(lambda: anna.partitions == ())
        await until(lambda: len(anna.partitions) == 2)
    [paused] = [record for record in log.records if record.value.startswith(b"ReleaseGroup")]
    claims = [record for record in log.records if record.value.startswith(b"ClaimingPartition")]
    assert claims[-1].time_ms >= int(paused.value.rsplit(b"/", 1)[1]) * 1000


async def test_other_groups_are_not_paused() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    async with consumer(View(log), source, "anna", seen) as anna:
        await until(lambda: len(anna.partitions) == 1)
        await admin_of(log).release_group("shipping", datetime.now(UTC) + timedelta(days=20_000))
        ends = log.end
        await until(lambda: log.end > ends + 3)
        assert len(anna.partitions) == 1


async def test_pauses_that_cannot_be() -> None:
    admin = admin_of(LiveLog())
    with pytest.raises(InvalidInput, match="which is past: give a later time, or use resume"):
        await admin.release_group(GROUP, datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(InvalidInput, match="give a datetime with a time zone"):
        await admin.release_group(GROUP, datetime(2120, 1, 1))
    with pytest.raises(InvalidInput, match="group id 'a/b' holds"):
        await admin.release_group("a/b", datetime(2120, 1, 1, tzinfo=UTC))


async def test_one_that_falls_behind_releases_and_another_takes_over() -> None:
    log, source, slow_seen, fast = LiveLog(), MemorySource({TOPIC: 1}), Seen(), Seen()
    gone: list[str] = []
    fill(source, 1, 3000)

    async def slow(message: MarshalMessage) -> None:
        await asyncio.sleep(0.2)
        await slow_seen(message)

    async def pour() -> None:
        while True:
            fill(source, 1, 20, first=3000)
            await asyncio.sleep(0.05)

    hooks = ConsumerHooks(on_released=lambda _, why: gone.append(why))
    pouring = asyncio.create_task(pour())
    try:
        async with consumer(
            View(log), source, "slow", slow, release_when_behind=True, hooks=hooks, order="partition", max_in_flight=10
        ) as anna:
            await until(lambda: len(anna.partitions) == 1)
            async with consumer(View(log), source, "fast", fast, release_when_behind=True) as bert:
                await until(lambda: len(bert.partitions) == 1)
                assert gone[0].startswith("behind: ")
                assert slow_seen.began, "it did work before"
                await fast.until(lambda one: len(one.messages) > 3000)
                assert anna.partitions == ()
    finally:
        pouring.cancel()
    await check_log(log)


async def test_one_that_keeps_up_is_left_alone() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 2000)
    async with consumer(View(log), source, "anna", seen, release_when_behind=True) as anna:
        await until(lambda: len(anna.partitions) == 1)
        for _ in range(6):
            ends = log.end
            fill(source, 1, 50)
            await until(lambda ends=ends: log.end > ends)  # type: ignore[misc]
            assert len(anna.partitions) == 1


async def test_the_world_now_and_earlier_and_the_load() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 4}), Seen()
    fill(source, 4, 10)
    anna = await consumer(View(log), source, "anna", seen, pick=Appetite(max_claims=2)).start()
    await until(lambda: len(anna.partitions) == 2)
    await seen.until(lambda one: len(one.messages) == 20)
    ends = log.end
    await until(lambda: log.end > ends + 2)
    owned_at = at(log, in_s=0)
    admin = admin_of(log)
    async with asyncio.timeout(30):
        while True:
            loads = await admin.loads(source, GROUP, [TOPIC])
            if {one.freshness for one in loads[0].partitions} == {Freshness.FRESH}:
                break
            await asyncio.sleep(0.01)  # a heartbeat came late
    assert [(one.owner.client if one.owner else None, one.lag, len(one.partitions)) for one in loads] == [
        ("anna", 0, 2),
        (None, 20, 2),
    ]
    owned = list(anna.partitions)
    await anna.stop()
    assert [one for one in (await admin.world()).claims() if one.owner] == []
    earlier = await admin.world_at(owned_at)
    assert sorted((one.key.topic, one.key.partition) for one in earlier.claims() if one.owner) == owned
    assert list((await admin.world_at(datetime(2001, 1, 1, tzinfo=UTC))).claims()) == []
