"""The two delivery modes: how a consumer reads one owned partition, and how far it says that it is done.

Owns: the offsets of one owned partition, and the allowance that all partitions of a consumer share at most once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING

from keylane.core.partition_offsets import Prefix
from keylane.marshal.partition_claim import MARGIN

if TYPE_CHECKING:
    from keylane.marshal.owned_partition import OwnedPartition
    from keylane.marshal.source import SourceRecord


class AtLeastOnce:
    """Handle messages first, and let the heartbeats say up to which offset everything is done.

    Messages may be done in any order; a heartbeat names the first that is not. The next owner begins there, so messages
    done since the last heartbeat are handled again.
    """

    retries = True
    hold = 1.0
    """Intervals after a heartbeat in which handlers may start. So an owner that dies has started at most one interval
    of messages that no heartbeat reported."""

    def __init__(self, offset: int) -> None:
        self._prefix = Prefix(offset)
        self.read_to = offset

    def __repr__(self) -> str:
        return repr(self._prefix)

    @property
    def offset(self) -> int:
        """The next message to read, for whoever owns the partition next."""
        return self._prefix.offset

    @property
    def in_flight(self) -> int:
        """How many messages were read and are not done."""
        return self._prefix.at_work

    def finish(self, offset: int) -> None:
        self._prefix.finish(offset)

    async def run(self, owned: OwnedPartition) -> None:
        """Read and dispatch until the partition is over."""
        options = owned.options

        async def limit() -> int:
            await owned.fewer_than(options.max_in_flight)
            return min(options.batch_size, max(options.max_in_flight - self.in_flight, 1))

        async with aclosing(owned.batches(self.read_to, limit)) as batches:
            async for records in batches:
                if owned.is_over:
                    return
                for record in records:
                    self._prefix.start(record.offset)
                self.read_to = records[-1].offset + 1
                owned.dispatch(records)

    async def stop(self, running: asyncio.Task[None], owned: OwnedPartition) -> None:
        """Read nothing more. Messages that have not started are left to the next owner."""
        running.cancel()

    def close(self) -> None:
        """Nothing is shared with other partitions."""


_log = logging.getLogger("keylane.marshal")

_PARTS = 4
_MOMENT_S = 0.02


class BatchAllowance:
    """How many messages a consumer may have taken and not done, over all its partitions. First come, first served.

    No partition gets more than a share, so that one whose handlers hang leaves something to the others. A partition
    that cannot have all it wants gets what is left a moment later: what is given back meanwhile adds up, so batches do
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
        return f"<BatchAllowance {self._left} of {self.most} left, {len(self._waiting)} wait>"

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
    """Take a batch of messages in the log first, and handle it only when the log says that it is ours.

    At most one batch is taken and not done in the whole consumer, so a consumer that dies loses one batch at most.
    Nothing is retried: a message whose handler failed is done.
    """

    retries = False
    hold = 2 - MARGIN

    def __init__(self, offset: int, allowance: BatchAllowance) -> None:
        self.offset = offset
        self.read_to = offset
        self._allowance = allowance
        self._open: set[int] = set()
        self._taking = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<taken to {self.offset}, {self.in_flight} in flight>"

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def finish(self, offset: int) -> None:
        if offset in self._open:
            self._open.remove(offset)
            self._allowance.give_back(1)

    def close(self) -> None:
        """Messages that are not done now never will be: they no longer count against the allowance."""
        count = len(self._open)
        self._open.clear()
        self._allowance.give_back(count)

    async def run(self, owned: OwnedPartition) -> None:
        """Confirm the claim, fetch, take, confirm, dispatch; until the partition is over or lost."""
        options = owned.options

        async def limit() -> int:
            await owned.fewer_than(1)
            return min(options.batch_size, options.max_in_flight) if await owned.is_still_ours() else 0

        self._allowance.sharing += 1
        try:
            async with aclosing(owned.batches(self.offset, limit)) as batches:
                async for records in batches:
                    if not await self._take_all(owned, records):
                        return
        finally:
            self._allowance.sharing -= 1

    async def stop(self, running: asyncio.Task[None], owned: OwnedPartition) -> None:
        """Take nothing more. Messages that are taken are handled first: nobody else gets them."""
        grace_s = owned.options.grace_s
        try:
            async with asyncio.timeout(grace_s):
                async with self._taking:
                    running.cancel()
                await owned.fewer_than(1)
        except TimeoutError:
            _log.error(
                "%s/%d: %d messages that were taken are lost: they were not handled within %g s",
                *owned.where,
                self.in_flight,
                grace_s,
            )
        finally:
            running.cancel()

    async def _take_all(self, owned: OwnedPartition, records: list[SourceRecord]) -> bool:
        """One batch after the other, each when the one before is done. False: take no more here."""
        while records:
            await owned.fewer_than(1)
            taken = await self._take_some(owned, records)
            if not taken:
                return False
            records = records[taken:]
        return True

    async def _take_some(self, owned: OwnedPartition, records: list[SourceRecord]) -> int:
        """Take and dispatch as many as are allowed; returns how many. 0: the partition is lost or being given up."""
        allowed = unused = await self._allowance.take(len(records))
        try:
            async with self._taking:
                some = records[:allowed]
                if owned.is_over or owned.end_request is not None or not await self._take(owned, some):
                    return 0
                unused = 0
                owned.dispatch(some)
                return allowed
        finally:
            self._allowance.give_back(unused)

    async def _take(self, owned: OwnedPartition, records: list[SourceRecord]) -> bool:
        """Make a batch ours; False: the partition is lost."""
        self.read_to = records[-1].offset + 1
        if not await owned.take(self.read_to):
            return False
        self.offset = self.read_to  # from here on nobody else gets the batch, whatever happens
        if not await owned.heartbeat():
            return False
        self._open.update(record.offset for record in records)
        return True
