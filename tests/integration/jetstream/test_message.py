"""A delivered message: what it says about itself, and every way to settle it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta

import pytest

import keylane
from keylane import Connection
from keylane.errors import AckFailed, AlreadySettled, InvalidInput, NotADelivery
from keylane.jetstream import Feed, Message, Outgoing, consumers, open_feed, publish_many
from keylane.jetstream.message import Delivery, parse_ack_subject
from keylane.server import NatsServer
from tests.integration.jetstream.rig import all_acked, fill, link_is, make_consumer, make_stream
from tests.waiter import until

Unique = Callable[..., str]
NEVER_S = 600.0


@pytest.fixture
async def feed(connection: Connection, unique: Unique) -> AsyncIterator[Feed]:
    """A feed on a stream of five messages whose ack wait no test outlives."""
    stream = await make_stream(connection, unique("message"))
    await fill(connection, stream, 5)
    await make_consumer(connection, stream, ack_wait_s=NEVER_S)
    async with await open_feed(connection, stream, "reader") as feed:
        yield feed


async def taken(feed: Feed, timeout_s: float = 10) -> Message:
    message = await feed.next(timeout_s)
    assert message is not None
    return message


# ---- what it says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        b"some.reply",
        b"$JS.ACK.s.c.1.5.6.7",
        b"$JS.ACK.s.c.1.+5.1_0.7.0",
        b"$JS.ACK.s.c.1.-5.6.7.0",
        b"$JS.ACK.s.c.1.5x.6x.7.0",
        b"$JS.ACK.s.c.1." + b"9" * 5000 + b"." + b"9" * 5000 + b".7.0",
        b"$JS.ACK.\xff.c.1.\xff.\xff.7.0",
    ],
    ids=lambda reply: repr(reply[:40]),
)
async def test_what_is_no_delivery_has_a_typed_error(connection: Connection, reply: bytes) -> None:
    message = Message(connection.nats, b"a", reply, b"", b"")
    for ask in (lambda: message.delivery, lambda: message.delivered_count, lambda: parse_ack_subject(reply)):
        with pytest.raises(NotADelivery, match="inbox_prefix"):
            ask()
    if reply.count(b".") < 5 or not reply.split(b".")[5].isdigit() or len(reply) > 1000:
        with pytest.raises(NotADelivery):
            assert message.sequence
        with pytest.raises(NotADelivery):
            assert message.consumer_sequence


async def test_a_message_tells_where_it_is_from(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("message"))
    await publish_many(
        connection,
        [
            Outgoing(f"{stream}.é.1", b"\x00\r\nMSG x 1 1\r\n", {"Name": "wert é", "Empty": ""}),
            Outgoing(f"{stream}.b"),
        ],
    )
    await make_consumer(connection, stream)
    async with await open_feed(connection, stream, "reader") as feed:
        first, second = await taken(feed), await taken(feed)
        assert (first.subject, first.data) == (f"{stream}.é.1", b"\x00\r\nMSG x 1 1\r\n")
        assert first.headers == {"Name": "wert é", "Empty": ""}
        assert first.header_items == [("Name", "wert é"), ("Empty", "")]
        assert (second.data, second.headers) == (b"", {})
        assert first.delivery[:5] == (stream, "reader", 1, 1, 1)
        assert second.delivery[:5] == (stream, "reader", 1, 2, 2)
        assert (first.delivery.pending, second.delivery.pending) == (1, 0)
        assert abs(first.timestamp - datetime.now(UTC)) < timedelta(minutes=1)
        assert f"{stream}.é.1 sequence=1 tries=1 14 B" in repr(first)
        second.nak()
        again = await taken(feed)
        assert again.delivery[:5] == (stream, "reader", 2, 2, 3)


async def test_repeated_headers_are_kept(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("message"))
    head = b"NATS/1.0\r\nA: 1\r\na: 2\r\nA: 3\r\n\r\n"
    connection.nats.post(b"HPUB %b.x %d %d\r\n%b\r\n" % (stream.encode(), len(head), len(head), head))
    await make_consumer(connection, stream)
    async with await open_feed(connection, stream, "reader") as feed:
        message = await taken(feed)
        assert message.header_items == [("A", "1"), ("a", "2"), ("A", "3")]
        assert message.headers == {"A": "1", "a": "2"}


@pytest.mark.parametrize(
    ("reply", "delivery"),
    [
        (b"$JS.ACK.S.C.2.30.4.5555.6", Delivery("S", "C", 2, 30, 4, 5555, 6, "")),
        (b"$JS.ACK._.acc.S.C.2.30.4.5555.6", Delivery("S", "C", 2, 30, 4, 5555, 6, "")),
        (b"$JS.ACK.hub.acc.S.C.2.30.4.5555.6.token", Delivery("S", "C", 2, 30, 4, 5555, 6, "hub")),
    ],
)
def test_both_forms_of_ack_subjects(reply: bytes, delivery: Delivery) -> None:
    assert parse_ack_subject(reply) == delivery


# ---- settling it ------------------------------------------------------------------------------------------


async def test_nak_brings_it_back_at_once(feed: Feed) -> None:
    first = await taken(feed)
    first.nak()
    rest = [await taken(feed) for _ in range(5)]
    assert sorted(message.sequence for message in rest) == [1, 2, 3, 4, 5]
    again = next(message for message in rest if message.sequence == 1)
    assert again.delivered_count == 2


async def test_nak_with_a_delay_brings_it_back_later(feed: Feed) -> None:
    for _ in range(4):
        (await taken(feed)).ack()
    last = await taken(feed)
    started = time.monotonic()
    last.nak(2)
    assert await feed.next(0.2) is None
    again = await taken(feed)
    assert again.sequence == last.sequence
    assert time.monotonic() - started >= 1.9


async def test_term_ends_it(connection: Connection, feed: Feed) -> None:
    advisories = await connection.nats.subscribe(f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{feed.stream}.>")
    messages = [await taken(feed) for _ in range(5)]
    messages[0].term("bad\r\nformat é")
    messages[1].term()
    for message in messages[2:]:
        message.ack()
    info = await all_acked(connection, feed.stream, feed.consumer)
    assert (info.ack_floor, info.num_redelivered) == (5, 0)
    advisory = await advisories.next_msg(5)
    assert '"reason":"bad format é"' in advisory.data.decode()


async def test_in_progress_starts_the_ack_wait_anew(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("message"))
    await fill(connection, stream, 1)
    await make_consumer(connection, stream, ack_wait_s=3)
    async with await open_feed(connection, stream, "reader") as feed:
        message = await taken(feed)
        for _ in range(4):
            assert await feed.next(0.9) is None
            message.in_progress()
        message.ack()
        info = await all_acked(connection, stream, "reader")
        assert info.num_redelivered == 0
        assert message.settled
        with pytest.raises(AlreadySettled):
            message.in_progress()


async def test_an_unsettled_message_comes_back_after_the_ack_wait(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("message"))
    await fill(connection, stream, 1)
    await make_consumer(connection, stream, ack_wait_s=0.3)
    async with await open_feed(connection, stream, "reader") as feed:
        first = await taken(feed)
        again = await taken(feed)
        assert (again.sequence, again.delivered_count) == (first.sequence, 2)
        again.ack()
        await all_acked(connection, stream, "reader")


async def test_a_message_is_settled_once(feed: Feed) -> None:
    for settle in (Message.ack, Message.nak, Message.term):
        message = await taken(feed)
        before = message.settled
        settle(message)
        assert (before, message.settled) == (False, True)
        for again in (Message.ack, Message.nak, Message.term, Message.in_progress):
            with pytest.raises(AlreadySettled, match=f"sequence {message.sequence} was already"):
                again(message)
        with pytest.raises(AlreadySettled):
            await message.ack_confirmed()


async def test_acks_of_one_turn_leave_in_one_write(
    connection: Connection, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [await taken(feed) for _ in range(5)]
    transport = connection.nats._transport
    writes: list[bytes] = []
    monkeypatch.setattr(transport, "write", writes.append)
    for message in messages:
        message.ack()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(writes) == 1
    assert writes[0].count(b"+ACK") == 5
    monkeypatch.undo()
    connection.nats.post(writes[0])
    await all_acked(connection, feed.stream, feed.consumer)


@pytest.mark.parametrize("delay_s", [-1, float("nan"), float("inf"), "1"])
async def test_a_delay_is_checked(feed: Feed, delay_s: float) -> None:
    message = await taken(feed)
    with pytest.raises(InvalidInput, match="delay_s"):
        message.nak(delay_s)
    assert not message.settled


# ---- the confirmed ack ------------------------------------------------------------------------------------


async def test_a_confirmed_ack_is_known_to_the_server(connection: Connection, feed: Feed) -> None:
    for number in range(1, 6):
        message = await taken(feed)
        await message.ack_confirmed()
        assert message.settled
        assert (await consumers.info(connection, feed.stream, feed.consumer)).ack_floor == number
    with pytest.raises(InvalidInput, match="timeout_s"):
        await message.ack_confirmed(timeout_s=0)


async def test_acks_before_a_confirmed_one_are_in_too(connection: Connection, feed: Feed) -> None:
    *others, last = [await taken(feed) for _ in range(5)]
    for message in others:
        message.ack()
    await last.ack_confirmed()
    assert (await consumers.info(connection, feed.stream, feed.consumer)).ack_floor == 5


async def test_an_ack_that_nobody_takes_fails(connection: Connection, feed: Feed) -> None:
    message = await taken(feed)
    await consumers.delete(connection, feed.stream, feed.consumer)
    with pytest.raises(AckFailed, match="no confirmation for the ack of sequence 1"):
        await message.ack_confirmed()
    assert not message.settled


async def test_a_confirmed_ack_has_a_deadline_when_the_server_is_gone() -> None:
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            stream = await make_stream(connection, "S", storage=None)
            await fill(connection, stream, 1)
            await make_consumer(connection, stream, ack_wait_s=NEVER_S)
            async with await open_feed(connection, stream, "reader") as feed:
                message = await taken(feed)
                await until(
                    lambda: consumers.info(connection, stream, "reader"),
                    lambda info: info.num_ack_pending == 1,
                )
                server.kill()
                started = time.monotonic()
                with pytest.raises(AckFailed, match=r"within 0\.3 s .* may or may not have it"):
                    await message.ack_confirmed(timeout_s=0.3)
                assert time.monotonic() - started < 4
                assert not message.settled
                await asyncio.to_thread(server.restart)
                await link_is(connection, up=True)
                await message.ack_confirmed()
                await all_acked(connection, stream, "reader")


async def test_a_confirmed_ack_on_a_closed_connection_fails(nats_server: NatsServer, unique: Unique) -> None:
    connection = await keylane.connect(nats_server.url)
    stream = await make_stream(connection, unique("message"))
    await fill(connection, stream, 1)
    await make_consumer(connection, stream)
    feed = await open_feed(connection, stream, "reader")
    message = await taken(feed)
    await connection.close()
    with pytest.raises(AckFailed):
        await message.ack_confirmed(timeout_s=1)
    await feed.stop()
