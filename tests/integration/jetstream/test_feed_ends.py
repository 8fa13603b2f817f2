"""How a feed ends: drained, closed, cancelled, or with an error; and what happens to its messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

import keylane
from keylane import Connection
from keylane.errors import FeedEnded
from keylane.jetstream import FeedOptions, Message, Notice, consumers, open_feed, open_publisher
from keylane.server import NatsServer
from tests.integration.jetstream.rig import (
    Link,
    Notices,
    all_acked,
    fill,
    frozen,
    make_consumer,
    make_stream,
)
from tests.waiter import until

Unique = Callable[..., str]
NEVER_S = 600.0  # an ack wait that no test outlives
QUIET_S = 0.8
LINGER_S = 10.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain takes a server that is only busy with other things for one that still sends."""
    monkeypatch.setattr("keylane.jetstream.pull_loop._QUIET_S", QUIET_S)


def no_feed_is_left() -> bool:
    return not [task for task in asyncio.all_tasks() if task.get_name().startswith("feed ")]


# ---- drain ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
async def test_drain_loses_nothing_to_the_ack_wait(
    connection: Connection, nats_server: NatsServer, unique: Unique
) -> None:
    """Drains in the midst of a stream that never pauses: all that the server sent was read."""
    stream = await make_stream(connection, unique("end"))
    await make_consumer(connection, stream, ack_wait_s=NEVER_S)
    stop = asyncio.Event()
    seen: list[int] = []

    async def publish() -> None:
        async with (
            await keylane.connect(nats_server.url) as other,
            open_publisher(other, max_in_flight=500) as publisher,
        ):
            while not stop.is_set():
                await publisher.send(f"{stream}.a", b"")

    publishing = asyncio.create_task(publish())
    try:
        for _ in range(15):
            async with await open_feed(connection, stream, "reader", FeedOptions(max_messages=500)) as feed:
                mine = 0
                async for message in feed:
                    seen.append(message.sequence)
                    message.ack()
                    mine += 1
                    if mine == 700:
                        await feed.drain(LINGER_S)
            info = await consumers.info(connection, stream, "reader")
            assert info.delivered_sequence == seen[-1]
    finally:
        stop.set()
        await publishing
    assert seen == list(range(1, len(seen) + 1))


@pytest.mark.usefixtures("patient")
async def test_drain_in_full_flow_leaves_nothing_behind(connection: Connection, unique: Unique) -> None:
    """The server is in the midst of sending thousands of messages when each of these feeds is drained."""
    stream = await make_stream(connection, unique("end"))
    await fill(connection, stream, 3000)
    for number in range(12):
        consumer = await make_consumer(connection, stream, f"c{number}", ack_wait_s=NEVER_S)
        async with await open_feed(connection, stream, consumer, FeedOptions(max_messages=3000)) as feed:
            seen = [(await anext(feed)).sequence]
            await feed.drain(LINGER_S)
            seen += [message.sequence async for message in feed]
            info = await consumers.info(connection, stream, consumer)
            assert seen == list(range(1, info.delivered_sequence + 1))


