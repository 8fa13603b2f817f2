"""From the first login to the end: loss, return, hooks, refusals, closing."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import time

import nats.errors
import pytest

import keylane
from keylane.errors import (
    AuthenticationFailed,
    Disconnected,
    InvalidInput,
    RequestTimeout,
    ServerTooOld,
    ServerUnreachable,
)
from keylane.jetstream import ConnectionHooks
from keylane.jetstream.connection import REFUSALS_PER_SERVER
from keylane.jetstream.login import LoginClient
from keylane.server import NatsCluster, NatsServer
from tests.waiter import until


class Diary:
    """ConnectionHooks that write down what they are told."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, object]] = []
        self.hooks = ConnectionHooks(
            on_disconnect=lambda reason: self.note("lost", reason),
            on_reconnect=lambda server: self.note("back", server),
            on_error=lambda error: self.note("error", error),
            on_close=lambda reason: self.note("closed", reason),
        )

    def note(self, what: str, about: object) -> None:
        self.entries.append((what, about))

    def all(self, what: str | type[Exception]) -> list[object]:
        if isinstance(what, str):
            return [about for kind, about in self.entries if kind == what]
        return [about for _, about in self.entries if isinstance(about, what)]

    async def until(self, what: str | type[Exception], times: int = 1) -> None:
        await until(lambda: self.all(what), lambda seen: len(seen) >= times)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keylane.jetstream.login.RECONNECT_WAIT_S", (0.05, 0.1))


# ---- loss and return --------------------------------------------------------------------------------------


async def test_a_restart_is_survived_and_told() -> None:
    diary = Diary()
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            connection.observe(diary.hooks)
            await connection.api.request("STREAM.CREATE.S", {"name": "S", "subjects": ["s"]})
            await asyncio.to_thread(server.restart)
            await diary.until("back")
            assert connection.is_connected
            assert (await connection.api.request("STREAM.INFO.S"))["config"]["name"] == "S"
        assert diary.all("lost") == ["unexpected EOF"]
        assert diary.all("back") == [server.url]
        assert all(isinstance(error, ServerUnreachable) for error in diary.all("error"))
        assert diary.all("closed") == ["closed by the program"]


async def test_a_long_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    diary = Diary()
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            connection.observe(diary.hooks)
            with caplog.at_level(logging.INFO, "keylane"):
                server.kill()
                await diary.until("error", 3)
            assert f"{server.url} reconnecting" in repr(connection)
            loud = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
            assert len(loud) == 2
            assert loud[0].startswith(f"lost {server.url}")
            assert "Connect call failed" in loud[1]


async def test_a_request_under_way_ends_when_the_link_does() -> None:
    diary = Diary()
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            connection.observe(diary.hooks)
            signal_server(server.pid, signal.SIGSTOP)
            asked = asyncio.ensure_future(connection.api.request("INFO", timeout_s=30))
            await asyncio.sleep(0)  # the request is on its way
            server.kill()
            with pytest.raises(Disconnected, match=r"no answer on \$JS\.API\.INFO: the connection was lost"):
                await asked
            await diary.until("lost")
            with pytest.raises(RequestTimeout, match=r"within 0\.2 s; the connection is down"):
                await connection.api.request("INFO", timeout_s=0.2)


async def test_another_node_of_the_cluster_takes_over(nats_cluster: NatsCluster) -> None:
    diary = Diary()
    async with await keylane.connect(nats_cluster.urls[0]) as connection:
        connection.observe(diary.hooks)
        first = connection.server
        known = {uri.geturl() for uri in connection.nats.servers}
        assert known >= set(nats_cluster.urls)
        await connection.nats.force_reconnect()
        await diary.until("back")
        assert await connection.api.request("INFO")
        assert first in known
        assert diary.all("lost") == ["a reconnect was asked for"]


async def test_a_server_that_became_too_old_is_told_and_tried_again() -> None:
    """A node that was downgraded must not end the connection for good: another may be fine."""
    diary = Diary()
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            connection.observe(diary.hooks)
            server.kill()
            await diary.until("lost")

            async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b'INFO {"server_id":"X","version":"2.9.0","max_payload":1024}\r\n')
                await reader.read()
                writer.close()

            fake = await asyncio.start_server(old, "127.0.0.1", server.port, reuse_address=True)
            async with fake:
                await diary.until(ServerTooOld)
            await asyncio.to_thread(server.restart)
            await diary.until("back")
            assert await connection.api.request("INFO")


async def test_refused_credentials_end_a_lost_connection() -> None:
    diary = Diary()
    with NatsServer.start(extra_config="authorization { user: a, password: old }") as server:
        connection = await keylane.connect(server.url, user="a", password="old")  # noqa: S106
        async with connection:
            connection.observe(diary.hooks)
            config = server.store_dir / "server.conf"
            config.write_text(config.read_text().replace("password: old", "password: new"))
            signal_server(server.pid, signal.SIGHUP)
            async with asyncio.timeout(20):
                reason = await connection.wait_closed()
            assert "refused the login on a reconnect (Authorization Violation)" in reason
            assert diary.all("closed") == [reason]
            assert any(isinstance(error, AuthenticationFailed) for error in diary.all("error"))
            assert connection.is_closed
            assert reason in repr(connection)
            started = time.monotonic()
            with pytest.raises(Disconnected, match="Authorization Violation"):
                await connection.api.request("INFO")
            with pytest.raises(Disconnected, match="Authorization Violation"):
                await connection.flush()
            assert time.monotonic() - started < 4


