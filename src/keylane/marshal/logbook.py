"""The coordination log as one consumer knows it: reads it to its end, writes into it, and knows how old it is.

Owns: the world of this consumer, and that many tasks who want to know the end at once ask the log once. Never decides
what to write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from keylane.core.claim_facts import Claim, Key, Owner, Verdict
from keylane.core.claim_records import Message, Placing, ReleaseGroup
from keylane.core.claims import World
from keylane.errors import KeylaneError, NotFound, ReadIncomplete, TwoHashes
from keylane.marshal.log import CoordinationLog, Newest, Position, catch_up
from keylane.marshal.trouble import Patience, first_error

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def own_clock() -> float:
    """This machine's seconds since some moment. They also go on while the machine sleeps, where it can tell."""
    return time.clock_gettime(_CLOCK)


class LogBook:
    """A log and the world in it."""

    def __init__(
        self,
        log: CoordinationLog,
        interval_s: float,
        new_patience: Callable[[], Patience],
        *,
        placing: Placing = "topic_partition",
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.log = log
        self.interval_s = interval_s
        self.new_patience = new_patience
        """For somebody who writes: that reading goes well says nothing of it."""
        self._patience = new_patience()
        self.world = World(interval_s, log.partitions, placing=placing, first_offset=log.first_offset)
        self._wall_s = wall_s
        self._locks = [asyncio.Lock() for _ in range(log.partitions)]
        self._begun = [0] * log.partitions
        self._read_by = [0] * log.partitions
        self._news_at = [own_clock()] * log.partitions
        self._older_ms = [0] * log.partitions

    def __repr__(self) -> str:
        return f"<LogBook {self.log!r} {self.world!r}>"

    # ---- reading ------------------------------------------------------------------------------------

    async def read(self, partitions: Iterable[int] | None = None) -> None:
        """Read to the end as it is now: some partitions of the log, or all. Trouble that may pass is waited out."""
        numbers = range(self.world.partitions) if partitions is None else sorted(set(partitions))
        if len(numbers) == 1:
            await self._read_patiently(numbers[0])
            return
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                for number in numbers:
                    tasks.create_task(self._read_patiently(number))

    async def _read_patiently(self, number: int) -> None:
        asked = self._begun[number]
        async with self._locks[number]:
            while self._read_by[number] <= asked:  # else a reading that began after we asked has ended
                self._begun[number] += 1
                try:
                    await self._read(number)
                except NotFound as error:
                    # The log is there, or its bounds would have said so: nobody answers for the moment.
                    await self._patience.after(ReadIncomplete(str(error)))
                except KeylaneError as error:
                    await self._patience.after(error)
                else:
                    self._read_by[number] = self._begun[number]
                    self._patience.worked()

    async def _read(self, number: int) -> None:
        before, is_first = self.world.next_offset(number), self._read_by[number] == 0
        await catch_up(self.log, self.world, number)
        if self.world.misplaced:
            raise self._two_hashes()
        now_ms = self.world.now_ms(number)
        if self.world.next_offset(number) != before:
            self._news_at[number] = own_clock()
            # A log that nobody wrote to for long: by this machine's clock, as a hint when a claim is worth a try.
            self._older_ms[number] = max(int(self._wall_s() * 1000) - now_ms, 0) if is_first and now_ms else 0

    def _two_hashes(self) -> TwoHashes:
        found = self.world.misplaced_evidence[0]
        return TwoHashes(
            f"record {found.at} in partition {found.log_partition} of the coordination log is about "
            f"{found.key.topic}/{found.key.partition} of group {found.key.group!r}, which belongs in partition "
            f"{found.expected}; client {found.writer.client!r} wrote it"
            + (" with the other hash" if found.fits_other_hash else "")
            + ": give every consumer on this log the same placing, and begin with a new log"
        )

    # ---- asking -------------------------------------------------------------------------------------

    def where(self, key: Key) -> int:
        return self.world.where(key.topic, key.partition)

    def claim_of(self, key: Key) -> Claim | None:
        return self.world.claim_of(*key)

    def now_ms(self, key: Key) -> int:
        return self.world.now_ms(self.where(key)) or 0

    def foresee(self, key: Key, claimer: Owner) -> Verdict:
        """What a claim would get now, as far as this machine can tell how long nobody has written."""
        number = self.where(key)
        elapsed_ms = int((own_clock() - self._news_at[number]) * 1000) + self._older_ms[number]
        return self.world.foresee(*key, claimer, elapsed_ms=elapsed_ms)

    # ---- writing ------------------------------------------------------------------------------------

    async def append(self, message: Message, key: Key) -> Position:
        """Write once. A log that compares takes it only if nobody wrote about this key since it was read."""
        assert not isinstance(message, ReleaseGroup), message
        expect = Newest(self.world.newest_of(*key)) if self.log.compares else None
        return await self.log.append(message, self.where(key), expect=expect)
