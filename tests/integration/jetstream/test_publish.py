"""Publishing with acknowledgement: results, bounds, refusals, lost links, atomic batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from nats.js.api import StorageType

import keylane
from keylane import Connection
from keylane.errors import (
    InvalidInput,
    NotStored,
    OutcomeUnknown,
    PublishFailed,
    PublishRejected,
)
from keylane.jetstream import (
    Outgoing,
    PublishAck,
    encode_headers,
    open_publisher,
    publish_atomic,
    publish_many,
    read_all,
    streams,
)
from keylane.server import NatsServer
from tests.integration.jetstream.rig import Link, frozen, link_is, make_stream

Unique = Callable[..., str]


async def stored(connection: Connection, stream: str) -> list[bytes]:
    return [message.data async for message in read_all(connection, stream)]


# ---- results ----------------------------------------------------------------------------------------------


async def test_one_result_per_message_in_order(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"), max_msg_size=100)
    messages = [Outgoing(f"{stream}.{number % 7}", b"%d" % number) for number in range(500)]
    messages[100] = Outgoing(f"{stream}.0", bytes(101))
    messages[200] = Outgoing(unique("nobody"), b"")
    messages[300] = Outgoing(f"{stream}.0", b"", {"Nats-Expected-Last-Sequence": "7"})
    results = await publish_many(connection, messages)

    size, nobody, expected = results[100], results[200], results[300]
    assert isinstance(size, PublishRejected)
    assert (size.code, size.err_code, size.description) == (
        400,
        10054,
        "message size exceeds maximum allowed",
    )
    assert isinstance(nobody, NotStored)
    assert "no stream took it" in str(nobody)
    assert isinstance(expected, PublishRejected)
    assert expected.err_code == 10071
    assert "wrong last sequence" in expected.description
    good = [result for result in results if isinstance(result, PublishAck)]
    assert good == [PublishAck(stream, number) for number in range(1, 498)]
    assert await stored(connection, stream) == [
        b"%d" % number for number in range(500) if number not in {100, 200, 300}
    ]


async def test_a_duplicate_is_told(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"))
    twice = [Outgoing(f"{stream}.a", b"once", {"Nats-Msg-Id": "1"})] * 2
    assert await publish_many(connection, twice) == [PublishAck(stream, 1), PublishAck(stream, 1, True)]
    assert await stored(connection, stream) == [b"once"]


async def test_a_publisher_tells_the_result_of_each(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"))
    async with open_publisher(connection) as publisher:
        first = await publisher.send(f"{stream}.a", b"1")
        second = await publisher.send(unique("nobody"))
        assert await first == PublishAck(stream, 1)
        with pytest.raises(NotStored):
            await second
        third = await publisher.send(f"{stream}.a", b"2", {"A": "b"})
        await publisher.flush()
        assert third.done()
        assert "in flight: 0 messages, 0 bytes" in repr(publisher)
    assert third.result().sequence == 2


async def test_many_messages_of_every_size(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"))
    most = connection.nats.max_payload
    sizes = [0, 1, 127, 128, 4096, 65_535, 65_536, 300_000, most]
    messages = [Outgoing(f"{stream}.a", bytes([index]) * size) for index, size in enumerate(sizes)]
    results = await publish_many(connection, messages, max_in_flight=3)
    assert results == [PublishAck(stream, index + 1) for index in range(len(sizes))]
    assert await stored(connection, stream) == [message.data for message in messages]


async def test_an_answer_from_a_stranger_is_no_ack(connection: Connection, unique: Unique) -> None:
    subject = unique("stranger")

    async def answer(message: object) -> None:
        await message.respond(b"not json")  # type: ignore[attr-defined]

    await connection.nats.subscribe(subject, cb=answer)
    (result,) = await publish_many(connection, [Outgoing(subject, b"")])
    assert isinstance(result, OutcomeUnknown)
    assert "what answered is not a stream (b'not json')" in str(result)
    assert connection.is_connected


# ---- bounds -----------------------------------------------------------------------------------------------


async def test_no_more_in_flight_than_allowed(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"))
    most = most_bytes = 0
    async with open_publisher(connection, max_in_flight=50, max_in_flight_bytes=10_000) as publisher:
        for number in range(500):
            await publisher.send(f"{stream}.a", bytes(100 if number < 250 else 900))
            most = max(most, len(publisher._in_flight))
            most_bytes = max(most_bytes, publisher._bytes)
    assert most == 50
    assert 5000 < most_bytes <= 10_000
    assert (await streams.state(connection, stream)).messages == 500


async def test_a_message_beyond_the_byte_bound_goes_alone(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"))
    async with open_publisher(connection, max_in_flight_bytes=10) as publisher:
        results = [await publisher.send(f"{stream}.a", bytes(100)) for _ in range(5)]
    assert [result.result().sequence for result in results] == [1, 2, 3, 4, 5]


async def test_a_full_publisher_waits_and_answers_have_a_deadline() -> None:
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            stream = await make_stream(connection, "S")
            async with open_publisher(connection, max_in_flight=10, timeout_s=2.5) as publisher:
                with frozen(server):
                    started = time.monotonic()
                    first = [await publisher.send(f"{stream}.a") for _ in range(10)]
                    assert time.monotonic() - started < 2.4
                    last = await publisher.send(f"{stream}.a")  # has to wait until the first ones are given up
                    assert 2.5 <= time.monotonic() - started < 20
                    for result in first:
                        with pytest.raises(OutcomeUnknown, match=r"no answer within 2\.5 s; .* may or may not"):
                            await result
                assert isinstance((await asyncio.gather(last, return_exceptions=True))[0], PublishAck)
            assert (await streams.state(connection, stream)).messages == 11


# ---- what is refused before it is sent --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (Outgoing("a b"), "holds no whitespace"),
        (Outgoing("a..b"), "empty"),
        (Outgoing("a.*"), "wildcard"),
        (Outgoing(""), "empty"),
        (Outgoing("a", "text"), "the data is str, not bytes"),  # type: ignore[arg-type]
        (Outgoing("a", b"", {"": "x"}), "header name ''"),
        (Outgoing("a", b"", {"a b": "x"}), "header name 'a b'"),
        (Outgoing("a", b"", {"a:": "x"}), "header name 'a:'"),
        (Outgoing("a", b"", {"é": "x"}), "header name 'é'"),
        (Outgoing("a", b"", {"A": "x\r\nB: y"}), "holds a line break"),
        (Outgoing("a", b"", {"A": "\udc80"}), "not UTF-8"),
        (Outgoing("a", b"", {"A": 1}), "is int, not text"),  # type: ignore[dict-item]
    ],
)
async def test_malformed_messages_are_refused(
    connection: Connection, unique: Unique, message: Outgoing, rule: str
) -> None:
    stream = await make_stream(connection, unique("publish"), allow_atomic=True)
    good = Outgoing(f"{stream}.a", b"")
    with pytest.raises(InvalidInput, match=rule):
        await publish_many(connection, [good, message])
    with pytest.raises(InvalidInput, match=rule):
        await publish_atomic(connection, [good, message, good])
    async with open_publisher(connection) as publisher:
        with pytest.raises(InvalidInput, match=rule):
            await publisher.send(*message)
    assert (await streams.state(connection, stream)).last_sequence == 0


async def test_a_payload_beyond_the_servers_limit_is_refused(connection: Connection, unique: Unique) -> None:
    most = connection.nats.max_payload
    headers = {"A": "b"}
    with pytest.raises(InvalidInput, match=f"{most + 1} bytes are more than the server takes"):
        await publish_many(connection, [Outgoing(unique("x"), bytes(most + 1))])
    with pytest.raises(InvalidInput, match="are more than the server takes"):
        await publish_many(connection, [Outgoing(unique("x"), bytes(most - len(encode_headers(headers)) + 1), headers)])
    assert connection.is_connected


@pytest.mark.parametrize(
    "options",
    [{"max_in_flight": 0}, {"max_in_flight_bytes": 0}, {"timeout_s": 0}, {"timeout_s": float("nan")}],
)
async def test_options_are_checked(connection: Connection, options: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        async with open_publisher(connection, **options):  # type: ignore[arg-type]
            pass


# ---- lost links -------------------------------------------------------------------------------------------


async def test_a_server_killed_half_way_keeps_what_it_acknowledged() -> None:
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            stream = await make_stream(connection, "S", storage=StorageType.FILE)
            results: list[asyncio.Future[PublishAck] | PublishFailed] = []
            async with open_publisher(connection, max_in_flight=500) as publisher:
                for number in range(20_000):
                    try:
                        results.append(await publisher.send(f"{stream}.a", b"%d" % number))
                    except NotStored as failure:
                        results.append(failure)
                        break
                    if number == 3000:
                        server.kill()
            acked = {
                future.result().sequence: b"%d" % number
                for number, future in enumerate(results)
                if isinstance(future, asyncio.Future) and future.exception() is None
            }
            endings = [each.exception() if isinstance(each, asyncio.Future) else each for each in results]
            failures = [ending for ending in endings if ending is not None]
            assert len(acked) >= 2500
            assert {type(failure) for failure in failures} == {OutcomeUnknown, NotStored}
            assert "the connection was lost; the message may or may not be stored" in str(failures[0])
            assert "is down; nothing was sent" in str(failures[-1])
            await asyncio.to_thread(server.restart)
            await link_is(connection, up=True)
            kept = {message.sequence: message.data async for message in read_all(connection, stream)}
    assert acked.items() <= kept.items()
    assert len(kept) <= len(acked) + len(failures) - 1


async def test_what_had_not_left_is_not_sent_later(connection: Connection, unique: Unique) -> None:
    """A publish that was told as failed must not be stored behind the caller's next attempt."""
    stream = await make_stream(connection, unique("publish"))
    async with open_publisher(connection) as publisher:
        pending = await publisher.send(f"{stream}.a", b"first try")
        await connection.nats.force_reconnect()  # in the same turn of the event loop: nothing was written yet
        with pytest.raises(NotStored, match="lost before it was sent"):
            await pending
        while not connection.is_connected:
            with pytest.raises(NotStored, match="the connection to the server is down"):
                await publisher.send(f"{stream}.a", b"too early")
            await asyncio.sleep(0.01)
        await (await publisher.send(f"{stream}.a", b"second try"))
    assert await stored(connection, stream) == [b"second try"]