async def test_the_end_of_the_subscription_is_sent_before_its_confirmation_is_asked_for(
    connection: Connection, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await make_stream(connection, unique("end"))
    await make_consumer(connection, stream)
    feed = await open_feed(connection, stream, "reader")
    transport = connection.nats._transport
    assert transport is not None
    written = bytearray()
    write = transport.write

    def record(data: bytes) -> None:
        written.extend(data)
        write(data)

    monkeypatch.setattr(transport, "write", record)
    await feed.drain()
    assert 0 <= written.find(b"UNSUB") < written.find(b"PING")


@pytest.mark.usefixtures("patient")
async def test_drain_lets_a_blocked_flow_go_on(connection: Connection, unique: Unique) -> None:
    """The ack that leaves just before the drain lets the server send the next message: it is waited for."""
    stream = await make_stream(connection, unique("end"))
    await fill(connection, stream, 100)
    await make_consumer(connection, stream, ack_wait_s=NEVER_S, max_ack_pending=1)
    seen: list[int] = []
    for _ in range(3):
        async with await open_feed(connection, stream, "reader") as feed:
            first = await anext(feed)
            seen.append(first.sequence)
            await asyncio.sleep(1.2 * QUIET_S)  # longer than the quiet time, as a handler would
            first.ack()
            await feed.drain()
            async for message in feed:
                seen.append(message.sequence)
                message.ack()
    assert seen == sorted(set(seen))
    assert len(seen) > 3
    async with await open_feed(connection, stream, "reader") as feed:
        following = await feed.next(5)
        assert following is not None
        assert following.sequence == seen[-1] + 1


@pytest.mark.alone("measures a drain")
async def test_an_idle_feed_drains_at_once(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("end"))
    await fill(connection, stream, 1)
    await make_consumer(connection, stream)
    took_s: list[float] = []
    for number in range(5):  # the best one counts: the machine may be busy with other things
        async with await open_feed(connection, stream, "reader") as feed:
            if number == 0:
                (await anext(feed)).ack()
            assert await feed.next(0.15) is None
            started = asyncio.get_running_loop().time()
            await feed.drain()
            took_s.append(asyncio.get_running_loop().time() - started)
    assert min(took_s) < 0.1, took_s
    assert no_feed_is_left()


async def test_drain_without_a_link_ends_the_feed(unique: Unique) -> None:
    with NatsServer.start() as server:
        async with Link.to(server) as link, await keylane.connect(link.url) as connection:
            stream = await make_stream(connection, unique("end"))
            await fill(connection, stream, 3)
            await make_consumer(connection, stream)
            feed = await open_feed(connection, stream, "reader")
            await anext(feed)
            await link.cut()
            async with asyncio.timeout(20):
                await feed.drain()
                assert [message.sequence async for message in feed] == [2, 3]
            assert no_feed_is_left()


async def test_a_drain_that_is_not_confirmed_ends_the_feed_all_the_same(
    unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            stream = await make_stream(connection, unique("end"))
            await make_consumer(connection, stream)
            notices = Notices()
            feed = await open_feed(connection, stream, "reader", FeedOptions(on_notice=notices))
            whole = connection.flush
            monkeypatch.setattr(connection, "flush", lambda: whole(timeout_s=0.2))
            with frozen(server):
                async with asyncio.timeout(20):
                    await feed.drain()
                assert [message async for message in feed] == []
            assert "was not confirmed" in notices.all[-1].text
            assert no_feed_is_left()
            await connection.flush()  # the late answer to the ping that was given up disturbs nothing
            assert connection.is_connected


# ---- close ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
async def test_close_gives_unread_messages_back_at_once(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("end"))
    await fill(connection, stream, 300)
    await make_consumer(connection, stream, ack_wait_s=NEVER_S)
    async with await open_feed(connection, stream, "reader", FeedOptions(max_messages=100)) as feed:
        for _ in range(10):
            (await anext(feed)).ack()
    async with await open_feed(connection, stream, "reader") as feed:
        again = [await feed.next(5) for _ in range(290)]
        sequences = [message.sequence for message in again if message is not None]
        for message in again:
            assert message is not None
            message.ack()
        await all_acked(connection, stream, "reader")
    assert sorted(sequences) == list(range(11, 301))


@pytest.mark.usefixtures("patient")
async def test_a_handler_that_fails_leaves_the_rest_to_others(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("end"))
    await fill(connection, stream, 5)
    await make_consumer(connection, stream, ack_wait_s=NEVER_S)

    async def work() -> None:
        async with await open_feed(connection, stream, "reader") as feed:
            async for message in feed:
                if message.sequence == 2:
                    message.nak()
                    raise ZeroDivisionError("a handler's own")
                message.ack()

    with pytest.raises(ZeroDivisionError):
        await work()
    async with await open_feed(connection, stream, "reader") as feed:
        again = {(await anext(feed)).sequence for _ in range(4)}
    assert again == {2, 3, 4, 5}


# ---- cancellation -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("moment", ["waiting", "reading", "draining"])
async def test_cancelling_the_reading_task_leaves_nothing(connection: Connection, unique: Unique, moment: str) -> None:
    stream = await make_stream(connection, unique("end"))
    count = 0 if moment == "waiting" else 50
    await fill(connection, stream, count)
    await make_consumer(connection, stream, ack_wait_s=NEVER_S)
    reached = asyncio.Event()
    acked: set[int] = set()

    async def read() -> None:
        async with await open_feed(connection, stream, "reader", FeedOptions(max_messages=20)) as feed:
            if moment == "waiting":
                reached.set()
            async for message in feed:
                message.ack()
                acked.add(message.sequence)
                reached.set()
                if moment == "draining":
                    await feed.drain()
                await asyncio.sleep(0.01)

    reading = asyncio.create_task(read())
    await reached.wait()
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert no_feed_is_left()
    assert connection.is_connected
    async with await open_feed(connection, stream, "reader") as feed:
        while len(acked) < count:
            message = await feed.next(5)
            assert message is not None
            message.ack()
            acked.add(message.sequence)
        await all_acked(connection, stream, "reader")


async def test_a_cancelled_next_loses_no_message(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("end"))
    await make_consumer(connection, stream)
    async with await open_feed(connection, stream, "reader") as feed:
        for number in range(1, 21):
            waiting = asyncio.ensure_future(feed.next(5))
            await asyncio.sleep(0)
            await fill(connection, stream, 1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            message = waiting.result() if not waiting.cancelled() else await feed.next(5)
            assert message is not None
            assert message.sequence == number
            message.ack()


# ---- errors -----------------------------------------------------------------------------------------------


async def test_a_closed_connection_ends_the_feed(nats_server: NatsServer, unique: Unique) -> None:
    connection = await keylane.connect(nats_server.url)
    stream = await make_stream(connection, unique("end"))
    await fill(connection, stream, 10)
    await make_consumer(connection, stream)
    feed = await open_feed(connection, stream, "reader")
    ended: list[str] = []

    async def read() -> None:
        try:
            async for message in feed:
                message.ack()
        except FeedEnded as end:
            ended.append(str(end))

    reading = asyncio.create_task(read())
    await all_acked(connection, stream, "reader")
    await connection.close()
    async with asyncio.timeout(20):
        await reading
    assert "the connection is closed (closed by the program); connect again" in ended[0]
    with pytest.raises(FeedEnded, match="the connection is closed"):
        await feed.wait()
    await feed.stop()
    assert no_feed_is_left()


async def test_what_waits_in_the_buffer_of_a_closed_connection_is_not_handed_out(
    nats_server: NatsServer, unique: Unique
) -> None:
    """It could not be acked: a handler would do its work for nothing."""
    connection = await keylane.connect(nats_server.url)
    stream = await make_stream(connection, unique("end"))
    await fill(connection, stream, 10)
    await make_consumer(connection, stream)
    feed = await open_feed(connection, stream, "reader")
    await anext(feed)
    await connection.close()
    with pytest.raises(FeedEnded, match="the connection is closed"):
        await anext(feed)
    await feed.stop()


async def test_a_drained_connection_ends_the_feed(nats_server: NatsServer, unique: Unique) -> None:
    connection = await keylane.connect(nats_server.url)
    stream = await make_stream(connection, unique("end"))
    await make_consumer(connection, stream)
    feed = await open_feed(connection, stream, "reader")
    reading = asyncio.ensure_future(anext(feed))
    await connection.drain()
    with pytest.raises(FeedEnded, match="the connection is closed"):
        await reading
    await feed.stop()


async def test_a_feed_can_be_closed_while_its_connection_is_drained(nats_server: NatsServer, unique: Unique) -> None:
    connection = await keylane.connect(nats_server.url)
    stream = await make_stream(connection, unique("end"))
    await make_consumer(connection, stream)
    feed = await open_feed(connection, stream, "reader")
    release = asyncio.Event()

    async def hold(message: object) -> None:
        await release.wait()

    await connection.nats.subscribe(f"{stream}.held", cb=hold)
    await fill(connection, stream, 1, subject="held")
    draining = asyncio.ensure_future(connection.drain())
    await until(lambda: asyncio.sleep(0, connection.nats.is_draining), bool)
    await feed.stop()
    assert no_feed_is_left()
    release.set()
    await draining


async def test_on_messages_that_raises_ends_the_feed(
    connection: Connection, unique: Unique, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await make_stream(connection, unique("end"))
    await fill(connection, stream, 50)
    await make_consumer(connection, stream, ack_wait_s=NEVER_S)
    calls = 0

    def take(batch: list[Message]) -> None:
        nonlocal calls
        calls += 1
        for message in batch:
            message.nak()
        raise ZeroDivisionError("a handler's own")

    feed = await open_feed(connection, stream, "reader", FeedOptions(max_messages=100, on_messages=take))
    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(FeedEnded, match="on_messages raised ZeroDivision") as e,
    ):
        async with asyncio.timeout(10):
            await feed.wait()
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    await fill(connection, stream, 10)
    await feed.stop()
    assert calls == 1
    assert connection.is_connected
    async with await open_feed(connection, stream, "reader") as again:
        assert len({(await anext(again)).sequence for _ in range(60)}) == 60


async def test_on_notice_that_raises_ends_the_feed_and_not_the_link(
    connection: Connection, unique: Unique, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await make_stream(connection, unique("end"))
    await fill(connection, stream, 8)
    await make_consumer(connection, stream)

    def on_notice(notice: Notice) -> None:
        raise ZeroDivisionError("a hook's own")

    losses: list[str] = []
    connection.observe(keylane.jetstream.hooks.ConnectionHooks(on_disconnect=losses.append))
    options = FeedOptions(max_messages=4, on_notice=on_notice)
    async with await open_feed(connection, stream, "reader", options) as feed:
        await until(lambda: consumers.info(connection, stream, "reader"), lambda info: info.num_ack_pending == 4)
        await consumers.delete(connection, stream, "reader")
        for _ in range(4):
            await anext(feed)
        with caplog.at_level(logging.CRITICAL), pytest.raises(FeedEnded, match="ZeroDivisionError"):
            await anext(feed)
    assert losses == []
