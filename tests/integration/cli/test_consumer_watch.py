"""`keylane consumer watch` as a process: JSON, plain lines, a terminal, a lost server, and its end."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from nats.js.api import StreamConfig

import keylane
from keylane import Connection, priority
from keylane.jetstream import consumers, streams
from keylane.priority import ConsumerConfig
from keylane.server import NatsServer
from tests.waiter import until

pytestmark = pytest.mark.timeout(240)

DEADLINE_S = 60.0
NEXT_S = 30.0
KEYLANE = [sys.executable, "-c", "from keylane.cli.main import main; main()"]

Watch = Callable[..., AbstractAsyncContextManager[Any]]


def pinned(name: str) -> ConsumerConfig:
    return ConsumerConfig(
        durable_name=name,
        priority_groups=("jobs",),
        priority_policy="pinned_client",
        priority_timeout_s=4,  # a reader that stands still for a moment keeps its pin
    )


def told(**wanted: object) -> Callable[[str], bool]:
    """A JSON line that has these fields."""
    return lambda line: wanted.items() <= json.loads(line).items()


async def test_json_tells_each_change(
    connection: Connection, nats_server: NatsServer, stream: str, keylane_watch: Watch
) -> None:
    await priority.create(connection, stream, pinned("workers"))
    async with keylane_watch(stream, "workers", "--json", "-s", nats_server.url) as watch:
        await watch.until(told(event="state", consumer="workers", pinned_id=None, pending=0))

        async with await priority.consume(connection, stream, "workers") as feed:
            await connection.jetstream.publish(f"{stream}.a", b"x")
            message = await feed.next(NEXT_S)
            assert message is not None
            where = {"stream": stream, "consumer": "workers", "group": "jobs"}
            _, line = await watch.both(
                told(event="pinned", pinned_id=feed.pin_id, **where),
                told(event="state", pinned_id=feed.pin_id, pending=0, ack_pending=1),
            )
            state = await priority.group_state(connection, stream, "workers")
            assert state.pinned_since is not None
            assert json.loads(line)["pinned_since"].startswith(f"{state.pinned_since:%Y-%m-%dT%H:%M:%S}")
            await message.ack_confirmed()
            await watch.until(told(event="state", pinned_id=feed.pin_id, ack_pending=0))

            await priority.unpin(connection, stream, "workers")
            await watch.until(told(event="unpinned", reason="admin", **where))

        doomed = await keylane.connect(nats_server.url)
        reader = await priority.consume(doomed, stream, "workers")
        await connection.jetstream.publish(f"{stream}.a", b"x")
        assert await reader.next(NEXT_S)
        await watch.until(told(event="pinned", pinned_id=reader.pin_id))
        await doomed.close()
        await watch.both(told(event="unpinned", reason="timeout", **where), told(event="state", pinned_id=None))

        await consumers.delete(connection, stream, "workers")
        await watch.until(told(event="gone", stream=stream, consumer="workers"))
        await priority.create(connection, stream, pinned("workers"))
        await watch.until(told(event="state", consumer="workers", pinned_id=None))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.2):  # two looks at least: what did not change is not told again
                await watch.until(lambda _: True)
        done = await watch.end(signal.SIGINT)
        assert (done.returncode, done.stderr) == (0, "")


async def test_plain_lines_of_a_whole_stream(
    connection: Connection, nats_server: NatsServer, stream: str, keylane_watch: Watch
) -> None:
    await priority.create(connection, stream, pinned("workers"))
    await consumers.create(connection, stream, ConsumerConfig(durable_name="plain"))
    async with keylane_watch(stream, "-s", nats_server.url) as watch:
        await watch.until(lambda line: line[8:] == "  plain: pending 0, ack pending 0\n")
        await watch.until(lambda line: line[8:] == "  workers: pinned nobody, pending 0, ack pending 0\n")
        async with await priority.consume(connection, stream, "workers") as feed:
            await connection.jetstream.publish(f"{stream}.a", b"x")
            assert await feed.next(NEXT_S)
            known = rf".{{8}}  workers: pinned {feed.pin_id} for \d+ s, pending 0, ack pending 1\n"
            await watch.both(
                lambda line: line.endswith(f"  workers: pinned {feed.pin_id}\n"),
                lambda line: re.fullmatch(known, line) is not None,
            )
            await priority.unpin(connection, stream, "workers")
            await watch.until(lambda line: "  workers: unpinned, reason admin (" in line)
        await consumers.create(connection, stream, ConsumerConfig(durable_name="late"))
        await watch.until(lambda line: "  late: pending 1, ack pending 0\n" in line)
        await consumers.delete(connection, stream, "late")
        await watch.until(lambda line: line.endswith("  late: deleted\n"))
        done = await watch.end(signal.SIGTERM)
        assert (done.returncode, done.stderr) == (0, "")


# ---- on a terminal ------------------------------------------------------------------------------------


class Terminal:
    """The command on a terminal of 100 x 30: what it wrote, escape sequences and all."""

    def __init__(self, process: subprocess.Popen[bytes], side: int) -> None:
        self.process = process
        self._side = side
        self.raw = b""
        self._seen = 0
        self._over = asyncio.Event()
        asyncio.get_running_loop().add_reader(side, self._read)

    def _read(self) -> None:
        try:
            got = os.read(self._side, 65536)
        except OSError:  # the other side is closed
            got = b""
        if not got:
            asyncio.get_running_loop().remove_reader(self._side)
            self._over.set()
        self.raw += got

    def text(self, start: int = 0) -> str:
        """What was written since `start`, without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw[start:].decode(errors="replace"))

    async def until(self, pattern: str) -> str:
        """What was written since the last call, once the pattern is in it."""
        await until(lambda: self.text(self._seen), lambda text: re.search(pattern, text), DEADLINE_S)
        shown, self._seen = self.text(self._seen), len(self.raw)
        return shown

    async def press_ctrl_c(self) -> int:
        """End the command, and read all that it wrote."""
        os.write(self._side, b"\x03")
        code = await asyncio.to_thread(self.process.wait, DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            await self._over.wait()
        return code


@asynccontextmanager
async def terminal(*arguments: str) -> AsyncIterator[Terminal]:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(  # noqa: ASYNC220 - start_new_session and a controlling terminal need it
        [*KEYLANE, "consumer", "watch", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=dict(os.environ),  # without the COLUMNS and LINES that readline puts behind Python's back
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no threads hold locks here
    )
    os.close(theirs)
    with process:
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            asyncio.get_running_loop().remove_reader(ours)
            os.close(ours)


async def test_a_terminal_shows_a_table_and_a_log(connection: Connection, nats_server: NatsServer, stream: str) -> None:
    await priority.create(connection, stream, pinned("workers"))
    await consumers.create(connection, stream, ConsumerConfig(durable_name="plain"))
    async with (
        await priority.consume(connection, stream, "workers") as feed,
        terminal(stream, "-s", nats_server.url) as screen,
    ):
        # A pull that has just ended is not open until the reader has sent the next: the picture after that has it.
        shown = await screen.until(r"workers +pinned_client +nobody +- +0 +0 +1[\s\S]*none yet")
        assert re.search(r"consumer +policy +pinned +for +pending +ack pending +waiting", shown)
        assert re.search(r"plain +- +- +- +0 +0 +0", shown)
        await connection.jetstream.publish(f"{stream}.a", b"x")
        assert await feed.next(NEXT_S)
        await screen.until(f"workers: pinned {feed.pin_id}")
        await screen.until(rf"workers +pinned_client +{feed.pin_id} +\d+ s +0 +1 ")
        assert await screen.press_ctrl_c() == 0
        assert screen.raw.count(b"\x1b[?1049h") == screen.raw.count(b"\x1b[?1049l") == 1
        after = screen.raw.split(b"\x1b[?1049l")[1]
        assert b"\x1b[?25h" in screen.raw  # the cursor is back
        assert f"workers: pinned {feed.pin_id}".encode() in after  # the last picture stays
        assert b"Ctrl-C" not in after
        assert b"Traceback" not in screen.raw


async def test_it_goes_on_when_the_server_comes_back(keylane_watch: Watch) -> None:
    """One on a terminal and one that prints JSON; Ctrl-C also works while the server is away."""
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            await streams.create(connection, StreamConfig(name="JOBS", subjects=["jobs.>"]))
            await priority.create(connection, "JOBS", pinned("workers"))
        async with (
            terminal("JOBS", "-s", server.url) as screen,
            keylane_watch("JOBS", "workers", "--json", "-s", server.url) as watch,
        ):
            await watch.until(told(event="state", pending=0))
            await screen.until("Ctrl-C ends")
            server.kill()
            await watch.until(told(event="reconnecting"))
            await screen.until(r"reconnecting \(")
            await screen.until("workers")  # what was known stays in sight

            await asyncio.to_thread(server.restart)
            await watch.until(told(event="connected", server=server.url))
            await screen.until(f"connected to {server.url}")
            async with await keylane.connect(server.url) as connection:
                await connection.jetstream.publish("jobs.a", b"x")
                await watch.until(told(event="state", pending=1))
                await consumers.delete(connection, "JOBS", "workers")
                await watch.until(told(event="gone"))
                await screen.until("no consumers")

            server.kill()
            await watch.until(told(event="reconnecting"))
            done = await watch.end(signal.SIGINT)
            assert (done.returncode, done.stderr) == (0, "")
            assert await screen.press_ctrl_c() == 0
            assert b"Traceback" not in screen.raw


async def test_a_login_that_is_refused_later_ends_it(keylane_watch: Watch) -> None:
    def users(password: str) -> str:
        return f'authorization {{ user: "ann", password: "{password}" }}'

    with NatsServer.start(extra_config=users("old")) as server:
        options = ("-s", server.url, "--user", "ann", "--password", "old")
        async with await keylane.connect(server.url, user="ann", password="old") as connection:  # noqa: S106
            await streams.create(connection, StreamConfig(name="JOBS", subjects=["jobs.>"]))
            await priority.create(connection, "JOBS", pinned("workers"))
        async with keylane_watch("JOBS", *options) as watch:
            await watch.until(lambda line: "workers" in line)
            server.stop()
            with NatsServer.start(port=server.port, extra_config=users("new")):
                async with asyncio.timeout(DEADLINE_S):
                    _, stderr = await watch.process.communicate()
            assert watch.process.returncode == 1
            assert stderr.decode().count("\n") == 1
            assert "refused the login" in stderr.decode()
