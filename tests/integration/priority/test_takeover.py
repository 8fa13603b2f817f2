"""A reader that takes over starts with the oldest message that is not done, whatever got lost."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest

import keylane
from keylane import Connection
from keylane.errors import FeedEnded
from keylane.jetstream import ConnectionHooks, Feed, Message, consumers
from keylane.priority import consume, group_state, open_fetcher
from keylane.server import NatsServer
from tests.integration.priority.conftest import (
    Ground,
    MakeGround,
    OpenClient,
    StartReader,
    nobody_listens,
)
from tests.integration.priority.evidence import Line, descents, judge
from tests.integration.priority.proxy import LossyProxy
from tests.waiter import until

TIMEOUT_S = 3.0
IN_TIME_S = TIMEOUT_S + 10
"""Long before the ack wait of 30 s ends; the machine may be slow."""
TERMS = {"priority_timeout_s": TIMEOUT_S, "max_ack_pending": 100, "ack_wait_s": 30}


async def take(feed: Feed, count: int) -> list[Message]:
    messages = [await feed.next(20) for _ in range(count)]
    assert None not in messages
    return [message for message in messages if message is not None]


async def die_at_work(connection: Connection, place: Ground) -> list[Line]:
    """Take 1 to 8, finish 1, 2 and 4, and go away without a word. The server has noticed when this returns."""
    ear = connection.nats.new_inbox()
    await connection.nats.subscribe(ear)
    feed = await consume(connection, place.stream, place.consumer, max_messages=8)
    messages = await take(feed, 8)
    log = [Line(time.monotonic(), "dead", message.sequence) for message in messages]
    for index in (0, 1):
        messages[index].ack()
    await messages[3].ack_confirmed()
    await connection.close()
    await nobody_listens(place.connection, ear)
    return log


async def after_a_death(
    place: Ground, open_client: OpenClient, read: StartReader, count: int, **options: Any
) -> list[int]:
    """What the next reader is given, after 12 messages were published and the first reader died."""
    await place.publish(8)
    await die_at_work(await open_client(), place)
    await place.publish(4)
    heir = await read(await open_client(), place, "heir", **options)
    await heir.got(count)
    await heir.stop()
    return heir.sequences


async def test_in_order_on_a_work_queue(ground: MakeGround, open_client: OpenClient, read: StartReader) -> None:
    place = await ground("pinned_client", **TERMS)
    got = await after_a_death(place, open_client, read, 9)
    assert got == [3, 5, 6, 7, 8, 9, 10, 11, 12]


async def test_not_in_order_without_the_reset(ground: MakeGround, open_client: OpenClient, read: StartReader) -> None:
    """What the option is for; and the tests here can fail."""
    place = await ground("pinned_client", **TERMS)
    got = await after_a_death(place, open_client, read, 4, reset_on_takeover=False)
    assert got == [9, 10, 11, 12]


async def test_in_order_on_a_replicated_work_queue(
    cluster_ground: MakeGround, open_cluster_client: OpenClient, read: StartReader
) -> None:
    place = await cluster_ground("pinned_client", **TERMS)
    got = await after_a_death(place, open_cluster_client, read, 9)
    assert got == [3, 5, 6, 7, 8, 9, 10, 11, 12]


async def test_in_order_with_repeats_on_a_limits_stream(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """The server goes back to its ack floor, which is 2: 4 comes again."""
    place = await ground("pinned_client", retention="limits", **TERMS)
    got = await after_a_death(place, open_client, read, 10)
    assert got == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


async def test_within_the_timeout_though_the_dead_one_held_all_that_may_be_in_flight(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """The consumer may deliver nothing before ack_wait ends; the heir does not wait for that."""
    place = await ground("pinned_client", priority_timeout_s=TIMEOUT_S, max_ack_pending=4, ack_wait_s=30)
    doomed = await open_client()
    feed = await consume(doomed, place.stream, place.consumer)
    published = await place.publish(10)
    first = await take(feed, 2)
    await first[0].ack_confirmed()
    await take(feed, 2)
    heirs = [await read(await open_client(), place, f"heir-{number}") for number in range(2)]
    await doomed.close()
    died_at = time.monotonic()
    await place.acked(published[-1])
    (log,) = [heir.log for heir in heirs if heir.log]
    assert log[0].at - died_at < IN_TIME_S
    assert judge(published[1:], *(heir.log for heir in heirs)).in_order_and_complete
    for heir in heirs:
        await heir.stop()


async def test_within_the_timeout_though_nothing_new_is_published(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """A pin is given with a delivery, and there would be none before ack_wait ends."""
    place = await ground("pinned_client", **TERMS)
    published = await place.publish(8)
    log = await die_at_work(await open_client(), place)
    died_at = time.monotonic()
    heir = await read(await open_client(), place, "heir")
    took_over = await heir.got(1)
    assert took_over.at - died_at < IN_TIME_S
    await heir.got(5)
    assert heir.sequences == [3, 5, 6, 7, 8]
    assert judge(published, log, heir.log).in_order_and_complete
    await heir.stop()


async def test_fetches_keep_the_pin_between_them_and_take_over_in_order(
    ground: MakeGround, open_client: OpenClient
) -> None:
    place = await ground("pinned_client", **TERMS)
    published = await place.publish(12)
    doomed = await open_client()
    fetcher = await open_fetcher(doomed, place.stream, place.consumer)
    heir = await open_fetcher(await open_client(), place.stream, place.consumer)
    first = await fetcher.fetch(4, timeout_s=20)
    pin_id = fetcher.pin_id
    # For longer than the timeout this one fetches nothing, while the other one tries.
    assert await heir.fetch(1, timeout_s=1.7 * TIMEOUT_S) == []
    assert (await group_state(place.connection, place.stream, place.consumer)).pinned_client_id == pin_id
    second = await fetcher.fetch(4, timeout_s=20)
    assert [message.sequence for message in [*first, *second]] == published[:8]
    for index in (0, 1):
        first[index].ack()
    await first[3].ack_confirmed()
    await doomed.close()
    rest = await heir.fetch(9, timeout_s=20)
    assert [message.sequence for message in rest] == [3, 5, 6, 7, 8, 9, 10, 11, 12]
    for message in rest:
        message.ack()
    await heir.stop()


async def test_a_fetcher_that_leaves_hands_over_at_once(ground: MakeGround, open_client: OpenClient) -> None:
    place = await ground("pinned_client", priority_timeout_s=30)
    published = await place.publish(6)
    async with await open_fetcher(await open_client(), place.stream, place.consumer) as fetcher:
        done = await fetcher.fetch(3, timeout_s=20)
        for message in done:
            message.ack()
    async with await open_fetcher(await open_client(), place.stream, place.consumer) as heir:
        rest = await heir.fetch(3, timeout_s=10)
        assert [message.sequence for message in [*done, *rest]] == published
        for message in rest:
            message.ack()


async def test_drained_messages_are_handled_under_the_pin(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """A reader that drains keeps its pin while it works off its buffer, longer than the timeout."""
    place = await ground("pinned_client", **TERMS)
    leaving = await read(await open_client(), place, "leaving", max_messages=12, handle_s=0.17 * TIMEOUT_S)
    published = await place.publish(12)
    await leaving.got(1)
    heir = await read(await open_client(), place, "heir")
    await leaving.feed.drain()
    published += await place.publish(3)
    await leaving.got(12)
    await leaving.stop()
    await heir.got(3)
    assert judge(published, leaving.log, heir.log).exactly_once_in_order
    await heir.stop()


@dataclass(frozen=True, slots=True)
class BadLink:
    """A connection through a proxy that loses what it is told to lose."""

    connection: Connection
    proxy: LossyProxy
    back: asyncio.Event


@pytest.fixture
async def bad_link(nats_server: NatsServer, stack: AsyncExitStack) -> BadLink:
    back = asyncio.Event()
    proxy = await stack.enter_async_context(LossyProxy(nats_server.port))
    connecting = keylane.connect(proxy.url, hooks=ConnectionHooks(on_reconnect=lambda _: back.set()))
    return BadLink(await stack.enter_async_context(await connecting), proxy, back)


async def test_deliveries_lost_with_the_link_do_not_come_late(
    ground: MakeGround, bad_link: BadLink, read: StartReader
) -> None:
    """The pin outlives a short break of the link; what was on its way does not, and later ones follow it."""
    place = await ground("pinned_client", priority_timeout_s=30, max_ack_pending=100, ack_wait_s=30)
    reader = await read(bad_link.connection, place, "reader")
    published = await place.publish(5)
    await reader.got(5)
    await bad_link.connection.flush()
    pin_id = reader.feed.pin_id
    bad_link.proxy.lose()
    published += await place.publish(5)
    await asyncio.wait_for(bad_link.proxy.lost.wait(), 20)
    bad_link.proxy.cut()
    await asyncio.wait_for(bad_link.back.wait(), 20)
    published += await place.publish(5)
    await reader.got(15)
    assert reader.feed.pin_id == pin_id
    assert judge(published, reader.log).exactly_once_in_order
    await reader.stop()


async def test_the_first_delivery_after_the_reset_may_get_lost(
    ground: MakeGround,
    bad_link: BadLink,
    read: StartReader,
    open_client: OpenClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The heir waits for deliveries to start anew; when it misses the start it must not wait for ever."""
    place = await ground("pinned_client", **TERMS)
    published = await place.publish(8)
    log = await die_at_work(await open_client(), place)
    resets, reset = 0, consumers.reset

    async def cut_when_lost() -> None:
        await asyncio.wait_for(bad_link.proxy.lost.wait(), 20)
        bad_link.proxy.cut()

    cutting = asyncio.create_task(cut_when_lost())

    async def reset_and_lose(*where: Any, **options: Any) -> int:
        nonlocal resets
        resets += 1
        at = await reset(*where, **options)
        if resets == 1:
            bad_link.proxy.lose()
        return at

    monkeypatch.setattr(consumers, "reset", reset_and_lose)
    heir = await read(bad_link.connection, place, "heir")
    published += await place.publish(1)
    await cutting
    await asyncio.wait_for(bad_link.back.wait(), 20)
    published += await place.publish(3)
    await heir.got(9)
    assert resets >= 2
    assert heir.sequences == [3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert not descents(heir.log)
    assert judge(published, log, heir.log).in_order_and_complete
    await heir.stop()


async def test_somebody_else_resets_the_consumer(ground: MakeGround, open_client: OpenClient) -> None:
    """What waits in the buffer is dropped: it comes again, and only acks of the new deliveries count."""
    place = await ground("pinned_client", **TERMS)
    feed = await consume(await open_client(), place.stream, place.consumer)
    published = await place.publish(6)
    (first,) = await take(feed, 1)
    await first.ack_confirmed()
    await consumers.reset(place.connection, place.stream, place.consumer)
    await place.publish(1)
    messages: list[Message] = []
    while not messages or messages[-1].sequence < 7:
        (message,) = await take(feed, 1)
        messages.append(message)
        await message.ack_confirmed()
    handled = [first.sequence, *(message.sequence for message in messages)]
    assert handled == sorted(handled)
    assert sorted(set(handled)) == [*published, 7]
    info = await consumers.info(place.connection, place.stream, place.consumer)
    assert (info.num_pending, info.num_ack_pending) == (0, 0)
    await feed.stop()


async def test_a_reader_without_a_link_stops_when_its_pin_may_be_gone(
    ground: MakeGround, bad_link: BadLink, open_client: OpenClient, read: StartReader
) -> None:
    """Its buffer is full of messages that another reader is given after the timeout."""
    timeout_s = 2.0
    place = await ground("pinned_client", priority_timeout_s=timeout_s, max_ack_pending=100, ack_wait_s=30)
    lost: list[str] = []
    cut_off = await read(bad_link.connection, place, "cut off", handle_s=0.05, on_unpinned=lost.append)
    published = await place.publish(150)
    await cut_off.got(3)
    heir = await read(await open_client(), place, "heir", handle_s=0.005)
    bad_link.proxy.cut(for_good=True)
    cut_at = time.monotonic()
    await heir.got(1)
    await asyncio.sleep(timeout_s)  # time for the one without a link to do what it must not do
    late = [line for line in cut_off.log if line.at > cut_at + 1.25 * timeout_s]
    assert late == []
    bad_link.proxy.mend()
    await asyncio.wait_for(bad_link.back.wait(), 20)
    await place.acked(published[-1])
    assert judge(published, cut_off.log, heir.log).in_order_and_complete
    await until(lambda: lost)
    assert not cut_off.feed.is_pinned
    await heir.stop()


async def test_the_pinned_reader_may_reset_its_consumer(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """All that is not acked comes again, in order; the pin stays."""
    place = await ground("pinned_client", **TERMS)
    reader = await read(await open_client(), place, "reader", handle_s=0.001)
    published = await place.publish(200)
    await reader.got(20)
    pin_id = reader.feed.pin_id
    for _ in range(3):
        await reader.feed.reset()
        await reader.got(len(reader.log) + 20)
    await place.acked(published[-1])
    assert reader.feed.pin_id == pin_id
    findings = judge(published, reader.log)
    assert findings.in_order_and_complete
    assert len(findings.duplicated) <= 3
    await reader.stop()


async def test_a_hook_that_fails_ends_the_reader(ground: MakeGround, open_client: OpenClient) -> None:
    place = await ground("pinned_client", **TERMS)

    def broken(_: str) -> None:
        raise RuntimeError("the hook is broken")

    connection = await open_client()
    feed = await consume(connection, place.stream, place.consumer, on_pinned=broken)
    await place.publish(1)
    with pytest.raises(FeedEnded, match="the hook is broken"):
        await asyncio.wait_for(feed.wait(), 20)
    assert connection.is_connected
    await feed.stop()
