"""`keylane marshal …` as a program, and what it prints as JSON lines."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any


class Command:
    """Runs `keylane marshal` with the same last words every time."""

    def __init__(self, *where: str, deadline_s: float) -> None:
        self._where = where
        self._deadline_s = deadline_s

    async def __call__(self, *words: str) -> tuple[int, str, str]:
        async with self.running(*words) as process:
            async with asyncio.timeout(self._deadline_s):
                out, err = await process.communicate()
            assert process.returncode is not None
            return process.returncode, out.decode(), err.decode()

    async def told(self, *words: str) -> Any:
        code, out, err = await self(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    @asynccontextmanager
    async def running(self, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "keylane.cli.main", "marshal", *words, *self._where),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


async def events(
    process: asyncio.subprocess.Process, until: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """What a command prints as JSON lines, until there is enough."""
    assert process.stdout is not None
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while not until(found):
            line = await process.stdout.readline()
            assert line, f"it ended: {found}"
            found.append(json.loads(line))
    return found


def count(found: list[dict[str, Any]], event: str) -> int:
    return sum(one["event"] == event for one in found)
