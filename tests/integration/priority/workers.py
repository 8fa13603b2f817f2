"""The test's side of a worker process: its evidence as it comes, and signals to it."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.integration.priority.evidence import Line


@dataclass(slots=True)
class Worker:
    """One process started by this test, and the lines that it wrote."""

    name: str
    process: asyncio.subprocess.Process
    events: list[dict[str, Any]] = field(default_factory=list)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, command: list[str], job: dict[str, Any]) -> Worker:
        """Run the command with the job as its argument, and wait until it reads."""
        process = await asyncio.create_subprocess_exec(*command, json.dumps(job), stdout=asyncio.subprocess.PIPE)
        worker = cls(job["name"], process)
        worker._reading = asyncio.create_task(worker._read())
        try:
            await worker.saw("ready")
        except BaseException:
            await worker.end()
            raise
        return worker

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.events.append(json.loads(line))
            async with self._changed:
                self._changed.notify_all()

    async def saw(
        self,
        what: str,
        *,
        since: int = 0,
        where: Callable[[dict[str, Any]], bool] = lambda _: True,
        timeout_s: float = 40.0,
    ) -> dict[str, Any]:
        """Wait for the first event of this kind, from event number `since` on."""

        def found() -> dict[str, Any] | None:
            return next((one for one in self.events[since:] if one["what"] == what and where(one)), None)

        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(found)
            event = found()
        assert event is not None
        return event

    @property
    def log(self) -> list[Line]:
        return [Line(one["at"], self.name, one["sequence"]) for one in self.events if one["what"] == "start"]

    def kill(self) -> None:
        self.process.kill()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        if self._reading is not None:
            await self._reading
