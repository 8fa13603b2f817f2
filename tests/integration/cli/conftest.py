"""The command as a user runs it: a process of its own, or for what ends at once this process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
from nats.js.api import StreamConfig

from keylane import Connection
from keylane.cli.main import main
from keylane.jetstream import streams

DEADLINE_S = 60.0
KEYLANE = [sys.executable, "-c", "from keylane.cli.main import main; main()"]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def no_nats_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    """Nothing of the machine's own settings, neither here nor in a process that a test starts."""
    for name in [name for name in os.environ if name.startswith("NATS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("TZ", "UTC")


@pytest.fixture
def keylane_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command in this process; a coroutine calls it with `asyncio.to_thread`."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["keylane", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def keylane_run() -> Callable[..., Awaitable[Done]]:
    """Run the command as a process until it ends."""

    async def run(*arguments: str) -> Done:
        process = await asyncio.create_subprocess_exec(
            *KEYLANE, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                stdout, stderr = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return Done(process.returncode, stdout.decode(), stderr.decode())

    return run


class Watching:
    """A running command, read line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[str] = []

    async def until(self, wanted: Callable[[str], bool]) -> str:
        """The next line that is wanted."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := (await self.process.stdout.readline()).decode():
                self.said.append(line.rstrip("\n"))
                if wanted(line):
                    return line
        raise AssertionError(f"it ended and said only:\n{self}")

    async def both(self, one: Callable[[str], bool], other: Callable[[str], bool]) -> tuple[str, str]:
        """The next line that each of the two wants: what was seen and what was heard come in any order."""
        first = await self.until(lambda line: one(line) or other(line))
        if one(first):
            return first, await self.until(other)
        return await self.until(one), first

    async def end(self, number: signal.Signals) -> Done:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE_S):
            stdout, stderr = await self.process.communicate()
        assert self.process.returncode is not None
        return Done(self.process.returncode, stdout.decode(), stderr.decode())

    def __str__(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def keylane_watch() -> Callable[..., AbstractAsyncContextManager[Watching]]:
    @asynccontextmanager
    async def watch(*arguments: str) -> AsyncIterator[Watching]:
        process = await asyncio.create_subprocess_exec(
            *KEYLANE,
            "consumer",
            "watch",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield Watching(process)
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()

    return watch


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    """An empty stream that takes its own name as the first token."""
    name = unique("CLI")
    await streams.create(connection, StreamConfig(name=name, subjects=[f"{name}.>"]))
    yield name
    await streams.delete(connection, name)
