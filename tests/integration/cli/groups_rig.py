"""What the tests of `keylane static` and `keylane elastic` stand on: streams, processes, a terminal."""

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
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import BytesIO, StringIO, TextIOWrapper
from typing import Any
from unittest.mock import patch

from keylane import Connection, groups
from keylane.cli.main import main
from keylane.jetstream import StreamConfig, streams
from tests.waiter import until

DEADLINE_S = 60.0
KEYLANE = [sys.executable, "-c", "from keylane.cli.main import main; main()"]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        assert (self.returncode, self.stderr) == (0, ""), self
        return json.loads(self.stdout)

    @property
    def refusal(self) -> str:
        """The one line on stderr of a command that failed."""
        assert (self.returncode, self.stdout) == (1, ""), self
        assert self.stderr.startswith("keylane: "), self
        assert self.stderr.count("\n") == 1, self
        return self.stderr


# ---- streams ------------------------------------------------------------------------------------------


@asynccontextmanager
async def plain_stream(connection: Connection, name: str) -> AsyncIterator[str]:
    """A stream that takes `<name>.>`, and no group of it is left behind."""
    await streams.create(connection, StreamConfig(name=name, subjects=[f"{name}.>"]))
    try:
        yield name
    finally:
        await _clear(connection, name)


@asynccontextmanager
async def parted_stream(connection: Connection, name: str, partitions: int) -> AsyncIterator[str]:
    """A stream that takes `<name>.*` and puts a partition number in front."""
    transform = {"src": f"{name}.*", "dest": f"{{{{Partition({partitions},1)}}}}.{name}.{{{{Wildcard(1)}}}}"}
    await connection.api.request(
        f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.*"], "subject_transform": transform}
    )
    try:
        yield name
    finally:
        await _clear(connection, name)


async def _clear(connection: Connection, stream: str) -> None:
    for one in await groups.list_groups(connection, stream):
        bucket, key = f"{one.kind}-consumer-groups", f"{stream}.{one.group}"
        await connection.api.request(f"STREAM.PURGE.KV_{bucket}", {"filter": f"$KV.{bucket}.{key}"})
    for name in await streams.names(connection):
        if name == stream or name.startswith(f"{stream}-"):
            await streams.delete(connection, name)


async def publish(connection: Connection, stream: str, count: int, keys: int = 10) -> None:
    for number in range(count):
        await connection.jetstream.publish(f"{stream}.k{number % keys}", b"%d" % number)


# ---- processes ----------------------------------------------------------------------------------------


async def run(*arguments: str, stdin: str = "") -> Done:
    """The command as a process, until it ends."""
    process = await asyncio.create_subprocess_exec(
        *KEYLANE,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            stdout, stderr = await process.communicate(stdin.encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return Done(process.returncode, stdout.decode(), stderr.decode())


async def here(*arguments: str, stdin: str = "") -> Done:
    """The same within this process, which is quicker: for commands that end at once. One at a time."""
    return await asyncio.to_thread(_main_here, arguments, stdin)


def _main_here(arguments: tuple[str, ...], stdin: str) -> Done:
    stdout, stderr, code = StringIO(), StringIO(), 0
    with (
        patch.object(sys, "argv", ["keylane", *arguments]),
        patch.object(sys, "stdin", TextIOWrapper(BytesIO(stdin.encode()), encoding="utf-8")),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Done(code, stdout.getvalue(), stderr.getvalue())


class Running:
    """A command that goes on, read line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[Any] = []

    async def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next JSON line that is wanted; all of them are kept in `said`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := (await self.process.stdout.readline()).decode():
                self.said.append(json.loads(line))
                if wanted(self.said[-1]):
                    found: dict[str, Any] = self.said[-1]
                    return found
        raise AssertionError(f"it ended and said only {self.said}")

    async def event(self, name: str) -> dict[str, Any]:
        return await self.until(lambda line: line["event"] == name)

    async def ask_on_stderr(self, ending: bytes) -> bytes:
        """What it wrote on stderr, up to this ending."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.stderr.readuntil(ending)

    async def end(self, *signals: signal.Signals) -> Done:
        """Send signals and wait for the end; what it says until then is added to `said`."""
        for number in signals:
            self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE_S):
            stdout, stderr = await self.process.communicate()
        self.said += [json.loads(line) for line in stdout.decode().splitlines()]
        assert self.process.returncode is not None
        return Done(self.process.returncode, stdout.decode(), stderr.decode())

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [line for line in self.said if line["event"] == "message"]


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(
        *KEYLANE,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


# ---- a terminal ---------------------------------------------------------------------------------------


class Terminal:
    """The command on a terminal of 100 x 30."""

    def __init__(self, process: subprocess.Popen[bytes], side: int) -> None:
        self.process = process
        self._side = side
        self._raw = b""
        self._ended = False
        self._seen = 0
        asyncio.get_running_loop().add_reader(side, self._read)

    def _read(self) -> None:
        try:
            got = os.read(self._side, 65536)
        except OSError:  # the other side is closed: the command has ended
            got = b""
        if not got:
            self._ended = True
            asyncio.get_running_loop().remove_reader(self._side)
        self._raw += got

    def text(self, start: int = 0) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x07", "", self._raw[start:].decode(errors="replace"))

    async def until(self, pattern: str) -> str:
        """What was written since the last call, once the pattern is in it."""
        await until(lambda: self.text(self._seen), lambda text: re.search(pattern, text) or self._ended, DEADLINE_S)
        assert re.search(pattern, self.text(self._seen)), "it ended"
        shown, self._seen = self.text(self._seen), len(self._raw)
        return shown

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    async def interrupt(self, pattern: str) -> str:
        """Ctrl-C until the pattern is there: Python's readline overlooks one that comes just before it waits."""
        again = asyncio.get_running_loop().create_task(self._keep_interrupting())
        try:
            return await self.until(pattern)
        finally:
            again.cancel()

    async def _keep_interrupting(self) -> None:
        while True:
            self.type("\x03")
            await asyncio.sleep(2)

    async def end(self) -> int:
        return await asyncio.to_thread(self.process.wait, DEADLINE_S)


@asynccontextmanager
async def terminal(*arguments: str) -> AsyncIterator[Terminal]:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(  # noqa: ASYNC220 - start_new_session and a controlling terminal need it
        [*KEYLANE, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
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