async def test_refusals_count_only_in_a_row(nats_server: NatsServer) -> None:
    refusal = nats.errors.Error("nats: 'Authorization Violation'")
    async with await keylane.connect(nats_server.url) as connection:
        for _ in range(REFUSALS_PER_SERVER + 1):
            connection.saw_error(refusal)
            connection.saw_return()
        await connection.flush()
        assert not connection.is_closed
        for _ in range(REFUSALS_PER_SERVER):
            connection.saw_error(refusal)
        async with asyncio.timeout(20):
            await connection.wait_closed()


async def test_a_link_lost_in_the_midst_of_a_reconnect(nats_server: NatsServer) -> None:
    """The second loss starts a second reconnect while the first still runs: they must not meet."""
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
    links: list[asyncio.StreamWriter] = []
    diary = Diary()

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        links.append(writer)
        from_server, to_server = await asyncio.open_connection("127.0.0.1", nats_server.port)
        if len(links) == 1:
            await asyncio.wait(
                {
                    asyncio.ensure_future(pump(reader, to_server)),
                    asyncio.ensure_future(pump(from_server, writer)),
                },
                return_when=asyncio.FIRST_COMPLETED,
            )
        else:
            front.close()  # nothing listens for the reconnects that follow
            writer.write(await from_server.readuntil(b"\r\n"))
            to_server.write(await reader.readuntil(b"PING\r\n"))
            writer.write(await from_server.readuntil(b"PONG\r\n"))
            # The login is done. The next PING ends the reconnect; the link dies instead.
            await reader.readuntil(b"PING\r\n")
        to_server.close()
        writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as front:
        connection = await keylane.connect(f"nats://127.0.0.1:{front.sockets[0].getsockname()[1]}")
        connection.observe(diary.hooks)
        links[0].close()
        await diary.until("lost", 2)
        await diary.until("error")
        await connection.close()
    gc.collect()
    assert complaints == []
    assert {type(error) for error in diary.all("error")} == {ServerUnreachable}
    assert connection.closed_reason == "closed by the program"


@pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")  # nats-py's
async def test_a_websocket_and_its_return(free_port: int) -> None:
    pytest.importorskip("aiohttp", reason="websocket connections need aiohttp")
    diary = Diary()
    with NatsServer.start(extra_config=f'websocket {{ host: "127.0.0.1", port: {free_port}, no_tls: true }}') as server:
        async with await keylane.connect(f"ws://127.0.0.1:{free_port}") as connection:
            connection.observe(diary.hooks)
            assert await connection.api.request("INFO")
            await asyncio.to_thread(server.restart)
            await diary.until("back")
            assert await connection.api.request("INFO")


# ---- hooks ----------------------------------------------------------------------------------------------


