"""At most once: take a batch of messages in the log first, and work on it only when the log says that it is ours.

Owns: the order of these steps for one tenure, and the allowance that all tenures of a consumer share. No more than one
batch is taken and not done in the whole consumer, so a consumer that dies loses one batch at most. Nothing is tried
again: a message whose handler failed is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing

from keylane.marshal.crew import Crew
from keylane.marshal.reading import batches
from keylane.marshal.source import Source, SourceRecord
from keylane.marshal.tenure import MARGIN, Tenure
from keylane.marshal.trouble import Patience

_log = logging.getLogger("keylane.marshal")

_PARTS = 4
_MOMENT_S = 0.02


class Allowance:
    """How many messages a consumer may have taken and not done, over all its partitions. First come, first served.

    No partition gets more than a part of it, so that one whose handlers hang leaves something to the others. Whoever
    cannot have all that it wants gets what is left a moment later: what is done meanwhile adds up, so that batches do
    not become ever smaller.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.sharing = 0
        """How many partitions want some of it."""
        self._left = most
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        self._moment: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Allowance {self._left} of {self.most} left, {len(self._waiting)} wait>"

    async def take(self, wanted: int) -> int:
        """How many may be taken now, at least one."""
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        part = self.most // max(min(self.sharing, _PARTS), 1)
        self._waiting.append((min(wanted, max(part, 1)), turn))
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(turn.result())
            raise

    def give_back(self, count: int) -> None:
        self._left += count
        self._serve()

    def _serve(self, *, whatever_is_left: bool = False) -> None:
        while self._waiting and self._left:
            wanted, turn = self._waiting[0]
            if not turn.done():
                if wanted > self._left and not whatever_is_left:
                    break
                allowed = min(wanted, self._left)
                self._left -= allowed
                turn.set_result(allowed)
            self._waiting.popleft()
        if self._waiting and self._left and self._moment is None:
            self._moment = asyncio.get_running_loop().call_later(_MOMENT_S, self._serve_the_rest)

    def _serve_the_rest(self) -> None:
        self._moment = None
        self._serve(whatever_is_left=True)


class AtMostOnce:
    """How far one partition is taken, and the reading of it."""

    retries = False
    hold = 2 - MARGIN

    def __init__(self, offset: int, allowance: Allowance) -> None:
        self.offset = offset
        self.read_to = offset
        self._allowance = allowance
        self._open: set[int] = set()
        self._taking = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<taken to {self.offset}, {self.at_work} at work>"

    @property
    def at_work(self) -> int:
        return len(self._open)

    def finish(self, offset: int) -> None:
        if offset in self._open:
            self._open.remove(offset)
            self._allowance.give_back(1)

    def close(self) -> None:
        """The tenure is over: what is not done will not be."""
        count = len(self._open)
        self._open.clear()
        self._allowance.give_back(count)

    async def run(
        self, tenure: Tenure, source: Source, crew: Crew, patience: Patience, *, batch_size: int, max_in_flight: int
    ) -> None:
        """Make sure that it is ours, fetch, take, confirm, work; until the tenure is over or the partition is lost."""

        async def room() -> int:
            await tenure.fewer_than(1)
            return min(batch_size, max_in_flight) if await tenure.is_still_ours() else 0

        self._allowance.sharing += 1
        try:
            async with aclosing(batches(source, tenure.where, self.offset, room, patience)) as found:
                async for records in found:
                    if not await self._take_all(tenure, crew, records):
                        return
        finally:
            self._allowance.sharing -= 1

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

    async def _take_all(self, tenure: Tenure, crew: Crew, records: list[SourceRecord]) -> bool:
        """One batch after the other, each when the one before is done. False: no more are taken here."""
        while records:
            await tenure.fewer_than(1)
            taken = await self._take_some(tenure, crew, records)
            if not taken:
                return False
            records = records[taken:]
        return True

    async def _take_some(self, tenure: Tenure, crew: Crew, records: list[SourceRecord]) -> int:
        """Take and hand out as many as are allowed; how many. 0: the partition is lost, or is to be let go."""
        allowed = unused = await self._allowance.take(len(records))
        try:
            async with self._taking:
                some = records[:allowed]
                if tenure.is_over or tenure.asked is not None or not await self._take(tenure, some):
                    return 0
                unused = 0
                crew.offer(tenure, some)
                return allowed
        finally:
            self._allowance.give_back(unused)

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
