"""What a feed survives: idle hours, a server that hangs, restarts or is killed, a link that is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from nats.js.api import StorageType

import keylane
from keylane import Connection
from keylane.core.pulls import Meaning
from keylane.errors import ConsumerGone
from keylane.jetstream import Feed, FeedOptions, Message, consumers, open_feed, streams
from keylane.server import NatsServer
from tests.integration.jetstream.rig import (
    Link,
    Notices,
    Pulls,
    all_acked,
    asked,
    buffered,
    fill,
    frozen,
    link_is,
    make_consumer,
    make_stream,
)
from tests.waiter import until

Unique = Callable[..., str]


@pytest.fixture
async def own_server() -> AsyncIterator[NatsServer]:
    with NatsServer.start() as server:
        yield server


class Reading:
    """Reads and acks in a task of its own, and keeps what it saw."""

    def __init__(self, feed: Feed) -> None:
        self.seen: list[Message] = []
        self._feed = feed
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._feed:
            self.seen.append(message)
            message.ack()
            if len(self.seen) % 10 == 0:
                await asyncio.sleep(0)

    @property
    def sequences(self) -> set[int]:
        return {message.sequence for message in self.seen}

    async def until(self, count: int, deadline_s: float = 25.0) -> None:
        """Wait until that many different messages were seen."""

        def seen() -> int:
            if self.task.done():
                self.task.result()
                raise AssertionError("the feed ended")
            return len(self.sequences)

        await until(seen, lambda number: number >= count, deadline_s)

    def check(self, count: int, *, order: bool = True) -> None:
        """Everything was seen, and what was delivered for the first time came in order."""
        assert self.sequences == set(range(1, count + 1))
        firsts = [message.sequence for message in self.seen if message.delivered_count == 1]
        assert not order or firsts == sorted(firsts)

    async def stop(self) -> None:
        await self._feed.stop()
        await self.task


# ---- an idle feed -----------------------------------------------------------------------------------------


async def test_heartbeats_keep_an_idle_feed_alive(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("idle"))
    await make_consumer(connection, stream)
    notices = Notices()
    options = FeedOptions(max_messages=10, expires_s=2, heartbeat_s=1, on_notice=notices)
    async with (
        Pulls.of(connection, stream, "reader") as pulls,
        await open_feed(connection, stream, "reader", options) as feed,
    ):
        assert await feed.next(6.5) is None  # three lives of a pull
        await fill(connection, stream, 5)
        for number in range(1, 6):
            assert (await anext(feed)).sequence == number
    assert notices.all == []
    assert 4 <= len(pulls.batches) <= 6
    assert max(pulls.batches) == 10


async def test_a_reader_that_pauses_raises_no_alarm(connection: Connection, unique: Unique) -> None:
    """While the buffer is full nothing is asked for, so nothing is heard; the next pull starts the clock."""
    stream = await make_stream(connection, unique("idle"))
    await fill(connection, stream, 40)
    await make_consumer(connection, stream)
    notices = Notices()
    options = FeedOptions(max_messages=10, expires_s=2, heartbeat_s=0.5, on_notice=notices)
    async with await open_feed(connection, stream, "reader", options) as feed:
        for number in range(1, 41):
            if number % 10 == 1:
                await asyncio.sleep(1.2)
            message = await anext(feed)
            assert message.sequence == number
            message.ack()
    assert notices.all == []


# ---- a server that hangs ----------------------------------------------------------------------------------


async def test_a_server_that_hangs_is_noticed_and_outlived(own_server: NatsServer) -> None:
    notices = Notices()
    options = FeedOptions(max_messages=100, expires_s=20, heartbeat_s=0.25, on_notice=notices)
    async with await keylane.connect(own_server.url) as connection:
        stream = await make_stream(connection, "S")
        await fill(connection, stream, 50)
        await make_consumer(connection, stream)
        reading = Reading(await open_feed(connection, stream, "reader", options))
        await reading.until(50)
        with frozen(own_server):
            notice = await notices.until(Meaning.UNAVAILABLE)
        assert notice.text == "no heartbeat for 0.5 s"
        await fill(connection, stream, 500)
        await reading.until(550)
        await all_acked(connection, stream, "reader")
        reading.check(550)
        assert len(reading.seen) == 550
        await reading.stop()


async def test_a_feed_waits_for_an_api_that_does_not_answer(own_server: NatsServer) -> None:
    notices = Notices()
    options = FeedOptions(expires_s=20, heartbeat_s=0.1, on_notice=notices)
    async with await keylane.connect(own_server.url) as connection:
        stream = await make_stream(connection, "S")
        await make_consumer(connection, stream)
        reading = Reading(await open_feed(connection, stream, "reader", options))
        with frozen(own_server):
            silent = "the JetStream API does not answer: no answer on"
            await until(
                lambda: asyncio.sleep(0, notices.all), lambda all_: sum(silent in one.text for one in all_) >= 2
            )
        await fill(connection, stream, 10)
        await reading.until(10)
        await reading.stop()


# ---- a server that restarts -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_restart_in_the_middle_loses_nothing(own_server: NatsServer, how: str) -> None:
    notices = Notices()
    options = FeedOptions(max_messages=200, expires_s=10, heartbeat_s=1, on_notice=notices)
    async with await keylane.connect(own_server.url) as connection:
        stream = await make_stream(connection, "S", storage=StorageType.FILE)
        await fill(connection, stream, 3000)
        await make_consumer(connection, stream, ack_wait_s=1)
        reading = Reading(await open_feed(connection, stream, "reader", options))
        await reading.until(800)
        if how == "killed":
            own_server.kill()
        await asyncio.to_thread(own_server.restart)
        await link_is(connection, up=True)
        await fill(connection, stream, 500)
        await reading.until(3500)
        info = await all_acked(connection, stream, "reader")
        assert info.ack_floor == 3500
        # A server that is killed also forgets what it delivered last, and counts anew.
        reading.check(3500, order=how == "stopped")
        await reading.stop()


async def test_a_memory_stream_that_is_gone_after_a_restart_ends_the_feed(own_server: NatsServer) -> None:
    async with await keylane.connect(own_server.url) as connection:
        stream = await make_stream(connection, "S")
        await make_consumer(connection, stream)
        async with await open_feed(connection, stream, "reader") as feed:
            waiting = asyncio.ensure_future(anext(feed))
            own_server.kill()
            await asyncio.to_thread(own_server.restart)
            with pytest.raises(ConsumerGone, match="does not exist any more"):
                await waiting


# ---- a link that is cut -----------------------------------------------------------------------------------


async def test_a_cut_link_loses_nothing(own_server: NatsServer) -> None:
    async with (
        await keylane.connect(own_server.url) as steady,
        Link.to(own_server) as link,
        await keylane.connect(link.url) as connection,
    ):
        stream = await make_stream(steady, "S")
        await fill(steady, stream, 2000)
        await make_consumer(steady, stream, ack_wait_s=1)
        reading = Reading(await open_feed(connection, stream, "reader", FeedOptions(max_messages=100)))
        for count in (300, 1200):
            await reading.until(count)
            await link.cut()
            await link.mend()
        await reading.until(2000)
        await all_acked(steady, stream, "reader")
        reading.check(2000)
        await reading.stop()


async def test_what_is_held_stays_bounded_over_many_links(own_server: NatsServer) -> None:
    async with (
        await keylane.connect(own_server.url) as steady,
        Link.to(own_server) as link,
        await keylane.connect(link.url) as connection,
    ):
        stream = await make_stream(steady, "S")
        await fill(steady, stream, 1000)
        await make_consumer(steady, stream, ack_wait_s=600)
        async with await open_feed(connection, stream, "reader", FeedOptions(max_messages=50)) as feed:
            for _ in range(2):
                (await anext(feed)).ack()
                await link.cut()
                await link.mend()
                await link_is(connection, up=True)
            await connection.flush()
            assert buffered(feed) + asked(feed) <= 50


async def test_a_pull_that_could_not_leave_is_not_sent_later(own_server: NatsServer) -> None:
    """It would bring messages that nobody counts."""
    async with (
        await keylane.connect(own_server.url) as steady,
        await keylane.connect(own_server.url) as connection,
    ):
        stream = await make_stream(steady, "S")
        await fill(steady, stream, 45)
        await make_consumer(steady, stream, ack_wait_s=600)
        async with (
            Pulls.of(steady, stream, "reader") as pulls,
            await open_feed(connection, stream, "reader", FeedOptions(max_messages=50)) as feed,
        ):
            await until(lambda: buffered(feed), lambda buffered: buffered == 45)
            # From here on nothing yields to the event loop until the link is given up.
            while not any(b"MSG.NEXT" in command for command in connection.nats.outbox):
                (await anext(feed)).ack()
            before, acked = len(pulls.batches), 45 - buffered(feed)
            await connection.nats.force_reconnect()
            await link_is(connection, up=False)
            await link_is(connection, up=True)
            await connection.flush()
            await fill(steady, stream, 500)
            await until(
                lambda: consumers.info(steady, stream, "reader"),
                lambda info: (
                    info.num_waiting == asked(feed) == 0
                    and info.num_ack_pending == buffered(feed) > 0
                    and info.ack_floor == acked
                ),
            )
            assert buffered(feed) <= 50
            assert len(pulls.batches) == before + 1


@pytest.mark.parametrize("what", ["consumer", "stream"])
async def test_deleted_behind_a_cut_link(own_server: NatsServer, what: str) -> None:
    async with (
        await keylane.connect(own_server.url) as steady,
        Link.to(own_server) as link,
        await keylane.connect(link.url) as connection,
    ):
        stream = await make_stream(steady, "S")
        await make_consumer(steady, stream)
        async with await open_feed(connection, stream, "reader") as feed:
            waiting = asyncio.ensure_future(anext(feed))
            await link.cut()
            if what == "consumer":
                await consumers.delete(steady, stream, "reader")
            else:
                await streams.delete(steady, stream)
            await link.mend()
            with pytest.raises(ConsumerGone, match="does not exist any more"):
                async with asyncio.timeout(30):
                    await waiting


async def test_acks_of_a_lost_link_are_sent_over_the_next(own_server: NatsServer) -> None:
    async with (
        await keylane.connect(own_server.url) as steady,
        Link.to(own_server) as link,
        await keylane.connect(link.url) as connection,
    ):
        stream = await make_stream(steady, "S")
        await fill(steady, stream, 20)
        await make_consumer(steady, stream, ack_wait_s=600)
        async with await open_feed(connection, stream, "reader") as feed:
            messages = [await anext(feed) for _ in range(20)]
            await link.cut()
            await link_is(connection, up=False)
            for message in messages:
                message.ack()
            await link.mend()
            info = await all_acked(steady, stream, "reader")
        assert info.num_redelivered == 0


async def test_a_link_that_was_given_up_is_not_read_any_more(own_server: NatsServer) -> None:
    """The scanner stands in the midst of a payload then: the rest of it must not be taken for messages."""
    async with await keylane.connect(own_server.url) as connection:
        stream = await make_stream(connection, "S")
        await make_consumer(connection, stream)
        async with await open_feed(connection, stream, "reader") as feed:
            client = connection.nats
            wire = client._transport._wire  # type: ignore[union-attr]
            sid = next(sid for sid, route in client.scanner.routes.items() if route is feed).decode()
            forged = f"MSG {feed._pulls._inbox}.0.1 {sid} $JS.ACK.S.reader.1.1.1.1.0 6\r\nforged\r\n".encode()
            wire.sink(forged)
            assert buffered(feed) == 1
            await client.force_reconnect()
            wire.sink(forged)
            assert buffered(feed) == 1
            await link_is(connection, up=True)
            await fill(connection, stream, 1)
            assert [(await anext(feed)).data for _ in range(2)] == [b"forged", b"0"]
