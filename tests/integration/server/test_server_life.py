"""One embedded server: data over restarts and kills, the lock on its store, bad options, a failed start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from keylane.core.run_state import RunState
from keylane.errors import InvalidInput, ServerStartFailed, ServerUnreachable, StoreInUse
from keylane.server import NatsServer

ENOUGH = 600


async def quiet(error: Exception) -> None:
    """The kill tests break the link on purpose: nothing to log."""


async def client(server: NatsServer, **options: Any) -> Client:
    return await nats.connect(server.url, error_cb=quiet, **options)


async def publish(server: NatsServer, stream: str, count: int) -> None:
    connection = await client(server)
    jetstream = connection.jetstream()
    await jetstream.add_stream(name=stream, subjects=[f"{stream}.>"])
    for number in range(count):
        await jetstream.publish(f"{stream}.{number}", b"%d" % number)
    await connection.close()


async def stored(server: NatsServer, stream: str) -> int:
    connection = await client(server)
    info = await connection.jetstream().stream_info(stream)
    await connection.close()
    return info.state.messages


async def test_data_and_port_survive_a_restart(tmp_path: Path, unique: Callable[..., str]) -> None:
    stream = unique("S")
    with NatsServer.start(store_dir=tmp_path) as server:
        port, first_pid = server.port, server.pid
        await publish(server, stream, 10)
        server.restart()
        assert server.port == port
        assert server.pid != first_pid
        assert await stored(server, stream) == 10


async def test_data_survives_stop_and_a_new_server(tmp_path: Path, unique: Callable[..., str]) -> None:
    stream = unique("S")
    store_dir = tmp_path / 'with spaces, "quotes" and é'
    with NatsServer.start(store_dir=store_dir) as server:
        await publish(server, stream, 10)
    assert server.state is RunState.ENDED
    with NatsServer.start(store_dir=store_dir) as server:
        assert await stored(server, stream) == 10


async def test_sigkill_keeps_every_acknowledged_message(tmp_path: Path, unique: Callable[..., str]) -> None:
    """Publishes run while the server is killed; whatever was acknowledged must be there after the restart."""
    stream = unique("S")
    with NatsServer.start(store_dir=tmp_path) as server:
        connection = await client(server, allow_reconnect=False)
        jetstream = connection.jetstream(timeout=5)
        await jetstream.add_stream(name=stream, subjects=[stream])
        acknowledged: dict[int, bytes] = {}
        enough = asyncio.Event()

        async def publisher(lane: int) -> None:
            number = 0
            while True:
                payload = b"%d-%d" % (lane, number)
                ack = await jetstream.publish(stream, payload)
                acknowledged[ack.seq] = payload
                number += 1
                if len(acknowledged) >= ENOUGH:
                    enough.set()

        publishers = [asyncio.create_task(publisher(lane)) for lane in range(20)]
        await asyncio.wait_for(enough.wait(), 40)
        server.kill()
        outcomes = await asyncio.gather(*publishers, return_exceptions=True)
        assert all(isinstance(outcome, NatsError) for outcome in outcomes)
        await connection.close()

        server.restart()
        connection = await client(server)
        subscription = await connection.jetstream().subscribe(stream, ordered_consumer=True)
        found: dict[int, bytes] = {}
        while len(found) < ENOUGH or max(acknowledged) not in found:
            message = await subscription.next_msg(timeout=5)
            found[message.metadata.sequence.stream] = message.data
        assert {seq: found.get(seq) for seq in acknowledged} == acknowledged
        await connection.close()


def test_kill_is_a_real_sigkill_of_the_server_itself() -> None:
    with NatsServer.start() as server:
        assert server.monitor("varz")["server_name"] == "keylane"
        assert Path(f"/proc/{server.pid}/comm").read_text().strip() == "nats-server"
        server.kill()
        assert server.state is RunState.ENDED
        with pytest.raises(ServerUnreachable, match="not running"):
            server.monitor("varz")
        assert "Initiating Shutdown" not in server.log_path.read_text()
        server.restart()
        assert server.monitor("healthz") == {"status": "ok"}


def test_stop_is_clean_and_safe_to_repeat(tmp_path: Path) -> None:
    server = NatsServer.start(store_dir=tmp_path)
    server.stop()
    server.stop()
    assert "Server Exiting" in server.log_path.read_text()
    with pytest.raises(InvalidInput, match="stopped for good"):
        server.restart()


def test_a_temporary_store_is_removed_at_stop_and_kept_by_kill() -> None:
    server = NatsServer.start()
    server.kill()
    assert server.store_dir.is_dir()
    server.stop()
    assert not server.store_dir.exists()


def test_listens_on_loopback_only() -> None:
    with NatsServer.start() as server:
        page = server.monitor("varz")
        assert (page["host"], page["http_host"]) == ("127.0.0.1", "127.0.0.1")
        listening = [
            line.split()[1]
            for line in Path(f"/proc/{server.pid}/net/tcp").read_text().splitlines()[1:]
            if line.split()[3] == "0A" and int(line.split()[1].split(":")[1], 16) == server.port
        ]
        assert listening == [f"0100007F:{server.port:04X}"]


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ("1s", (10**9, False)),
        ("250ms", (250 * 10**6, False)),
        ("1m30s", (90 * 10**9, False)),
        ("always", (None, True)),
    ],
)
def test_sync_reaches_the_server(sync: str, expected: tuple[int | None, bool]) -> None:
    interval_ns, always = expected
    with NatsServer.start(sync=sync) as server:
        config = server.monitor("jsz")["config"]
        assert config.get("sync_always", False) is always
        if interval_ns is not None:
            assert config["sync_interval"] == interval_ns


# ---- one store, one server ------------------------------------------------------------------------------


def test_a_store_in_use_is_refused_with_the_pid(tmp_path: Path) -> None:
    with NatsServer.start(store_dir=tmp_path) as server:
        config = (tmp_path / "server.conf").read_text()
        with pytest.raises(StoreInUse, match=f"pid {server.pid}"):
            NatsServer.start(store_dir=tmp_path)
        assert server.state is RunState.RUNNING
        assert (tmp_path / "server.conf").read_text() == config
        server.kill()
        with NatsServer.start(store_dir=tmp_path) as other:
            assert other.state is RunState.RUNNING


def test_a_refused_start_gives_its_port_back(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with NatsServer.start(store_dir=tmp_path):
        with pytest.raises(StoreInUse):
            NatsServer.start(store_dir=tmp_path, port=port)
        with socket.socket() as plain:
            plain.bind(("127.0.0.1", port))


# ---- ports ------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServerStartFailed, match=f"port {port} .*in use"):
            NatsServer.start(port=port)
    with NatsServer.start(port=port) as server:
        assert server.url == f"nats://127.0.0.1:{port}"


def test_the_port_stays_reserved_while_the_server_is_down() -> None:
    with NatsServer.start() as server:
        server.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", server.port))


# ---- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["", "1", "0s", "0ms", "-1s", "1 s", "1d", "Always", "s", "1s;", "1s\n", None, 1])
def test_bad_sync_is_refused(sync: Any) -> None:
    with pytest.raises(InvalidInput, match="neither 'always' nor a duration"):
        NatsServer.start(sync=sync)


@pytest.mark.parametrize("port", [0, -1, 65536, "4222", True, 1.5])
def test_bad_port_is_refused(port: Any) -> None:
    with pytest.raises(InvalidInput, match="1 to 65535"):
        NatsServer.start(port=port)


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(InvalidInput, match="cannot be made"):
        NatsServer.start(store_dir=taken)
    with pytest.raises(InvalidInput, match="cannot be made"):
        NatsServer.start(store_dir=taken / "below")


def test_a_store_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(InvalidInput, match="cannot be written"):
        NatsServer.start(store_dir=Path("/proc/self"))


def test_an_unknown_monitoring_page_is_refused(nats_server: NatsServer) -> None:
    with pytest.raises(InvalidInput, match="not a monitoring page"):
        nats_server.monitor("nonsense")


# ---- a start that fails -------------------------------------------------------------------------------


def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(ServerStartFailed, match=r"(?s)ended with code 1.*server\.log.*Parse error"):
        NatsServer.start(store_dir=tmp_path, extra_config="nonsense {")
    with NatsServer.start(store_dir=tmp_path) as server:
        assert server.state is RunState.RUNNING


def test_readiness_has_a_deadline(tmp_path: Path) -> None:
    """A stopped process accepts nothing and never exits: only the deadline can end the wait."""
    server = NatsServer.start(store_dir=tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # until every thread of it stands still
    try:
        with pytest.raises(ServerStartFailed, match=r"not up within 0\.2 s"):
            server.wait_up(0.2)
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.stop()


async def test_what_the_server_writes_is_for_its_user_alone(tmp_path: Path, unique: Callable[..., str]) -> None:
    """Passwords of users stand in the configuration, and messages in the store."""
    store = tmp_path / "store"
    with NatsServer.start(store_dir=store) as server:
        (store / "server.conf").chmod(0o644)
        (store / "server.log").chmod(0o644)
        await publish(server, unique("S"), 1)
        server.restart()
        found = [store, *store.rglob("*")]
        assert {path.name for path in found} >= {"store", "server.conf", "server.log", "server.lock", "jetstream"}
        assert [str(path) for path in found if path.stat().st_mode & 0o077] == []


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with NatsServer.start(store_dir=tmp_path):
        assert tmp_path.stat().st_mode & 0o777 == 0o755
