"""Every status that a server sends in answer to a pull, made by a real server, and what a feed makes of it.

Priority groups (423 and their kinds of 400) have tests of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

import keylane
from keylane import Connection
from keylane.core.pulls import Meaning, Status, meaning_of
from keylane.errors import ConsumerGone, PullRefused
from keylane.jetstream import FeedOptions, consumers, open_feed, streams
from keylane.server import NatsCluster, NatsServer
from tests.integration.jetstream.rig import (
    SECOND_NS,
    Notices,
    RawPull,
    all_acked,
    fill,
    make_consumer,
    make_stream,
)
from tests.waiter import until

Unique = Callable[..., str]
LONG = 30 * SECOND_NS


@pytest.mark.parametrize(
    ("request_", "code", "text", "meaning"),
    [
        ({"batch": 1, "no_wait": True}, 404, "No Messages", Meaning.ENDED),
        ({"batch": 5, "expires": SECOND_NS // 10}, 408, "Request Timeout", Meaning.ENDED),
        (
            {"batch": 1, "expires": SECOND_NS, "idle_heartbeat": SECOND_NS},
            400,
            "Bad Request - heartbeat value too large",
            Meaning.INVALID,
        ),
        (b'{"batch":', 400, "Bad Request - unexpected end of JSON input", Meaning.INVALID),
    ],
)
async def test_answers_of_an_empty_consumer(  # noqa: PLR0917 - one row of the table
    connection: Connection,
    unique: Unique,
    request_: dict[str, object] | bytes,
    code: int,
    text: str,
    meaning: Meaning,
) -> None:
    stream = await make_stream(connection, unique("status"))
    await make_consumer(connection, stream)
    async with RawPull.on(connection, stream, "reader", request_) as pull:
        answer = await pull.answer()
    assert answer[:2] == (code, text)
    assert meaning_of(Status(code, text)) is meaning


@pytest.mark.parametrize(
    ("request_", "text", "messages", "left", "meaning"),
    [
        ({"batch": 2, "max_bytes": 100_000}, "Batch Completed", 2, "0", Meaning.ENDED),
        ({"batch": 9, "max_bytes": 400}, "Message Size Exceeds MaxBytes", 2, "7", Meaning.OUT_OF_BYTES),
        ({"batch": 9, "max_bytes": 50}, "Message Size Exceeds MaxBytes", 0, "9", Meaning.OUT_OF_BYTES),
    ],
)
async def test_answers_that_end_a_pull_with_messages(  # noqa: PLR0917 - one row of the table
    connection: Connection,
    unique: Unique,
    request_: dict[str, object],
    text: str,
    messages: int,
    left: str,
    meaning: Meaning,
) -> None:
    stream = await make_stream(connection, unique("status"))
    await fill(connection, stream, 5, size=100)
    await make_consumer(connection, stream)
    async with RawPull.on(connection, stream, "reader", {"expires": LONG, **request_}) as pull:
        code, said, fields = await pull.answer()
    assert (code, said, fields["Nats-Pending-Messages"], pull.messages) == (409, text, left, messages)
    assert meaning_of(Status(code, said)) is meaning


@pytest.mark.parametrize(
    ("request_", "text", "meaning"),
    [
        ({"batch": 3}, "Exceeded MaxRequestBatch of 2", Meaning.LIMIT),
        ({"batch": 1, "expires": LONG}, "Exceeded MaxRequestExpires of 5s", Meaning.LIMIT),
        ({"batch": 1, "max_bytes": 2000}, "Exceeded MaxRequestMaxBytes of 1000", Meaning.LIMIT),
    ],
)
async def test_answers_to_pulls_beyond_a_limit(
    connection: Connection, unique: Unique, request_: dict[str, object], text: str, meaning: Meaning
) -> None:
    stream = await make_stream(connection, unique("status"))
    await make_consumer(connection, stream, max_batch=2, max_bytes=1000, max_expires_s=5)
    async with RawPull.on(connection, stream, "reader", request_) as pull:
        code, said, _ = await pull.answer()
    assert (code, said) == (409, text)
    assert meaning_of(Status(code, said)) is meaning


async def test_answers_for_consumers_that_give_nothing(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("status"))
    await make_consumer(connection, stream, "pushes", deliver_subject=unique("somewhere"))
    async with RawPull.on(connection, stream, "pushes", {"batch": 1}) as pull:
        code, said, _ = await pull.answer()
    assert (code, said) == (409, "Consumer is push based")
    assert meaning_of(Status(code, said)) is Meaning.INVALID

    async with RawPull.on(connection, stream, "nobody", {"batch": 1}) as pull:
        code, said, _ = await pull.answer()
    assert (code, said) == (503, "")
    assert meaning_of(Status(code, said)) is Meaning.UNAVAILABLE


async def test_heartbeats_come_while_nothing_can_be_sent(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("status"))
    await fill(connection, stream, 2)
    await make_consumer(connection, stream, "full", max_ack_pending=1)
    await make_consumer(connection, stream, "paused")
    await consumers.pause(connection, stream, "paused", datetime.now(UTC) + timedelta(minutes=1))
    request: dict[str, object] = {"batch": 2, "expires": LONG, "idle_heartbeat": SECOND_NS // 10}
    for consumer, messages in (("full", 1), ("paused", 0)):
        async with RawPull.on(connection, stream, consumer, request) as pull, asyncio.timeout(10):
            for _ in range(3):
                code, said, _ = await pull.statuses.get()
                assert (code, said) == (100, "Idle Heartbeat")
        assert pull.messages == messages
    assert meaning_of(Status(100, "Idle Heartbeat")) is Meaning.ALIVE


async def test_the_answer_of_a_server_that_shuts_down() -> None:
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            stream = await make_stream(connection, "S")
            await make_consumer(connection, stream)
            async with RawPull.on(connection, stream, "reader", {"batch": 1, "expires": LONG}) as pull:
                await asyncio.to_thread(server.stop)
                code, said, _ = await pull.answer()
    assert (code, said) == (409, "Server Shutdown")
    assert meaning_of(Status(code, said)) is Meaning.INTERRUPTED


async def test_the_answer_when_the_leader_changes(nats_cluster: NatsCluster, unique: Unique) -> None:
    async with await keylane.connect(nats_cluster.urls) as connection:
        stream = await make_stream(connection, unique("status"), num_replicas=3)
        try:
            await make_consumer(connection, stream)
            async with RawPull.on(connection, stream, "reader", {"batch": 1, "expires": LONG}) as pull:
                await until(lambda: consumers.info(connection, stream, "reader"), lambda info: info.num_waiting == 1)
                await consumers.step_down(connection, stream, "reader")
                code, said, _ = await pull.answer()
        finally:
            await streams.delete(connection, stream)
    assert (code, said) == (409, "Leadership Change")
    assert meaning_of(Status(code, said)) is Meaning.INTERRUPTED


# ---- what a feed makes of them ----------------------------------------------------------------------------


async def test_a_deleted_consumer_ends_the_feed(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("status"))
    await fill(connection, stream, 3)
    await make_consumer(connection, stream)
    async with await open_feed(connection, stream, "reader") as feed:
        for _ in range(3):
            (await anext(feed)).ack()
        waiting = asyncio.ensure_future(anext(feed))
        await consumers.delete(connection, stream, "reader")
        with pytest.raises(ConsumerGone, match="was deleted"):
            await waiting
        with pytest.raises(ConsumerGone):
            await feed.wait()


async def test_a_deleted_stream_ends_the_feed(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("status"))
    await make_consumer(connection, stream)
    async with await open_feed(connection, stream, "reader") as feed:
        waiting = asyncio.ensure_future(anext(feed))
        await connection.flush()
        await streams.delete(connection, stream)
        with pytest.raises(ConsumerGone):
            await waiting


async def test_a_consumer_that_vanished_unnoticed_ends_the_feed(connection: Connection, unique: Unique) -> None:
    """The pull of a reader with a full buffer is answered by nobody: 503."""
    stream = await make_stream(connection, unique("status"))
    await fill(connection, stream, 10)
    await make_consumer(connection, stream)
    notices = Notices()
    options = FeedOptions(max_messages=4, on_notice=notices)
    async with await open_feed(connection, stream, "reader", options) as feed:
        await until(
            lambda: consumers.info(connection, stream, "reader"),
            lambda info: info.num_waiting == 0 and info.num_ack_pending == 4,
        )
        await consumers.delete(connection, stream, "reader")
        assert [(await anext(feed)).sequence for _ in range(4)] == [1, 2, 3, 4]
        with pytest.raises(ConsumerGone, match="does not exist any more"):
            await anext(feed)
    assert notices.all[0].meaning is Meaning.UNAVAILABLE


async def test_a_pull_without_room_is_refused_and_with_heartbeats_in_silence(
    connection: Connection, unique: Unique
) -> None:
    stream = await make_stream(connection, unique("status"))
    await make_consumer(connection, stream, max_waiting=1)
    request: dict[str, object] = {"batch": 1, "expires": SECOND_NS // 4}
    with_heartbeats = {**request, "idle_heartbeat": SECOND_NS // 20}
    async with (
        RawPull.on(connection, stream, "reader", {"batch": 1, "expires": LONG}),
        RawPull.on(connection, stream, "reader", with_heartbeats) as silent,
        RawPull.on(connection, stream, "reader", request) as refused,
    ):
        code, said, _ = await refused.answer()
        await asyncio.sleep(0.5)  # twice its life: it would have ended with 408
        assert silent.statuses.empty()
    assert (code, said) == (409, "Exceeded MaxWaiting")
    assert meaning_of(Status(code, said)) is Meaning.REFUSED


async def test_no_room_for_a_pull_is_told_and_tried_again(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("status"))
    await make_consumer(connection, stream, max_waiting=1)
    notices = Notices()
    options = FeedOptions(expires_s=1, heartbeat_s=0.1, on_notice=notices)
    feed = await open_feed(connection, stream, "reader", options)
    async with RawPull.on(connection, stream, "reader", {"batch": 1, "expires": LONG}) as occupant:
        refusal = await notices.until(Meaning.REFUSED)
        assert "as many as its max_waiting allows" in refusal.text
    async with feed:
        await fill(connection, stream, 5)
        for _ in range(5 - occupant.messages):
            message = await feed.next(15)
            assert message is not None
            message.ack()


async def test_a_consumer_with_one_place_for_pulls_never_stalls(connection: Connection, unique: Unique) -> None:
    """A second pull beside an open one would be dropped without a word, and its messages waited for."""
    stream = await make_stream(connection, unique("status"))
    await make_consumer(connection, stream, max_waiting=1)
    notices = Notices()
    options = FeedOptions(max_messages=100, on_notice=notices)
    async with await open_feed(connection, stream, "reader", options) as feed, asyncio.timeout(9):
        for count in (60, 60, 1000):
            await fill(connection, stream, count)
            for _ in range(count):
                (await anext(feed)).ack()
        await all_acked(connection, stream, "reader")
    assert notices.all == []


async def test_a_consumer_that_starts_to_push_ends_the_feed(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("status"))
    await fill(connection, stream, 4)
    await make_consumer(connection, stream)
    async with await open_feed(connection, stream, "reader", FeedOptions(max_messages=4)) as feed:
        await until(lambda: consumers.info(connection, stream, "reader"), lambda info: info.num_ack_pending == 4)
        await consumers.delete(connection, stream, "reader")
        await make_consumer(connection, stream, deliver_subject=unique("somewhere"))
        for _ in range(4):
            await anext(feed)
        with pytest.raises(PullRefused, match="409 Consumer is push based"):
            await anext(feed)


async def test_a_paused_consumer_is_waited_for(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("status"))
    await fill(connection, stream, 5)
    await make_consumer(connection, stream)
    await consumers.pause(connection, stream, "reader", datetime.now(UTC) + timedelta(minutes=1))
    notices = Notices()
    # The server looks at an open pull again only when its heartbeat is due.
    options = FeedOptions(expires_s=10, heartbeat_s=2, on_notice=notices)
    async with await open_feed(connection, stream, "reader", options) as feed:
        assert await feed.next(0.2) is None
        await consumers.resume(connection, stream, "reader")
        for _ in range(5):
            message = await feed.next(10)
            assert message is not None
            message.ack()
        await all_acked(connection, stream, "reader")
    assert notices.all == []
