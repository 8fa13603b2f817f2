"""What stops a consumer, and how it says so."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from keylane.core.claim_records import Heartbeat, coordinating_partition
from keylane.errors import InvalidInput, LogReplaced, NoSuchTopic, NotStored, TwoHashes
from keylane.marshal import Appetite, Consumer, MemoryLog, MemorySource
from tests.integration.marshal.rig import GROUP, INTERVAL_S, TOPIC, LiveLog, Seen, View, consumer, fill
from tests.waiter import until


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"group": "a/b"}, r"group id 'a/b' holds '/' at position 2: a slash separates the fields"),
        ({"client_id": "c/1"}, r"client id 'c/1' holds '/' at position 2"),
        ({"topics": ["or/ders"]}, r"topic 'or/ders' holds '/' at position 3"),
        ({"instance_id": "i/1"}, r"instance id 'i/1' holds"),
        ({"topics": []}, r"give a list of topics"),
        ({"topics": "orders"}, r"give a list of topics"),
        ({"mode": "exactly_once"}, r"mode is 'exactly_once': use one of at_least_once, at_most_once"),
        ({"pick": "cleverest"}, r"order is 'cleverest': use one of random, round_robin"),
        ({"max_claims": 0}, r"max_claims is 0"),
        ({"pick": Appetite(), "max_claims": 3}, r"max_claims is given beside an Appetite"),
        ({"heartbeat_interval_s": 0}, r"heartbeat_interval_s is 0: give seconds, at least 0.1, at most 3600"),
        ({"batch_size": 0}, r"batch_size is 0"),
        ({"order": "none"}, r"order is 'none'"),
        ({"mode": "at_most_once", "max_tries": 2}, r"at most once tries nothing again"),
        ({"placing": "nowhere"}, r"placing is 'nowhere'"),
    ],
)
async def test_wrong_arguments_are_refused_before_anything_is_asked(arguments: dict[str, Any], said: str) -> None:
    named: dict[str, Any] = {"group": GROUP, "client_id": "anna", "topics": [TOPIC], "handler": Seen()} | arguments
    with pytest.raises(InvalidInput, match=said):
        Consumer(MemoryLog(), MemorySource({TOPIC: 1}), **named)


async def test_a_handler_that_is_none() -> None:
    with pytest.raises(InvalidInput, match="handler is 'x': give a function"):
        await consumer(LiveLog(), MemorySource({TOPIC: 1}), "anna", "x").start()


async def test_an_unknown_topic() -> None:
    one = Consumer(LiveLog(), MemorySource({TOPIC: 1}), GROUP, "anna", ["sales"], Seen())
    with pytest.raises(NoSuchTopic, match=r"no topic 'sales'.*orders"):
        await one.start()


async def test_records_of_another_hash_stop_it() -> None:
    log, source = LiveLog(partitions=4), MemorySource({TOPIC: 4})
    right, theirs = coordinating_partition(TOPIC, 2, 4), coordinating_partition(TOPIC, 2, 4, placing="topic")
    assert right != theirs
    told = rf"orders/2 of group 'billing', which belongs in partition {right}"
    async with consumer(View(log), source, "anna", Seen()) as anna:
        await until(lambda: len(anna.partitions) == 4)
        await log.append(Heartbeat("i", "go", GROUP, TOPIC, 2, 5, 1), theirs)
        with pytest.raises(TwoHashes, match=told):
            await anna.wait()
        assert (anna.state, anna.partitions) == ("ended", ())
        await anna.stop()


async def test_records_where_no_hash_puts_them_stop_nobody(caplog: pytest.LogCaptureFixture) -> None:
    log, source, seen = LiveLog(partitions=4), MemorySource({TOPIC: 4}), Seen()
    stray = coordinating_partition(TOPIC, 2, 4)
    hashes = {coordinating_partition(TOPIC, 0, 4), coordinating_partition(TOPIC, 0, 4, placing="topic")}
    assert stray not in hashes
    async with consumer(View(log), source, "anna", seen) as anna:
        await until(lambda: len(anna.partitions) == 4)
        await log.append(Heartbeat("i", "odd", GROUP, TOPIC, 0, 5, 1), stray)
        fill(source, 4, 5)
        await until(lambda: "1 records of the coordination log are skipped" in caplog.text)
        await seen.until(lambda one: len(one.messages) == 20)
        async with consumer(View(log), source, "bert", seen) as bert:
            await until(lambda: len(bert.partitions) == 2)
    assert f"about Key(group='{GROUP}', topic='{TOPIC}', partition=0), which belongs in" in caplog.text


async def test_another_hash_is_forgotten_when_its_user_is_gone() -> None:
    log, source = LiveLog(partitions=4), MemorySource({TOPIC: 4})
    log.ahead_ms = int((time.time() - time.monotonic()) * 1000)
    theirs = coordinating_partition(TOPIC, 2, 4, placing="topic")
    await log.append(Heartbeat("i", "go", GROUP, TOPIC, 2, 5, 1), theirs)
    with pytest.raises(TwoHashes, match=r"void two intervals \(1 s\) after their writer has stopped"):
        await consumer(View(log), source, "anna", Seen()).start()
    log.ahead_ms += int(2000 * INTERVAL_S) + 1
    log.write(b"later", theirs)
    async with consumer(View(log), source, "anna", Seen()) as anna:
        await until(lambda: len(anna.partitions) == 4)


async def test_a_changed_number_of_coordination_partitions_stops_it() -> None:
    log, source = LiveLog(partitions=4), MemorySource({TOPIC: 4})
    view, seen = View(log), Seen()
    anna = await consumer(view, source, "anna", seen).start()
    await until(lambda: len(anna.partitions) == 4)
    log.add_partition()
    with pytest.raises(InvalidInput, match="a world of 4 partitions and a coordination log of 5"):
        await asyncio.wait_for(anna.wait(), 30)
    fill(source, 4, 5)
    assert seen.began == []


async def test_a_log_that_was_cut_off_stops_it() -> None:
    log, source = LiveLog(), MemorySource({TOPIC: 2})
    anna = await consumer(View(log), source, "anna", Seen()).start()
    await until(lambda: len(anna.partitions) == 2)
    log.cut_off()
    with pytest.raises(LogReplaced, match="truncated or recreated"):
        await asyncio.wait_for(anna.wait(), 30)


async def test_trouble_that_lasts_too_long_stops_it() -> None:
    log, source = LiveLog(), MemorySource({TOPIC: 1})
    view = View(log)

    def away(_: object) -> None:
        raise NotStored("nobody answers")

    anna = await consumer(view, source, "anna", Seen(), patience_s=0.5).start()
    await until(lambda: len(anna.partitions) == 1)
    view.before_append = away
    with pytest.raises(NotStored, match="nobody answers"):
        await asyncio.wait_for(anna.wait(), 30)


async def test_a_topic_that_shrinks_stops_it() -> None:
    log, source = LiveLog(), MemorySource({TOPIC: 3})
    anna = await consumer(View(log), source, "anna", Seen(), heartbeat_interval_s=0.1).start()
    await until(lambda: len(anna.partitions) == 3)
    del source._rows[TOPIC][2]
    with pytest.raises(InvalidInput, match=r"had 3 partitions and has 2 now|it has 0 to 1"):
        await asyncio.wait_for(anna.wait(), 30)


async def test_started_twice_and_not_at_all() -> None:
    one = consumer(LiveLog(), MemorySource({TOPIC: 1}), "anna", Seen(), heartbeat_interval_s=INTERVAL_S)
    with pytest.raises(InvalidInput, match="was not started"):
        await one.wait()
    await one.stop()
    async with one:
        with pytest.raises(InvalidInput, match="was started before"):
            await one.start()
