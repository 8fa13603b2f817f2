"""A consumer that works at most once: a batch is taken in the log before it is worked on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Key
from keylane.core.claim_records import ClaimingMessages, Heartbeat, Message, decode, encode
from keylane.errors import OutcomeUnknown
from keylane.marshal import ConsumerHooks, MarshalMessage, MemorySource, Reader, SourceRecord
from keylane.marshal.delivery_modes import BatchAllowance
from tests.integration.marshal.rig import (
    GROUP,
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
MODE = "at_most_once"


def taken(log: LiveLog) -> dict[int, int]:
    """The offset up to which the messages of each partition were taken."""
    said = [decode(record.value) for record in log.records]
    return {one.partition: one.proposed for one in said if isinstance(one, ClaimingMessages)}


async def test_all_messages_once_in_batches() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 25)
    async with consumer(View(log), source, "anna", seen, mode=MODE, batch_size=10):
        await seen.until(lambda one: len(one.messages) == 25)
    assert set(seen.times.values()) == {1}
    assert in_order_per_key(seen.messages)
    said = [decode(record.value) for record in log.records]
    assert [one.proposed for one in said if isinstance(one, ClaimingMessages)] == [10, 20, 25]
    await check_log(log)


async def test_nothing_is_fetched_before_it_is_known_to_be_ours() -> None:
    """The document's first step. Without a heartbeat that the log has nobody knows, so one is written first."""

    class Fetches(MemorySource):
        """Keeps whether the partition was ours at each fetch."""

        ours: list[bool]

        @asynccontextmanager
        async def reader(self, topic: str, partition: int, offset: int) -> AsyncIterator[Reader]:
            async with super().reader(topic, partition, offset) as opened:
                yield Fetch(opened, self)

    class Fetch:
        def __init__(self, reader: Reader, source: Fetches) -> None:
            self._reader, self._source = reader, source

        async def next(self, most: int, wait_s: float) -> list[SourceRecord]:
            self._source.ours.append(may_start(anna))
            return await self._reader.next(most, 0.02)

    log, source, seen = LiveLog(), Fetches({TOPIC: 1}), Seen()
    source.ours, view = [], View(log)
    anna = consumer(view, source, "anna", seen, mode=MODE)
    async with anna:
        await until(lambda: len(source.ours) > 5)
        view.down = True
        await until(lambda: not may_start(anna))
        fetches = len(source.ours)
        fill(source, 1, 5)
        await asyncio.sleep(0.2)
        assert len(source.ours) <= fetches + 1, "one was under way"
        view.down = False
        await seen.until(lambda one: len(one.messages) == 5)
    assert all(source.ours)


async def test_nothing_is_handled_before_the_log_has_the_claim_and_the_heartbeat() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 7)
    async with consumer(View(log), source, "anna", seen, mode=MODE, batch_size=3):
        places: list[tuple[int, int]] = []
        for batch in (3, 6, 7):
            await seen.until(lambda one, batch=batch: len(one.began) >= batch)  # type: ignore[misc]
            said = [decode(record.value) for record in log.records]
            taken = next(
                at for at, one in enumerate(said) if isinstance(one, ClaimingMessages) and one.proposed == batch
            )
            beaten = next(at for at, one in enumerate(said) if isinstance(one, Heartbeat) and one.offset == batch)
            places.append((taken, beaten))
        assert all(taken < beaten for taken, beaten in places)


async def test_a_failed_message_is_not_tried_again() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 9)
    failed: list[int] = []

    async def handler(message: MarshalMessage) -> None:
        await seen(message)
        if message.offset == 4:
            raise ValueError("no")

    hooks = ConsumerHooks(on_failure=lambda message, _, tries: failed.append(message.offset * 10 + tries))
    async with consumer(View(log), source, "anna", handler, mode=MODE, batch_size=3, hooks=hooks):
        await seen.until(lambda one: len(one.messages) == 9)
    assert failed == [41]
    assert set(seen.times.values()) == {1}


@pytest.mark.parametrize("seed", range(3))
async def test_kills_at_any_moment_never_repeat_and_lose_one_batch_at_most(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - repeatable, guards nothing
    log, source, seen = LiveLog(), MemorySource({TOPIC: 2}), Seen()
    fill(source, 2, 300)
    kills, batch = 6, 5

    async def handler(message: MarshalMessage) -> None:
        await asyncio.sleep(0.001)
        await seen(message)

    for _ in range(kills):
        # Another client each time would wait two intervals: the same one goes on at once.
        member = await consumer(View(log), source, "anna", handler, mode=MODE, batch_size=batch).start()
        wanted = len(seen.began) + chance.randrange(8)
        await seen.until(lambda one, wanted=wanted: len(one.began) >= wanted)  # type: ignore[misc]
        await asyncio.sleep(chance.random() * 0.01)
        await kill(member)
    async with consumer(View(log), source, "anna", handler, mode=MODE, batch_size=batch) as last:
        await until(lambda: len(last.partitions) == 2)
        # The very last messages may be among the lost: the log tells when all are taken.
        await until(lambda: taken(log) == {0: 300, 1: 300})
    assert set(seen.times.values()) == {1}
    lost = 600 - len(seen.times)
    assert lost <= kills * batch, "one batch for each kill, over all partitions"
    await check_log(log)


async def test_no_more_than_one_batch_is_taken_and_not_done_over_all_partitions() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 4}), Seen()
    fill(source, 4, 30)
    seen.hold = asyncio.Event()
    batch, most = 8, 0

    def taken_and_not_done() -> int:
        return sum(taken(log).values()) - len(seen.messages)

    async with consumer(View(log), source, "anna", seen, mode=MODE, batch_size=batch) as anna:
        await until(lambda: len(anna.partitions) == 4)
        await seen.until(lambda one: len(one.began) >= 3)
        seen.hold.set()
        while len(seen.messages) < 120:
            most = max(most, taken_and_not_done())
            await asyncio.sleep(0)
    assert 0 < most <= batch
    assert set(seen.times.values()) == {1}


