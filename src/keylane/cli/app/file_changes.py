"""Watches the Python files of a directory. Looks at their times: no file system tells all its changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

_LOOK_EVERY_S = 0.3
_LEFT_OUT = ("__pycache__", "node_modules", "site-packages")


@asynccontextmanager
async def calls_on_changes(directory: Path, changed: Callable[[Path], None]) -> AsyncIterator[None]:
    """Call `changed` with the first file of each change, while the block runs."""
    watching = asyncio.create_task(_watch(directory, changed))
    try:
        yield
    finally:
        watching.cancel()


async def _watch(directory: Path, changed: Callable[[Path], None]) -> None:
    before = await asyncio.to_thread(file_times, directory)
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        now = await asyncio.to_thread(file_times, directory)
        if different := sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path)):
            changed(different[0])
        before = now


def file_times(directory: Path) -> dict[Path, tuple[int, int]]:
    """Time and size of every Python file below the directory, without hidden directories."""
    found = {}
    for where, directories, files in os.walk(directory):
        directories[:] = [one for one in directories if not one.startswith(".") and one not in _LEFT_OUT]
        for name in files:
            if name.endswith(".py"):
                path = Path(where, name)
                try:
                    facts = path.stat()
                except OSError:  # deleted a moment ago
                    continue
                found[path] = facts.st_mtime_ns, facts.st_size
    return found