async def test_publishing_over_a_cut_link_is_told(nats_server: NatsServer, unique: Unique) -> None:
    async with Link.to(nats_server) as link, await keylane.connect(link.url) as connection:
        stream = await make_stream(connection, unique("publish"))
        await link.cut()
        await link_is(connection, up=False)
        results = await publish_many(connection, [Outgoing(f"{stream}.a")] * 3)
        assert [type(result) for result in results] == [NotStored] * 3
        with pytest.raises(NotStored):
            await publish_atomic(connection, [Outgoing(f"{stream}.a")] * 3)
        assert connection.nats.outbox == []


async def test_a_closed_connection_fails_what_is_in_flight() -> None:
    with NatsServer.start() as server:
        connection = await keylane.connect(server.url)
        stream = await make_stream(connection, "S")
        async with open_publisher(connection) as publisher:
            with frozen(server):
                pending = await publisher.send(f"{stream}.a")
                await asyncio.sleep(0)
                await connection.close(timeout_s=0.5)
                with pytest.raises(OutcomeUnknown):
                    await pending


# ---- atomic batches ---------------------------------------------------------------------------------------


async def test_an_atomic_batch_is_stored_whole(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"), allow_atomic=True)
    await publish_many(connection, [Outgoing(f"{stream}.before")] * 3)
    batch = [Outgoing(f"{stream}.{number % 3}", b"%d" % number, {"N": str(number)}) for number in range(1000)]
    acks = await publish_atomic(connection, batch)
    assert acks == [PublishAck(stream, number) for number in range(4, 1004)]
    kept = [message async for message in read_all(connection, stream, sequence=4)]
    assert [(message.subject, message.data, message.headers["N"]) for message in kept] == [
        (message.subject, message.data, str(number)) for number, message in enumerate(batch)
    ]
    assert await publish_atomic(connection, [Outgoing(f"{stream}.a", b"alone")]) == [PublishAck(stream, 1004)]


async def test_two_atomic_batches_do_not_mix(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"), allow_atomic=True)
    both = await asyncio.gather(
        *(publish_atomic(connection, [Outgoing(f"{stream}.a", data)] * 200) for data in (b"one", b"two"))
    )
    assert sorted(acks[0].sequence for acks in both) == [1, 201]
    runs = await stored(connection, stream)
    assert set(runs[:200]) in ({b"one"}, {b"two"})
    assert len(set(runs[200:])) == 1


@pytest.mark.parametrize("wrong_at", [0, 2, 4])
async def test_a_refused_message_refuses_the_batch(connection: Connection, unique: Unique, wrong_at: int) -> None:
    stream = await make_stream(connection, unique("publish"), allow_atomic=True)
    batch = [Outgoing(f"{stream}.{number}", b"") for number in range(5)]
    wrong = {"Nats-Expected-Last-Subject-Sequence": "99"}
    batch[wrong_at] = Outgoing(f"{stream}.{wrong_at}", b"", wrong)
    with pytest.raises(PublishRejected) as refused:
        await publish_atomic(connection, batch)
    assert refused.value.err_code == 10071
    assert (await streams.state(connection, stream)).last_sequence == 0


async def test_atomic_batches_have_limits(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"), allow_atomic=True)
    for count in (0, 1001):
        with pytest.raises(InvalidInput, match=f"1 to 1000 messages, not {count}"):
            await publish_atomic(connection, [Outgoing(f"{stream}.a")] * count)
    with pytest.raises(InvalidInput, match="header 'nats-batch-commit' of message 2: the batch sets it itself"):
        await publish_atomic(
            connection, [Outgoing(f"{stream}.a"), Outgoing(f"{stream}.a", b"", {"nats-batch-commit": "1"})]
        )
    assert (await streams.state(connection, stream)).last_sequence == 0


async def test_an_atomic_batch_needs_a_stream_that_allows_it(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"))
    with pytest.raises(PublishRejected, match="atomic publish is disabled") as refused:
        await publish_atomic(connection, [Outgoing(f"{stream}.a")] * 3)
    assert refused.value.err_code == 10174
    with pytest.raises(NotStored, match="no stream took it"):
        await publish_atomic(connection, [Outgoing(unique("nobody"))] * 3)
    assert (await streams.state(connection, stream)).last_sequence == 0


# ---- the short way ------------------------------------------------------------------------------------------


async def test_publish_stores_one_message_once_for_an_id(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"))
    first = await keylane.publish(connection, f"{stream}.a", b"1", message_id="order-1", headers={"Colour": "red"})
    again = await keylane.publish(connection, f"{stream}.a", b"1", message_id="order-1")
    assert (first, again) == (PublishAck(stream, 1), PublishAck(stream, 1, duplicate=True))
    assert await stored(connection, stream) == [b"1"]
    with pytest.raises(NotStored):
        await keylane.publish(connection, unique("nobody"), b"")


async def test_a_publisher_has_all_results_at_the_end_of_its_block(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("publish"))
    async with keylane.Publisher(connection) as publisher:
        sent = [await publisher.send(f"{stream}.a", b"%d" % number) for number in range(300)]
    assert [one.result().sequence for one in sent] == list(range(1, 301))
