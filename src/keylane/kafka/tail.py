"""One partition of a coordination log, read on and on by any number of readers.

Owns: one place in the partition, and the newest records before it. Readers of one log are all near its end; what one
of them fetched the others find here. One that begins further back moves the place, and all go on from there.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable

from confluent_kafka import Message

from keylane.core.claim_facts import LogRecord
from keylane.errors import ReadIncomplete
from keylane.kafka.following import Following

_BATCH = 5000
_KEPT = 2000


class Tail:
    """`follow` begins at an offset; `records` makes records of the log of messages, or raises."""

    def __init__(
        self,
        follow: Callable[[int], Awaitable[Following]],
        records: Callable[[list[Message]], list[LogRecord]],
        timeout_s: float,
    ) -> None:
        self._follow = follow
        self._records = records
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._following: Following | None = None
        self._recent: list[LogRecord] = []
        self._from = 0
        """`_recent` has every record from here to the place."""

    async def next(self, offset: int, end: int) -> tuple[list[LogRecord], int]:
        """Some records from an offset on and before `end`, and where to go on: at `end` when there are no more."""
        async with self._turn:
            following = self._following
            if following is None or not self._from <= offset <= following.position:
                following = await self._begin(offset)
            if offset == following.position:
                await self._fetch(following, end)
            low, high = (bisect_left(self._recent, at, key=_offset) for at in (offset, end))
            found = self._recent[low : min(high, low + _BATCH)]
            is_all = low + len(found) == high and following.position >= end
            return found, end if is_all else found[-1].offset + 1 if found else following.position

    async def stop(self) -> None:
        following, self._following, self._recent = self._following, None, []
        if following is not None:
            await following.stop()

    async def _begin(self, offset: int) -> Following:
        await self.stop()
        self._from = offset
        following = self._following = await self._follow(offset)
        return following

    async def _fetch(self, following: Following, end: int) -> None:
        try:
            messages = await following.take(_BATCH, within_s=self._timeout_s, before=end)
            records = self._records(messages)
        except BaseException:  # what was taken and not kept must be fetched again
            await self.stop()
            raise
        if not messages and following.position < end:
            await self.stop()
            raise ReadIncomplete(
                f"record {following.position} of {end - 1} did not come within {self._timeout_s:g} s; read again"
            )
        if len(self._recent) > _KEPT:
            self._from = self._recent[-_KEPT].offset
            del self._recent[:-_KEPT]
        self._recent += records


def _offset(record: LogRecord) -> int:
    return record.offset
