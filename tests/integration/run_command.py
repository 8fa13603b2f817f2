"""`keylane run` and `keylane fleet run` as a user runs them: the command, its events, and what its handlers wrote."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from keylane.testing import DeliveryVerdict, Effect, judge
from tests.waiter import until


class RunCommand:
    """A running command, whose handlers append `key sequence who` to the file `evidence`."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self.process = process
        self._directory = directory
        self.events: list[dict[str, Any]] = []

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.events.append(json.loads(line))

    def all(self, name: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == name]

    def pids(self) -> dict[int, int]:
        """The newest process of each worker."""
        return {one["worker"]: one["pid"] for one in self.all("started")}

    async def ready(self, count: int) -> None:
        await until(lambda: self.events, lambda _: len(self.all("ready")) >= count)

    async def owned(self, partitions: int, workers: int = 3) -> None:
        """Wait until the workers own all partitions, each some."""
        await until(self.owners, lambda owned: len(owned) == partitions and len(set(owned.values())) == workers)

    def owners(self) -> dict[str, int]:
        newest = {one["worker"]: one["after"] for one in self.all("partitions")}
        return {partition: worker for worker, after in newest.items() for partition in after}

    def effects(self) -> list[Effect]:
        path = self._directory / "evidence"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Effect(key, int(sequence), by) for key, sequence, by in map(str.split, lines)]

    async def handled(self, sequences: list[int]) -> DeliveryVerdict:
        """Wait until each of these was handled, and judge."""
        await until(lambda: judge(sequences, self.effects()).lost, lambda lost: not lost)
        return judge(sequences, self.effects())

    async def end(self) -> int:
        async with asyncio.timeout(30):
            return await self.process.wait()


@asynccontextmanager
async def run_command(directory: Path, *words: str, stderr: int | None = None) -> AsyncIterator[RunCommand]:
    """`keylane` with these words and `--log-json`, killed at the end if it runs still."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "keylane.cli.main", *words, "--log-json"],
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )
    command = RunCommand(process, directory)
    reading = asyncio.create_task(command.read())
    try:
        yield command
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading
