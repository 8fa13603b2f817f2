"""What the two ways to publish rows in batches have in common: how they end when something does not go smoothly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from keylane.spark.sink.row_outlet import Row

ANSWER_S = 5.0


class Interrupted(Exception):
    """A batch ended before its end. `rows` are not known to be stored: publish them by `RowLanes`, in this order."""

    def __init__(self, rows: Sequence[Row], reason: str, *, repeated: bool = False) -> None:
        super().__init__(f"{len(rows)} rows were not confirmed: {reason}")
        self.rows = rows
        self.reason = reason
        self.repeated = repeated
        """Some of them are stored already: an earlier attempt at the task wrote them."""


class News:
    """What is heard of the batch on its way: that something came, or why the batch is over."""

    def __init__(self) -> None:
        self.broken: str | None = None
        self._came = asyncio.Event()

    def came(self) -> None:
        self._came.set()

    def breaks(self, why: str) -> None:
        self.broken = why
        self._came.set()

    async def wait(self) -> str | None:
        """Until something comes; returns why the batch is over, if it is. Silence ends it too."""
        if self.broken is None:
            self._came.clear()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._came.wait()
            except TimeoutError:
                self.broken = f"no answer within {ANSWER_S:g} s"
        return self.broken


class RowBatches(Protocol):
    """Publishes rows in batches. After `Interrupted` it begins a new one."""

    stored: int

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def send(self, rows: Sequence[Row]) -> None:
        """Publish; waits while too much is on its way."""

    async def finish(self) -> None:
        """Wait until all is confirmed."""
