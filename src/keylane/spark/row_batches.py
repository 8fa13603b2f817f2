"""What the two ways to publish rows in batches have in common: how they end when something does not go smoothly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from keylane.spark.row_outlet import Row


class Interrupted(Exception):
    """A batch ended before its end. `rows` are not known to be stored: publish them by `RowLanes`, in this order."""

    def __init__(self, rows: Sequence[Row], reason: str, *, repeated: bool = False) -> None:
        super().__init__(f"{len(rows)} rows were not confirmed: {reason}")
        self.rows = rows
        self.reason = reason
        self.repeated = repeated
        """Some of them are stored already: an earlier attempt at the task wrote them."""


class RowBatches(Protocol):
    """Publishes rows in batches. After `Interrupted` it begins a new one."""

    stored: int

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def send(self, rows: Sequence[Row]) -> None:
        """Publish; waits while too much is on its way."""

    async def finish(self) -> None:
        """Wait until all is confirmed."""