async def test_a_hook_that_fails_harms_nothing(nats_server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    diary = Diary()

    def broken(server: str) -> None:
        raise RuntimeError(f"cannot bear {server}")

    async with await keylane.connect(nats_server.url, hooks=ConnectionHooks(on_reconnect=broken)) as connection:
        connection.observe(diary.hooks)
        await connection.nats.force_reconnect()
        await diary.until("back")
        assert await connection.api.request("INFO")
    assert "cannot bear" in caplog.text


async def test_hooks_can_be_taken_away(nats_server: NatsServer) -> None:
    kept, dropped = Diary(), Diary()
    async with await keylane.connect(nats_server.url) as connection:
        connection.observe(kept.hooks)
        connection.observe(dropped.hooks)()
    assert kept.all("closed") == ["closed by the program"]
    assert dropped.entries == []


# ---- the end ----------------------------------------------------------------------------------------------


async def test_close_can_be_repeated_and_gives_the_reason(nats_server: NatsServer) -> None:
    connection = await keylane.connect(nats_server.url)
    assert connection.closed_reason is None
    await connection.close()
    await connection.close()
    await connection.drain()
    assert await connection.wait_closed() == "closed by the program"
    with pytest.raises(Disconnected, match="was not asked: the connection is closed"):
        await connection.api.request("INFO")


async def test_close_sends_what_is_still_to_be_sent(nats_server: NatsServer) -> None:
    async with await keylane.connect(nats_server.url) as other:
        arrivals = await other.nats.subscribe("last.words")
        await other.flush()
        connection = await keylane.connect(nats_server.url)
        connection.nats.post(b"PUB last.words 2\r\nhi\r\n")
        await connection.close()
        assert (await arrivals.next_msg(timeout=5)).data == b"hi"


async def test_close_without_a_link_tells_what_was_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    diary = Diary()
    with NatsServer.start() as server:
        connection = await keylane.connect(server.url)
        connection.observe(diary.hooks)
        server.kill()
        await diary.until("lost")
        await connection.nats.publish("x", b"hello")
        await connection.close()
    assert re.search(r"is closed while it is down: 1\d bytes were not sent", caplog.text)
    assert "connection lost" not in str(diary.all("error"))


async def test_close_on_a_link_that_has_just_died(nats_server: NatsServer) -> None:
    diary = Diary()
    connection = await keylane.connect(nats_server.url)
    connection.observe(diary.hooks)
    await connection.nats.subscribe("x")
    await connection.flush()
    assert isinstance(connection.nats, LoginClient)
    connection.nats.abort()
    await connection.nats._send_command(b"PUB x 0\r\n\r\n")  # waits for a flush that comes with the close
    await connection.close()
    assert diary.all("closed") == ["closed by the program"]
    assert [str(error) for error in diary.all("error")] == ["the link failed (connection lost)"]


async def test_close_ends_requests_that_wait(nats_server: NatsServer) -> None:
    connection = await keylane.connect(nats_server.url)
    await connection.nats.subscribe("$JS.API.NOBODY.HOME")
    asked = asyncio.ensure_future(connection.api.request("NOBODY.HOME", timeout_s=30))
    await connection.nats.flush()
    await connection.close()
    with pytest.raises(Disconnected, match="the connection is closed"):
        await asked


async def test_close_while_reconnecting_is_quick() -> None:
    diary = Diary()
    with NatsServer.start() as server:
        connection = await keylane.connect(server.url)
        connection.observe(diary.hooks)
        server.kill()
        await diary.until("error")
        started = time.monotonic()
        await connection.close()
        assert time.monotonic() - started < 4
        assert connection.closed_reason == "closed by the program"


async def test_close_has_a_deadline() -> None:
    with NatsServer.start() as server:
        connection = await keylane.connect(server.url)
        signal_server(server.pid, signal.SIGSTOP)
        try:
            chunk = bytes(512 * 1024)
            connection.nats.post(b"PUB x %d\r\n%b\r\n" % (len(chunk), chunk) * 32)
            connection.nats.push()
            started = time.monotonic()
            await connection.close(timeout_s=0.3)
            assert time.monotonic() - started < 4
        finally:
            signal_server(server.pid, signal.SIGCONT)
        assert connection.is_closed


async def test_drain_lets_messages_be_handled(nats_server: NatsServer) -> None:
    handled: list[bytes] = []

    async def slowly(message: object) -> None:
        await asyncio.sleep(0.01)
        handled.append(message.data)  # type: ignore[attr-defined]

    connection = await keylane.connect(nats_server.url)
    await connection.nats.subscribe("drained", cb=slowly)
    for number in range(10):
        await connection.nats.publish("drained", b"%d" % number)
    await connection.nats.flush()
    await connection.drain()
    assert handled == [b"%d" % number for number in range(10)]
    assert connection.closed_reason == "drained and closed by the program"


async def test_drain_has_a_deadline(nats_server: NatsServer) -> None:
    async def stuck(message: object) -> None:
        await asyncio.sleep(60)

    connection = await keylane.connect(nats_server.url)
    await connection.nats.subscribe("stuck", cb=stuck)
    await connection.nats.publish("stuck", b"")
    await connection.nats.flush()
    with pytest.raises(RequestTimeout, match=r"took longer than 0\.2 s"):
        await connection.drain(timeout_s=0.2)
    assert connection.is_closed


async def test_deadlines_are_checked(nats_server: NatsServer) -> None:
    async with await keylane.connect(nats_server.url) as connection:
        for wait in (connection.close, connection.drain, connection.flush):
            with pytest.raises(InvalidInput, match="timeout_s"):
                await wait(timeout_s=0)
        await connection.flush()


# ---- facts ------------------------------------------------------------------------------------------------


async def test_facts_about_the_server(nats_server: NatsServer) -> None:
    async with await keylane.connect(nats_server.url, name="facts") as connection:
        assert connection.server_version == nats_server.version
        assert connection.supports("consumer_reset")
        connection.require("consumer_reset")
        assert nats_server.url in repr(connection)
        names = [each.get("name") for each in nats_server.monitor("connz")["connections"]]
        assert "facts" in names


async def test_a_missing_feature_is_named(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await keylane.connect(nats_server.url) as connection:
        monkeypatch.setitem(connection.nats._server_info, "version", "2.11.3")
        assert not connection.supports("consumer_reset")
        with pytest.raises(ServerTooOld, match=r"consumer reset needs nats-server 2\.14\.0 .* runs 2\.11\.3"):
            connection.require("consumer_reset")


def test_the_package_alone_does_not_load_the_client() -> None:
    script = (
        "import sys, keylane; assert 'nats' not in sys.modules; "
        "assert 'connect' in dir(keylane); keylane.connect; assert 'nats' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_an_unknown_name_in_the_package() -> None:
    with pytest.raises(AttributeError, match="teleport"):
        keylane.teleport  # type: ignore[attr-defined]  # noqa: B018


def signal_server(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
