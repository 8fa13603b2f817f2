"""The test's side of worker processes: what they said, and signals to them."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.exactly_once.rig import Database
from tests.integration.groups.rig import Ground
from tests.waiter import until

ROOT = Path(__file__).parents[3]


@dataclass(slots=True)
class Worker:
    """One process started by this test."""

    process: asyncio.subprocess.Process
    said: list[str] = field(default_factory=list)

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.said.append(line.decode().strip())

    async def says(self, *beginnings: str, deadline_s: float = 30.0) -> None:
        """Wait for a line that begins with one of these."""
        await until(lambda: self.said, lambda said: any(line.startswith(beginnings) for line in said), deadline_s)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def ended(self, deadline_s: float = 30.0) -> int:
        async with asyncio.timeout(deadline_s):
            return await self.process.wait()


@asynccontextmanager
async def worker(ground: Ground, database: Database, who: str, **job: Any) -> AsyncIterator[Worker]:
    """A member `m1` in a process of its own, killed at the end of the block."""
    job = {
        "url": ground.url,
        "stream": ground.stream,
        "member": "m1",
        "database": database.async_url,
        "who": who,
        **job,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "tests" / "peers" / "tether.py"), sys.executable),
        *("-m", "tests.integration.exactly_once.worker", json.dumps(job)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    started = Worker(process)
    reading = asyncio.create_task(started.read())
    try:
        await started.says("joined")
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading
