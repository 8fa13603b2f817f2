"""Reading through a feed: every way to read, the pulls behind it, and its bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from keylane import Connection
from keylane.core.pulls import Meaning
from keylane.errors import FeedEnded, InvalidInput, MessageTooLarge, NotFound, PullRefused
from keylane.jetstream import ConsumerInfo, Feed, FeedOptions, Message, Outgoing, consumers, open_feed, publish_many
from tests.integration.jetstream.rig import (
    Notices,
    Pulls,
    all_acked,
    asked,
    buffered,
    buffered_bytes,
    fill,
    make_consumer,
    make_stream,
)
from tests.waiter import until

Unique = Callable[..., str]


async def ready(connection: Connection, unique: Unique, count: int, *, size: int = 0, **options: Any) -> str:
    stream = await make_stream(connection, unique("feed"))
    await fill(connection, stream, count, size=size)
    await make_consumer(connection, stream, **options)
    return stream


# ---- the ways to read -------------------------------------------------------------------------------------


async def test_every_message_once_in_order_and_acked(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 5000)
    seen: list[tuple[int, bytes]] = []
    async with await open_feed(connection, stream, "reader") as feed:
        async for message in feed:
            seen.append((message.sequence, message.data))
            message.ack()
            if len(seen) == 5000:
                break
        info = await all_acked(connection, stream, "reader")
    assert seen == [(number + 1, b"%d" % number) for number in range(5000)]
    assert (info.ack_floor, info.num_redelivered) == (5000, 0)


async def test_batches_give_what_is_there(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 1000)
    seen: list[int] = []
    async with await open_feed(connection, stream, "reader", FeedOptions(max_messages=300)) as feed:
        async for batch in feed.batches(70):
            assert 1 <= len(batch) <= 70
            for message in batch:
                seen.append(message.sequence)
                message.ack()
            if len(seen) == 1000:
                break
        await all_acked(connection, stream, "reader")
    assert seen == list(range(1, 1001))


async def test_next_waits_for_a_message_and_not_for_ever(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 1)
    async with await open_feed(connection, stream, "reader") as feed:
        first = await feed.next(5)
        assert first is not None
        first.ack()
        assert await feed.next(0.05) is None
        waiting = asyncio.ensure_future(feed.next(5))
        await fill(connection, stream, 1)
        second = await waiting
        assert second is not None
        assert second.sequence == 2
        second.ack()


async def test_on_messages_gets_every_batch(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 3000)
    seen: list[int] = []
    complete = asyncio.Event()

    def take(batch: list[Message]) -> None:
        for message in batch:
            seen.append(message.sequence)
            message.ack()
        if len(seen) == 3000:
            complete.set()

    async with await open_feed(connection, stream, "reader", FeedOptions(on_messages=take)) as feed:
        async with asyncio.timeout(20):
            await complete.wait()
        await all_acked(connection, stream, "reader")
        ended = asyncio.ensure_future(feed.wait())
        await feed.drain()
        await ended
    assert seen == list(range(1, 3001))


async def test_two_tasks_may_read_one_feed(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 0)
    seen: list[int] = []

    async def read() -> None:
        async for message in feed:
            seen.append(message.sequence)
            message.ack()

    async with await open_feed(connection, stream, "reader") as feed:
        readers = [
            asyncio.ensure_future(read()),
            asyncio.ensure_future(read()),
            asyncio.ensure_future(feed.wait()),
        ]
        await asyncio.sleep(0)
        await fill(connection, stream, 100)
        await all_acked(connection, stream, "reader")
        await feed.drain()
        async with asyncio.timeout(10):
            await asyncio.gather(*readers)
    assert sorted(seen) == list(range(1, 101))


async def test_two_feeds_share_a_connection_and_a_consumer(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 0)
    options = FeedOptions(max_messages=10)
    seen: dict[str, list[int]] = {"one": [], "two": []}

    async def read(name: str) -> None:
        async with await open_feed(connection, stream, "reader", options) as feed:
            opened.release()
            async for message in feed:
                seen[name].append(message.sequence)
                message.ack()
                if len(seen["one"]) + len(seen["two"]) == 1000:
                    done.set()

    opened, done = asyncio.Semaphore(0), asyncio.Event()
    readers = [asyncio.create_task(read(name)) for name in seen]
    for _ in readers:
        await opened.acquire()
    await fill(connection, stream, 1000)
    async with asyncio.timeout(20):
        await done.wait()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await all_acked(connection, stream, "reader")
    assert sorted(seen["one"] + seen["two"]) == list(range(1, 1001))
    assert seen["one"] == sorted(seen["one"])
    assert seen["one"]
    assert seen["two"]


async def test_two_feeds_on_two_consumers_see_everything(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 500)
    await make_consumer(connection, stream, "second")

    async def read(consumer: str) -> list[int]:
        seen: list[int] = []
        async with await open_feed(connection, stream, consumer) as feed:
            async for message in feed:
                seen.append(message.sequence)
                message.ack()
                if len(seen) == 500:
                    break
        return seen

    both = await asyncio.gather(read("reader"), read("second"))
    assert list(both) == [list(range(1, 501))] * 2


# ---- the pulls behind it ----------------------------------------------------------------------------------


async def test_pulls_overlap_and_are_few(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 2000)
    waits_for_nothing = 0
    async with (
        Pulls.of(connection, stream, "reader") as pulls,
        await open_feed(connection, stream, "reader", FeedOptions(max_messages=200)) as feed,
    ):
        for _ in range(2000):
            message = await anext(feed)
            waits_for_nothing += not buffered(feed) and asked(feed) == 0
            message.ack()
        await all_acked(connection, stream, "reader")
    assert pulls.batches[0] == 200
    assert all(100 <= batch <= 200 for batch in pulls.batches)
    assert len(pulls.batches) <= 2000 // 100 + 2
    assert waits_for_nothing == 0


async def test_large_messages_are_asked_for_before_the_buffer_is_empty(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 60, size=50_000)
    options = FeedOptions(max_messages=1000, max_bytes=1_000_000)
    waits = 0
    async with await open_feed(connection, stream, "reader", options) as feed:
        for _ in range(60):
            message = await anext(feed)
            waits += asked(feed) == 0 and message.delivery.pending > 0 and not buffered(feed)
            message.ack()
        await all_acked(connection, stream, "reader")
    assert waits == 0


async def test_one_huge_message_does_not_shrink_the_window_for_ever(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 1, size=400_000)
    await fill(connection, stream, 500)
    options = FeedOptions(max_messages=100, max_bytes=1_000_000)
    async with (
        Pulls.of(connection, stream, "reader") as pulls,
        await open_feed(connection, stream, "reader", options) as feed,
    ):
        for _ in range(501):
            (await anext(feed)).ack()
        await all_acked(connection, stream, "reader")
    assert min(pulls.batches) <= 2
    assert max(pulls.batches[-3:]) >= 50


# ---- bounds -----------------------------------------------------------------------------------------------


async def stalled(connection: Connection, feed: Feed, acked: int) -> ConsumerInfo:
    """Wait until a feed that nobody reads has taken all it may: no pull is open, and all sent is here."""
    return await until(
        lambda: consumers.info(connection, feed.stream, feed.consumer),
        lambda info: (
            info.num_waiting == asked(feed) == 0
            and info.num_ack_pending == buffered(feed) > 0
            and info.ack_floor == acked
        ),
    )


async def test_a_reader_that_stops_holds_no_more_than_it_may(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 2000)
    async with await open_feed(connection, stream, "reader", FeedOptions(max_messages=100)) as feed:
        for _ in range(60):
            (await anext(feed)).ack()
        info = await stalled(connection, feed, 60)
        assert 50 < info.num_ack_pending <= 100
        later = await consumers.info(connection, stream, "reader")
        assert later.delivered_sequence == info.delivered_sequence
        rest = [(await anext(feed)).sequence for _ in range(1940)]
        assert rest == list(range(61, 2001))


async def test_the_byte_bound_holds_for_large_messages(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 60, size=100_000)
    options = FeedOptions(max_messages=1000, max_bytes=1_000_000)
    seen: list[int] = []
    async with await open_feed(connection, stream, "reader", options) as feed:
        while len(seen) < 45:
            await stalled(connection, feed, len(seen))
            assert 500_000 < buffered_bytes(feed) < 1_000_000
            for _ in range(6):
                message = await anext(feed)
                seen.append(message.sequence)
                message.ack()
    assert seen == list(range(1, 49))


async def test_a_jump_in_size_stays_under_twice_the_byte_bound(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 500)
    options = FeedOptions(max_messages=1000, max_bytes=1_000_000)
    async with (
        Pulls.of(connection, stream, "reader") as pulls,
        await open_feed(connection, stream, "reader", options) as feed,
    ):
        for _ in range(500):
            (await anext(feed)).ack()
        waiting = asyncio.ensure_future(anext(feed))
        await asyncio.sleep(0)
        await connection.flush()
        assert pulls.batches == [1000, 500]
        await fill(connection, stream, 60, size=100_000)
        (await waiting).ack()
        info = await stalled(connection, feed, 501)
        assert 1_000_000 < buffered_bytes(feed) < 2_000_000
        assert info.num_pending > 0
        for _ in range(59):
            (await anext(feed)).ack()
        await all_acked(connection, stream, "reader")


async def test_a_message_beyond_the_bound_ends_the_feed(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 3)
    await fill(connection, stream, 1, size=5000)
    async with await open_feed(connection, stream, "reader", FeedOptions(max_bytes=2000)) as feed:
        for _ in range(3):
            (await anext(feed)).ack()
        with pytest.raises(MessageTooLarge, match="max_bytes 2000"):
            await anext(feed)
        with pytest.raises(MessageTooLarge):
            await feed.next(1)


async def test_the_size_of_a_message_is_what_the_server_counts(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("feed"))
    await publish_many(connection, [Outgoing(f"{stream}.a", b"x" * 500, {"Header": "value"})])
    await make_consumer(connection, stream)
    async with await open_feed(connection, stream, "reader", FeedOptions(max_bytes=10_000)) as feed:
        message = await anext(feed)
        size = message.size
        message.nak()
    async with await open_feed(connection, stream, "reader", FeedOptions(max_bytes=size - 1)) as feed:
        with pytest.raises(MessageTooLarge):
            await anext(feed)
    async with await open_feed(connection, stream, "reader", FeedOptions(max_bytes=size)) as feed:
        (await anext(feed)).ack()
        await all_acked(connection, stream, "reader")


# ---- limits of the consumer -------------------------------------------------------------------------------


async def test_the_feed_keeps_within_the_consumers_limits(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 200, size=100, max_batch=20, max_bytes=3000, max_expires_s=30)
    notices = Notices()
    async with (
        Pulls.of(connection, stream, "reader") as pulls,
        await open_feed(connection, stream, "reader", FeedOptions(on_notice=notices)) as feed,
    ):
        for _ in range(200):
            (await anext(feed)).ack()
        await all_acked(connection, stream, "reader")
    assert max(pulls.batches) <= 20
    assert notices.all == []


async def test_limits_that_change_under_a_feed(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 100)
    notices = Notices()
    options = FeedOptions(max_messages=50, on_notice=notices)
    async with (
        Pulls.of(connection, stream, "reader") as pulls,
        await open_feed(connection, stream, "reader", options) as feed,
    ):
        for _ in range(10):
            (await anext(feed)).ack()
        config = (await consumers.info(connection, stream, "reader")).config
        await make_consumer(connection, stream, max_batch=10)
        for _ in range(90):
            (await anext(feed)).ack()
        await all_acked(connection, stream, "reader")
        limit = await notices.until(Meaning.LIMIT)
        assert "Exceeded MaxRequestBatch of 10" in limit.text
        assert pulls.batches[-1] <= 10
        await consumers.update(connection, stream, config)
        await feed._pulls.read_limits()
        assert feed._pulls._window.max_messages == 50


async def test_pulls_that_live_too_long_are_refused(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 0, max_expires_s=1)
    with pytest.raises(PullRefused, match=r"at most 1\.0 s .* asks for 30\.0 s: lower expires_s"):
        await open_feed(connection, stream, "reader")
    async with await open_feed(connection, stream, "reader", FeedOptions(expires_s=1, heartbeat_s=0.5)) as feed:
        assert await feed.next(0.05) is None


# ---- what is refused --------------------------------------------------------------------------------------


async def test_a_push_consumer_is_refused(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 0, name="pushes", deliver_subject="somewhere")
    with pytest.raises(PullRefused, match="pushes to 'somewhere': a feed needs a pull consumer"):
        await open_feed(connection, stream, "pushes")


async def test_a_missing_consumer_or_stream_is_named(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("feed"))
    with pytest.raises(NotFound, match="has no consumer"):
        await open_feed(connection, stream, "nobody")
    with pytest.raises(NotFound, match="there is no stream"):
        await open_feed(connection, unique("none"), "nobody")
    for bad in ("", "a.b", "a b", "x" * 256):
        with pytest.raises(InvalidInput):
            await open_feed(connection, stream, bad)
        with pytest.raises(InvalidInput):
            await open_feed(connection, bad, "reader")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"max_messages": 0}, "max_messages is 0"),
        ({"max_messages": 1.5}, r"max_messages is 1\.5"),
        ({"max_messages": True}, "max_messages is True"),
        ({"max_bytes": -1}, "max_bytes is -1"),
        ({"expires_s": 0.05}, r"at least 0\.1 s"),
        ({"expires_s": float("inf")}, "expires_s=inf"),
        ({"expires_s": float("nan")}, "expires_s=nan"),
        ({"expires_s": "30"}, "expires_s='30'"),
        ({"heartbeat_s": 0}, "heartbeat_s is 0"),
        ({"expires_s": 4.0}, "at most half of expires_s"),
    ],
)
def test_options_are_checked(options: dict[str, object], rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        FeedOptions(**options)  # type: ignore[arg-type]  # what a careless caller would do


async def test_a_batch_has_at_least_one_message(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 1)
    async with await open_feed(connection, stream, "reader") as feed:
        with pytest.raises(InvalidInput, match="batches of 0"):
            await anext(feed.batches(0))


async def test_a_closed_feed_says_so(connection: Connection, unique: Unique) -> None:
    stream = await ready(connection, unique, 0)
    feed = await open_feed(connection, stream, "reader")
    assert "pulling" in repr(feed)
    await feed.stop()
    await feed.stop()
    assert "ended" in repr(feed)
    assert [message async for message in feed] == []
    assert [batch async for batch in feed.batches()] == []
    with pytest.raises(FeedEnded, match="is closed"):
        await feed.next(1)
