"""A consumer that works at least once, on a log in memory whose time goes on."""

from __future__ import annotations

import asyncio
import time

import pytest

from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_records import Message
from keylane.errors import OutcomeUnknown
from keylane.marshal import Appetite, MarshalMessage, MemorySource
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
    in_order_per_key,
    kill,
    may_start,
    world_of,
)
from tests.waiter import until

ONLY = TopicPartition(TOPIC, 0)


async def test_one_consumer_takes_all_and_handles_each_message_once() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 4}), Seen()
    fill(source, 4, 50)
    async with consumer(log, source, "anna", seen) as anna:
        await seen.until(lambda one: len(one.messages) == 200)
        assert anna.partitions == tuple(TopicPartition(TOPIC, number) for number in range(4))
        fill(source, 4, 5, first=50)
        await seen.until(lambda one: len(one.messages) == 220)
    assert set(seen.times.values()) == {1}
    assert in_order_per_key(seen.messages)
    world = await check_log(log)
    for number in range(4):
        claim = world.claim_of(GROUP, TOPIC, number)
        assert claim is not None
        assert claim.owner is None, "released at the end"
        assert claim.offset == 55, "where the next owner goes on"
    assert source.commits


async def test_the_next_owner_goes_on_where_the_last_one_released() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 2}), Seen()
    fill(source, 2, 20)
    async with consumer(log, source, "anna", seen):
        await seen.until(lambda one: len(one.messages) == 40)
    fill(source, 2, 20, first=20)
    async with consumer(log, source, "bert", seen):
        await seen.until(lambda one: len(one.messages) == 80)
    assert set(seen.times.values()) == {1}


async def test_consumers_share_and_nobody_handles_what_another_owns() -> None:
    log, source = LiveLog(partitions=4), MemorySource({TOPIC: 8})
    fill(source, 8, 30)
    seen = [Seen() for _ in range(4)]
    members = [consumer(log, source, f"c{number}", one, max_claims=2) for number, one in enumerate(seen)]
    for member in members:
        await member.start()
    try:
        await until(lambda: sum(len(one.messages) for one in seen), lambda handled: handled >= 240)
        assert [len(member.partitions) for member in members] == [2, 2, 2, 2]
    finally:
        for member in members:
            await member.stop()
    everything = sum((one.times for one in seen), start=seen[0].times - seen[0].times)
    assert len(everything) == 240
    assert set(everything.values()) == {1}
    await check_log(log)


async def test_a_dead_consumers_partitions_are_taken_over_from_its_last_heartbeat() -> None:
    """Nothing is lost; what was done since the last heartbeat is done again."""
    log, source, first, second = LiveLog(), MemorySource({TOPIC: 3}), Seen(), Seen()
    fill(source, 3, 40)
    anna = await consumer(log, source, "anna", first).start()
    await first.until(lambda one: len(one.messages) == 120)
    await kill(anna)
    fill(source, 3, 10, first=40)
    async with consumer(log, source, "bert", second):
        await second.until(lambda one: {(p, 49) for p in range(3)} <= set(one.times))
    both = first.times + second.times
    assert set(both) == {(partition, offset) for partition in range(3) for offset in range(50)}
    assert set(second.times.values()) == {1}
    await check_log(log)


async def test_a_failed_message_is_tried_again_and_only_its_key_waits() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 20, keys=2)
    failures: list[int] = []

    async def handler(message: MarshalMessage) -> None:
        if message.offset == 4 and len(failures) < 3:
            failures.append(message.offset)
            raise ValueError("not now")
        await seen(message)

    async with consumer(log, source, "anna", handler):
        await seen.until(lambda one: len(one.messages) == 20)
    assert in_order_per_key(seen.messages)
    order = [message.offset for message in seen.messages]
    assert order.index(19) < order.index(4), "the other key went on"


async def test_heartbeats_name_the_first_message_that_is_not_done() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 10, keys=10)
    stuck = asyncio.Event()

    async def handler(message: MarshalMessage) -> None:
        if message.offset == 3:
            await stuck.wait()
        await seen(message)

    async with consumer(log, source, "anna", handler):
        await seen.until(lambda one: len(one.messages) == 9)
        records = log.end
        await until(lambda: log.end >= records + 2)  # two heartbeats later
        claim = (await world_of(log)).claim_of(GROUP, TOPIC, 0)
        assert claim is not None
        assert claim.offset == 3
        stuck.set()
        await seen.until(lambda one: len(one.messages) == 10)
    claim = (await world_of(log)).claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert claim.offset == 10


