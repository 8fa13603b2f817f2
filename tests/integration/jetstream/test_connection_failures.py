"""Servers that are not there, not NATS, too old, or without JetStream: one clear error each, in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

import keylane
from keylane.errors import (
    ApiUnavailable,
    ConnectError,
    InvalidInput,
    JetStreamDisabled,
    ServerTooOld,
    ServerUnreachable,
)
from keylane.server import NatsServer

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def peer(behave: Behaviour) -> AsyncIterator[str]:
    """A TCP server that is no NATS server; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await behave(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def greeting(**info: object) -> bytes:
    return b"INFO " + json.dumps({"server_id": "X", "max_payload": 1024, **info}).encode() + b"\r\n"


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    return await reader.read()


@pytest.fixture
def dead_url() -> Iterator[str]:
    """A port where nobody listens, and nobody else will."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"nats://127.0.0.1:{reserved.getsockname()[1]}"


# ---- unreachable ----------------------------------------------------------------------------------------


async def test_nobody_listens(dead_url: str) -> None:
    started = time.monotonic()
    with pytest.raises(ServerUnreachable) as failed:
        await keylane.connect(dead_url)
    assert time.monotonic() - started < 4
    assert str(failed.value) == (
        f"no server could be reached (from the arguments of connect()): "
        f"{dead_url}: connection refused; nothing listens there"
    )


async def test_every_server_is_named_with_its_reason(dead_url: str) -> None:
    with pytest.raises(ServerUnreachable) as failed:
        await keylane.connect([dead_url, "nats://no-such-host.invalid:4222"])
    assert f"{dead_url}: connection refused" in str(failed.value)
    assert "nats://no-such-host.invalid:4222: the host name is not known" in str(failed.value)


async def test_one_good_server_is_enough_and_the_rest_is_remembered(nats_server: NatsServer, dead_url: str) -> None:
    for _ in range(4):  # the order is random
        async with await keylane.connect([dead_url, nats_server.url]) as connection:
            assert connection.server == nats_server.url
            known = {uri.geturl() for uri in connection.nats.servers}
            assert known == {dead_url, nats_server.url}


async def test_a_silent_peer_takes_its_share_of_the_deadline_only(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.sample", lambda population, k: list(population))

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_closed(reader)

    async with peer(silent) as url:
        started = time.monotonic()
        with pytest.raises(ServerUnreachable, match=r"no NATS greeting came within 1\.0 s"):
            await keylane.connect(url, connect_timeout_s=1)
        assert time.monotonic() - started < 4
        async with await keylane.connect([url, nats_server.url], connect_timeout_s=4) as connection:
            assert connection.server == nats_server.url


async def test_a_peer_that_does_not_answer_the_login() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting(version="2.15.1"))
        await until_closed(reader)

    async with peer(mute) as url:
        with pytest.raises(ServerUnreachable, match=r"no answer to the login within 1\.0 s"):
            await keylane.connect(url, connect_timeout_s=1)


async def test_a_peer_that_ends_the_link_in_the_login() -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting(version="2.15.1"))
        await reader.readline()

    async with peer(rude) as url:
        with pytest.raises(ServerUnreachable, match="middle of the login"):
            await keylane.connect(url)


async def test_a_peer_that_says_why_it_hangs_up() -> None:
    async def full(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting(version="2.15.1") + b"-ERR 'maximum connections exceeded'\r\n")
        await writer.drain()

    async with peer(full) as url:
        with pytest.raises(ServerUnreachable, match=f"{url}: maximum connections exceeded"):
            await keylane.connect(url)


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.2\r\n", b"INFO nonsense\r\n", b""])
async def test_a_peer_that_is_not_nats(said: bytes) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()

    async with peer(other) as url:
        with pytest.raises(ServerUnreachable, match="not a NATS server"):
            await keylane.connect(url)


async def test_a_server_that_is_full() -> None:
    with NatsServer.start(extra_config="max_connections: 1") as server:
        async with await keylane.connect(server.url):
            # The server hangs up at once; whether its words arrive before that is chance.
            with pytest.raises(ServerUnreachable, match=r"maximum connections exceeded|middle of the login"):
                await keylane.connect(server.url)


async def test_a_cancelled_connect_leaves_nothing_behind() -> None:
    opened, closed = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.set()
        await until_closed(reader)
        closed.set()

    async with peer(silent) as url, asyncio.timeout(20):
        connecting = asyncio.create_task(keylane.connect(url, connect_timeout_s=60))
        await opened.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await closed.wait()


# ---- too old --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.10.29", "1.4.1", ""])
async def test_an_old_server_gets_no_login(version: str) -> None:
    heard: list[bytes] = []
    ended = asyncio.Event()

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting(version=version))
        heard.append(await until_closed(reader))
        ended.set()

    async with peer(old) as url:
        with pytest.raises(ServerTooOld, match=rf"runs nats-server {version}.*needs 2\.11\.0 or newer"):
            await keylane.connect(url, user="alice", password="hunter2")  # noqa: S106
        async with asyncio.timeout(20):
            await ended.wait()
    assert heard == [b""]


# ---- JetStream ------------------------------------------------------------------------------------------


async def test_a_server_without_jetstream() -> None:
    with (
        NatsServer.start(extra_config="jetstream: disabled") as server,
        pytest.raises(JetStreamDisabled, match=r"nobody answers on \$JS\.API\.INFO: .* has no JetStream"),
    ):
        await keylane.connect(server.url)


async def test_a_domain_that_is_not_there(nats_server: NatsServer) -> None:
    with pytest.raises(JetStreamDisabled, match=r"nobody answers on \$JS\.hub\.API\.INFO"):
        await keylane.connect(nats_server.url, domain="hub")


async def test_a_prefix_where_something_else_answers(nats_server: NatsServer) -> None:
    async with await keylane.connect(nats_server.url) as responder:

        async def answer(message: object) -> None:
            await message.respond(b"hello")  # type: ignore[attr-defined]

        await responder.nats.subscribe("other.INFO", cb=answer)
        await responder.nats.flush()
        with pytest.raises(JetStreamDisabled, match="is not JetStream: no JSON object"):
            await keylane.connect(nats_server.url, api_prefix="other")


async def test_jetstream_without_a_leader(nats_server: NatsServer) -> None:
    async with await keylane.connect(nats_server.url) as responder:
        asked = 0

        async def answer(message: object) -> None:
            nonlocal asked
            asked += 1
            error = {"code": 503, "err_code": 10008, "description": "temporarily unavailable"}
            reply = {"error": error} if asked < 3 or deaf else {"type": "info"}
            await message.respond(json.dumps(reply).encode())  # type: ignore[attr-defined]

        deaf = False
        await responder.nats.subscribe("leaderless.INFO", cb=answer)
        await responder.nats.flush()
        async with await keylane.connect(nats_server.url, api_prefix="leaderless"):
            assert asked == 3
        deaf = True
        with pytest.raises(ApiUnavailable, match="without a leader"):
            await keylane.connect(nats_server.url, api_prefix="leaderless", connect_timeout_s=2)


# ---- the rest -------------------------------------------------------------------------------------------


async def test_websocket_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"ws://127\.0\.0\.1:80: websocket needs the package aiohttp"):
        await keylane.connect("ws://127.0.0.1")


async def test_every_failure_is_a_connect_error_and_logs_nothing(
    dead_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ConnectError):
        await keylane.connect(dead_url)
    assert caplog.records == []
