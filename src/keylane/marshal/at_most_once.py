"""At most once: take a batch of messages in the log first, and work on it only when the log says that it is ours.

Owns: the order of these steps for one tenure. One batch is taken at a time, so a consumer that dies loses one batch at
most. Nothing is tried again: a message whose handler failed is over.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from keylane.marshal.crew import Crew
from keylane.marshal.reading import batches
from keylane.marshal.source import Source, SourceRecord
from keylane.marshal.tenure import Tenure
from keylane.marshal.trouble import Patience

_log = logging.getLogger("keylane.marshal")


class AtMostOnce:
    """How far one partition is taken, and the reading of it."""

    retries = False

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.read_to = offset
        self._open: set[int] = set()
        self._taking = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<taken to {self.offset}, {self.at_work} at work>"

    @property
    def at_work(self) -> int:
        return len(self._open)

    def finish(self, offset: int) -> None:
        self._open.discard(offset)

    async def run(
        self, tenure: Tenure, source: Source, crew: Crew, patience: Patience, *, batch_size: int, max_in_flight: int
    ) -> None:
        """Take, confirm, work; until the tenure is over or the partition is lost."""

        async def room() -> int:
            await tenure.fewer_than(1)
            return min(batch_size, max_in_flight)

        async with aclosing(batches(source, tenure.where, self.offset, room, patience)) as found:
            async for records in found:
                async with self._taking:
                    if tenure.is_over or tenure.asked is not None or not await self._take(tenure, records):
                        return
                    crew.offer(tenure, records)

    async def stop(self, running: asyncio.Task[None], tenure: Tenure, grace_s: float) -> None:
        """Take nothing more. What is taken is handled first: nobody else will."""
        try:
            async with asyncio.timeout(grace_s):
                async with self._taking:
                    running.cancel()
                await tenure.fewer_than(1)
        except TimeoutError:
            _log.error(
                "%s/%d: %d messages that were taken are lost: they were not handled within %g s",
                *tenure.where,
                self.at_work,
                grace_s,
            )
        finally:
            running.cancel()

    async def _take(self, tenure: Tenure, records: list[SourceRecord]) -> bool:
        """Make a batch ours; False: the partition is lost."""
        self.read_to = records[-1].offset + 1
        if not await tenure.take(self.read_to):
            return False
        self.offset = self.read_to  # from here on the batch is nobody else's, whatever comes
        if not await tenure.heartbeat():
            return False
        self._open.update(record.offset for record in records)
        return True
