"""A peer that speaks nonsense: the link ends with one clear error, is rebuilt, and at last given up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from nats.aio.msg import Msg

import keylane
from keylane import Connection
from keylane.errors import Disconnected, FeedEnded, OutcomeUnknown, ProtocolViolation, ReadIncomplete
from keylane.jetstream import ConnectionHooks, Outgoing, PublishAck, open_feed, publish_many, read_batch
from keylane.jetstream.connection import VIOLATIONS_PER_SERVER
from keylane.server import NatsServer
from tests.integration.jetstream.rig import Link, fill, make_consumer, make_stream
from tests.waiter import until

Unique = Callable[..., str]

NONSENSE = [
    b"MSG a 1 -15\r\n",
    b"HMSG a 1 9 4\r\nabcd\r\n",
    b"HMSG a 1 -2 4\r\nabcd\r\n",
    b"MSG a 1 +5\r\nabcde\r\n",
    b"MSG a 1 3\r\nabcdef\r\n",
    b"MSG a 1 9999999999\r\n",
    b"INFO [1,2]\r\n",
    b'INFO {"max_payload":"x"}\r\n',
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x00\x01\x02\r\n",
    b"x" * 70_000,
]


class HostileLink(Link):
    """A link to the real server on which somebody else can talk to the client too."""

    after_login = b""
    logins = 0

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        to_client = target.get_extra_info("sockname")[1] == self.port
        greeted = False
        try:
            while data := await source.read(65536):
                target.write(data)
                if to_client and not greeted and b"PONG\r\n" in data:
                    greeted = True
                    self.logins += 1
                    target.write(self.after_login)
                await target.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(target)
            target.close()

    def say(self, words: bytes) -> None:
        for writer in self._writers:
            if writer.get_extra_info("sockname")[1] == self.port:
                writer.write(words)


@asynccontextmanager
async def hostile(server: NatsServer) -> AsyncIterator[tuple[HostileLink, Connection, list[Exception]]]:
    errors: list[Exception] = []
    async with (
        HostileLink.to(server) as link,
        await keylane.connect(link.url, hooks=ConnectionHooks(on_error=errors.append)) as connection,
    ):
        assert isinstance(link, HostileLink)
        yield link, connection, errors


@pytest.mark.parametrize("words", NONSENSE, ids=[repr(words[:20]) for words in NONSENSE])
async def test_nonsense_ends_the_link_and_the_next_one_works(
    nats_server: NatsServer, words: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with hostile(nats_server) as (link, connection, errors), asyncio.timeout(20):
        await connection.flush()
        link.say(words)
        await until(lambda: errors)
        (error,) = errors
        assert isinstance(error, ProtocolViolation)
        assert "does not speak NATS" in str(error)
        assert len(str(error)) < 600
        await until(lambda: connection.is_connected)
        assert await connection.api.request("INFO")
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message.split(" (")[0] for record in told][-1] == f"lost {link.url}"
    assert all("does not speak NATS" in record.message for record in told)


async def test_a_link_that_keeps_on_with_nonsense_is_given_up(nats_server: NatsServer, unique: Unique) -> None:
    async with hostile(nats_server) as (link, connection, errors), asyncio.timeout(30):
        stream = await make_stream(connection, unique("hostile"))
        await make_consumer(connection, stream)
        feed = await open_feed(connection, stream, "reader")
        reading = asyncio.create_task(feed.next(30))
        link.after_login = b"MSG a 1 -15\r\n"
        started = time.monotonic()
        link.say(b"MSG a 1 -15\r\n")
        reason = await connection.wait_closed()
        assert f"malformed line ('MSG a 1 -15\\r\\n'); {VIOLATIONS_PER_SERVER} times in a row" in reason
        assert sum(isinstance(error, ProtocolViolation) for error in errors) == VIOLATIONS_PER_SERVER
        # No storm: one login for each violation, with the usual pause in between.
        assert link.logins == VIOLATIONS_PER_SERVER
        assert time.monotonic() - started > 0.25
        with pytest.raises(FeedEnded, match="does not speak NATS"):
            await reading
        with pytest.raises(Disconnected, match="does not speak NATS"):
            await connection.api.request("INFO")


@pytest.mark.parametrize(
    "greeting",
    [
        b"INFO [1,2]\r\n",
        b'INFO {"version":"2.15.1","max_payload":"x"}\r\n',
        b'INFO {"version":"2.15.1","connect_urls":["nowhere"]}\r\n',
        b'INFO {"version":"2.15.1","max_payload":1024}\r\n\x00\x00\r\nMSG a 1 -15\r\n',
        b"INFO " + b"x" * 70_000,
    ],
    ids=["a list", "a text for a number", "no address", "no answer to the ping", "no end"],
)
async def test_a_greeting_that_is_nonsense(greeting: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(20):
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ProtocolViolation, match=f"{url}: the server does not speak NATS: "):
            await keylane.connect(url)


# ---- what other clients may send ---------------------------------------------------------------------


async def test_every_subject_that_the_server_takes_is_read(connection: Connection, unique: Unique) -> None:
    """A publisher must not be able to end the link of a reader: the server lets any byte but white space pass."""
    stream = await make_stream(connection, unique("bytes"))
    await make_consumer(connection, stream)
    odd = bytes(byte for byte in range(1, 256) if byte not in b" \t\r\n.*>")
    async with await open_feed(connection, stream, "reader") as feed:
        connection.nats.post(b"PUB %b.%b 2\r\nhi\r\n" % (stream.encode(), odd))
        message = await feed.next(10)
        assert message is not None
        assert message.raw_subject.split(b".", 1)[1] == odd
        message.ack()
        assert connection.is_connected


async def test_strays_in_a_feeds_inbox_are_skipped_and_counted(
    connection: Connection, unique: Unique, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await make_stream(connection, unique("stray"))
    await make_consumer(connection, stream)
    async with await open_feed(connection, stream, "reader") as feed:
        for words in (b"%b.1.1 4\r\nboo!", b"%b.x 0\r\n", b"%b.x some.reply 0\r\n", b"%b.1.1 $JS.ACKED 0\r\n"):
            connection.nats.post(b"PUB " + words % feed._pulls._inbox.encode() + b"\r\n")
        await connection.flush()
        await fill(connection, stream, 1)
        message = await feed.next(10)
        assert message is not None
        assert message.sequence == 1
        message.ack()
        assert feed.strays == 4
    assert [record.levelname for record in caplog.records if "no consumer sent" in record.message] == ["WARNING"]


@pytest.mark.parametrize(
    "answer",
    [b"{}", b"[]", b'{"error":5}', b'{"stream":1,"seq":"x"}', b"[" * 20_000, b'{"stream":"a","seq":' + b"9" * 5000],
)
async def test_another_answer_to_a_publish_does_not_end_the_link(
    connection: Connection, unique: Unique, answer: bytes
) -> None:
    subject = unique("answered")

    async def respond(message: Msg) -> None:
        await message.respond(answer)

    subscription = await connection.nats.subscribe(subject, cb=respond)
    (result,) = await publish_many(connection, [Outgoing(subject)])
    assert isinstance(result, OutcomeUnknown)
    assert "what answered is not a stream" in str(result)
    await subscription.unsubscribe()
    stream = await make_stream(connection, unique("stored"))
    (result,) = await publish_many(connection, [Outgoing(f"{stream}.a")])
    assert isinstance(result, PublishAck)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"Nats-Sequence": "+5"},
        {"Nats-Sequence": "5"},
        {"Nats-Subject": "a", "Nats-Sequence": "5", "Nats-Time-Stamp": "soon"},
        {"Nats-Subject": "a", "Nats-Sequence": "٣", "Nats-Time-Stamp": "2026-01-01T00:00:00Z"},
        {
            "Nats-Subject": "a",
            "Nats-Sequence": "5",
            "Nats-Time-Stamp": "2026-01-01T00:00:00Z",
            "Nats-Last-Sequence": "1_0",
        },
    ],
    ids=str,
)
async def test_a_direct_get_that_is_answered_by_another(
    connection: Connection, unique: Unique, fields: dict[str, str]
) -> None:
    stream = unique("nowhere")
    client = connection.nats

    async def forge(message: Msg) -> None:
        await client.publish(message.reply, b"", headers=fields or {"A": "b"})

    subscription = await client.subscribe(f"$JS.API.DIRECT.GET.{stream}", cb=forge)
    with pytest.raises(ReadIncomplete):
        await read_batch(connection, stream, timeout_s=5)
    await subscription.unsubscribe()
    assert connection.is_connected