async def test_a_message_that_hangs_holds_up_no_other_partition() -> None:
    log, source, seen, hangs = LiveLog(), MemorySource({TOPIC: 3}), Seen(), asyncio.Event()

    async def handler(message: MarshalMessage) -> None:
        if (message.partition, message.offset) == (0, 0):
            await hangs.wait()
        await seen(message)

    async with consumer(View(log), source, "anna", handler, mode=MODE, batch_size=10) as anna:
        await until(lambda: len(anna.partitions) == 3)
        fill(source, 3, 40, keys=1)
        await seen.until(lambda one: [len(one.offsets.get(number, [])) for number in (1, 2)] == [40, 40])
        assert 0 not in seen.offsets
        hangs.set()
        await seen.until(lambda one: len(one.messages) == 120)
    assert set(seen.times.values()) == {1}


async def test_an_allowance_is_given_in_turn_and_comes_back() -> None:
    allowance = BatchAllowance(10)
    assert await allowance.take(4) == 4
    assert await allowance.take(20) == 6
    first, second, third = (asyncio.create_task(allowance.take(wanted)) for wanted in (5, 2, 8))
    await asyncio.sleep(0)
    allowance.give_back(3)
    await asyncio.sleep(0)
    assert not first.done(), "more may come back at once"
    allowance.give_back(1)
    assert await first == 4, "a moment later it gets what is left"
    second.cancel()
    allowance.give_back(8)
    assert await third == 8
    allowance.give_back(2)
    allowance.sharing = 3
    assert await allowance.take(20) == 2
    allowance.give_back(8)
    assert await allowance.take(20) == 3, "a third: the others want some as well"


async def test_a_taken_batch_is_finished_before_a_release() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 10)
    seen.hold = asyncio.Event()
    anna = await consumer(View(log), source, "anna", seen, mode=MODE, batch_size=10, concurrency=2).start()
    await seen.until(lambda one: len(one.began) == 2)
    ending = asyncio.create_task(anna.stop())
    await asyncio.sleep(0.05)
    seen.hold.set()
    await ending
    assert len(seen.messages) == 10, "they were taken, so nobody else would have had them"


async def test_unknown_outcomes_of_the_claim_of_messages() -> None:
    """Written or not, the answer got lost: the batch is handled once, in the end."""
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 12)
    view, count = View(log), 0

    def unknown(message: Message) -> None:
        nonlocal count
        if isinstance(message, ClaimingMessages):
            count += 1
            if count % 3 == 1:
                raise OutcomeUnknown("it was not written")
            if count % 3 == 2:
                log.write(encode(message), 0, key=Key(GROUP, TOPIC, 0))
                raise OutcomeUnknown("it was written")

    view.before_append = unknown
    async with consumer(view, source, "anna", seen, mode=MODE, batch_size=4):
        await seen.until(lambda one: len(one.messages) == 12)
    assert set(seen.times.values()) == {1}


async def test_a_lapsed_owner_takes_messages_again_only_after_a_heartbeat() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    view = View(log)
    async with consumer(view, source, "anna", seen, mode=MODE) as anna:
        await until(lambda: anna.partitions == (ONLY,))
        view.down = True
        await until(lambda: not may_start(anna))
        log.ahead_ms += 60_000
        fill(source, 1, 5)
        view.down = False
        await seen.until(lambda one: len(one.messages) == 5)
    assert set(seen.times.values()) == {1}


async def test_where_the_log_forgot_how_far_it_was_the_end_is_the_place() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 5)
    async with consumer(View(log), source, "anna", seen, mode=MODE):
        await seen.until(lambda one: len(one.messages) == 5)
    log.trim(log.end)
    source.commits.clear()
    async with consumer(View(log), source, "bert", seen, mode=MODE) as bert:
        await until(lambda: bert.partitions == (ONLY,))
        fill(source, 1, 3, first=5)
        await seen.until(lambda one: len(one.messages) == 8)
    assert set(seen.times.values()) == {1}
    claim = (await world_of(log)).claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert claim.offset == 8