async def test_max_tries_then_given_up() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 6, keys=1)
    dead: list[tuple[int, int]] = []

    async def handler(message: MarshalMessage) -> None:
        if message.offset == 2:
            raise ValueError("poison")
        await seen(message)

    async def give_up(message: MarshalMessage, error: BaseException, tries: int) -> None:
        assert isinstance(error, ValueError)
        dead.append((message.offset, tries))

    async with consumer(log, source, "anna", handler, max_tries=2, give_up=give_up):
        await seen.until(lambda one: len(one.messages) == 5)
    assert dead == [(2, 2)]
    claim = (await world_of(log)).claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert claim.offset == 6


async def test_a_plain_function_runs_in_a_thread() -> None:
    log, source = LiveLog(), MemorySource({TOPIC: 1})
    fill(source, 1, 10, keys=1)
    got: list[int] = []
    loop_thread = asyncio.get_running_loop()

    def handler(message: MarshalMessage) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            got.append(message.offset)

    async with consumer(log, source, "anna", handler):
        await until(lambda: len(got) == 10)
    assert got == list(range(10))
    assert loop_thread.is_running()


async def test_the_interval_is_kept_by_heartbeats() -> None:
    """An idle owner stays the owner: its heartbeats come in time."""
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    async with consumer(log, source, "anna", seen) as anna:
        await until(lambda: len(anna.partitions) == 1)
        began = log.now_ms
        await until(lambda: log.now_ms > began + 4000 * INTERVAL_S)
        world = await check_log(log)
        [tenure] = world.tenures()
        assert tenure.ended is None


async def test_no_more_is_begun_than_one_interval_of_messages_that_no_heartbeat_told_of() -> None:
    """So whoever comes next repeats no more than that, however long the heartbeats of a dying owner take."""
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    view, heard = View(log), list[float]()

    def lose_heartbeats(message: Message) -> None:
        if seen.messages:
            raise OutcomeUnknown("nobody answers")
        heard.append(time.monotonic())

    view.before_append = lose_heartbeats

    async def trickle() -> None:
        while True:
            fill(source, 1, 1, first=len(seen.began))
            await asyncio.sleep(INTERVAL_S / 50)

    async with consumer(view, source, "anna", seen) as anna:
        await until(lambda: len(anna.partitions) == 1)
        trickling = asyncio.create_task(trickle())
        await until(lambda: bool(seen.messages) and not may_start(anna))
        begun = len(seen.began)
        await asyncio.sleep(INTERVAL_S / 4)
        trickling.cancel()
        assert len(seen.began) == begun, "it waits"
        assert seen.began_at[-1] - heard[-1] < INTERVAL_S
        view.before_append = None
        await seen.until(lambda one: len(one.began) > begun)


@pytest.mark.parametrize("interval_s", [1.0, 60.0])
async def test_intervals_from_a_second_to_a_minute(interval_s: float) -> None:
    """A death is noticed two intervals after the last heartbeat by the log's time, whatever the interval."""
    log, source, seen = LiveLog(), MemorySource({TOPIC: 4}), Seen()
    fill(source, 4, 10)
    anna = await consumer(
        log, source, "anna", seen, heartbeat_interval_s=interval_s, pick=Appetite(greedy=True)
    ).start()
    await seen.until(lambda one: len(one.messages) == 40)
    await kill(anna)
    log.ahead_ms += int(1500 * interval_s)
    records = log.end
    async with consumer(log, source, "bert", seen, heartbeat_interval_s=interval_s) as bert:
        await until(lambda: log.end > records)  # it has tried
        assert bert.partitions == ()
    log.ahead_ms += int(500 * interval_s)
    async with consumer(log, source, "carl", seen, heartbeat_interval_s=interval_s, pick=Appetite(greedy=True)) as carl:
        await until(lambda: len(carl.partitions) == 4)
    assert len(seen.times) == 40
