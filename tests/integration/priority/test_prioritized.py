"""Prioritized: the lower number is served as long as it asks."""

from __future__ import annotations

import asyncio
import time

import pytest

from keylane.errors import InvalidInput
from keylane.priority import consume, fetch
from tests.integration.priority.conftest import MakeGround, OpenClient, StartReader, nobody_listens
from tests.integration.priority.evidence import judge

AT_ONCE_S = 10.0
"""Far below the ack wait of 30 s; the machine may be slow."""


async def test_zero_starves_one_and_one_takes_over_at_once(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    place = await ground("prioritized")
    second = await read(await open_client(), place, "second", priority=1)
    first = await read(await open_client(), place, "first", priority=0)
    await place.pulls(2)
    published: list[int] = []
    for _ in range(10):
        published += await place.publish(20)
        await first.got(len(published))
    assert second.log == []
    leaving_at = time.monotonic()
    stopping = asyncio.create_task(first.stop())
    published += await place.publish(20)
    await second.together(first, count=len(published))
    await stopping
    assert second.log
    assert second.log[0].at - leaving_at < AT_ONCE_S
    published += await place.publish(20)
    await second.together(first, count=len(published))
    findings = judge(published, first.log, second.log)
    assert findings.exactly_once
    await second.stop()


async def test_a_lost_connection_of_zero_is_enough(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    place = await ground("prioritized")
    second = await read(await open_client(), place, "second", priority=1)
    leaving = await open_client()
    ear = leaving.nats.new_inbox()
    await leaving.nats.subscribe(ear)
    first = await read(leaving, place, "first", priority=0)
    await place.pulls(2)
    published = await place.publish(5)
    await first.got(5)
    await leaving.flush()
    await first.abandon()
    await leaving.close()
    await nobody_listens(place.connection, ear)  # the server has seen that it is gone
    left_at = time.monotonic()
    published += await place.publish(5)
    assert (await second.got(5)).at - left_at < AT_ONCE_S
    assert judge(published, first.log, second.log).exactly_once_in_order
    await second.stop()


async def test_a_full_reader_lets_the_next_priority_through(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """A fact: priority counts among pulls that are open. A reader without room has none."""
    place = await ground("prioritized")
    first = await consume(await open_client(), place.stream, place.consumer, priority=0, max_messages=10)
    second = await read(await open_client(), place, "second", priority=1)
    await place.pulls(2)
    published = await place.publish(25)
    await second.got(15)
    assert second.sequences == published[10:]
    # Once the first one reads again, it is served again.
    held = [await first.next(5) for _ in range(10)]
    for message in held:
        assert message is not None
        message.ack()
    await place.pulls(2)
    (last,) = await place.publish(1)
    message = await first.next(5)
    assert message is not None
    assert message.sequence == last
    assert len(second.log) == 15
    message.ack()
    await first.stop()
    await second.stop()


async def test_equal_priorities_share(ground: MakeGround, open_client: OpenClient, read: StartReader) -> None:
    place = await ground("prioritized")
    readers = [await read(await open_client(), place, name, priority=3, max_messages=10) for name in ("one", "two")]
    await place.pulls(2)
    published = await place.publish(100)
    await readers[0].together(readers[1], count=100)
    assert all(len(reader.log) > 10 for reader in readers)
    assert judge(published, *(reader.log for reader in readers)).exactly_once
    for reader in readers:
        await reader.stop()


async def test_without_a_priority_a_pull_is_served_first(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """A fact: no priority means 0."""
    place = await ground("prioritized")
    second = await read(await open_client(), place, "second", priority=1)
    plain = await read(await open_client(), place, "plain")
    await place.pulls(2)
    await place.publish(20)
    await plain.got(20)
    assert second.log == []


async def test_fetch_by_priority(ground: MakeGround, open_client: OpenClient, read: StartReader) -> None:
    place = await ground("prioritized")
    low = asyncio.create_task(fetch(await open_client(), place.stream, place.consumer, 5, timeout_s=25, priority=9))
    high = await read(await open_client(), place, "high", priority=0)
    await place.pulls(2)
    published = await place.publish(10)
    await high.got(10)
    await high.stop()
    published += await place.publish(5)
    rest = await low
    assert [message.sequence for message in rest] == published[10:]


@pytest.mark.parametrize("priority", [-1, 10])
async def test_a_priority_out_of_range_is_refused(ground: MakeGround, priority: int) -> None:
    place = await ground("prioritized")
    with pytest.raises(InvalidInput, match=r"0 \(first\) to 9 \(last\)"):
        await consume(place.connection, place.stream, place.consumer, priority=priority)
