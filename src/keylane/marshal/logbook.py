"""The coordination log as one consumer knows it: reads it to its end, writes into it, and knows how old it is.

Owns: the world of this consumer, and that many tasks who want to know the end at once ask the log once. Never decides
what to write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from keylane.core.balance import GroupView
from keylane.core.claim_facts import Claim, Key, Misplaced, Owner, Verdict
from keylane.core.claim_records import Message, Placing, ReleaseGroup
from keylane.core.claims import World
from keylane.errors import KeylaneError, NotFound, ReadIncomplete, TwoHashes
from keylane.marshal.log import CoordinationLog, Newest, Position, catch_up
from keylane.marshal.trouble import Patience, first_error

_log = logging.getLogger("keylane.marshal")

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
        self._skipped = 0

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
        now_ms = self.world.now_ms(number)
        if self.world.next_offset(number) != before:
            self._news_at[number] = own_clock()
            # A log that nobody wrote to for long: by this machine's clock, as a hint when a claim is worth a try.
            self._older_ms[number] = max(int(self._wall_s() * 1000) - now_ms, 0) if is_first and now_ms else 0
        self._tell_of_skipped()
        if (found := self.world.other_hash(self.elapsed_ms)) is not None:
            raise self._two_hashes(found)

    def _tell_of_skipped(self) -> None:
        """At the first, and whenever there are twice as many: somebody may write such records on and on."""
        skipped = self.world.unreadable + self.world.misplaced
        if skipped < max(2 * self._skipped, 1):
            return
        self._skipped = skipped
        broken = [(one.log_partition, one.at, one.unreadable.reason) for one in self.world.broken]
        strays = [
            (one.log_partition, one.at, f"about {one.key}, which belongs in partition {one.expected}")
            for one in self.world.misplaced_evidence
        ]
        number, at, reason = max(broken + strays, key=lambda one: one[:2])
        _log.warning(
            "%d records of the coordination log are skipped, such as record %d in partition %d: %s",
            skipped,
            at,
            number,
            reason,
        )

    def _two_hashes(self, found: Misplaced) -> TwoHashes:
        return TwoHashes(
            f"record {found.at} in partition {found.log_partition} of the coordination log is about "
            f"{found.key.topic}/{found.key.partition} of group {found.key.group!r}, which belongs in partition "
            f"{found.expected}; client {found.writer.client!r} wrote it"
            f" with the other hash: give every consumer on this log the same placing; what was written so is void two "
            f"intervals ({2 * self.interval_s:g} s) after its writer stopped"
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
        return self.world.foresee(*key, claimer, elapsed_ms=self.elapsed_ms(self.where(key)))

    def elapsed_ms(self, number: int) -> int:
        """How long nobody has written to a partition of the log, as far as this machine can tell."""
        return int((own_clock() - self._news_at[number]) * 1000) + self._older_ms[number]

    def view(self, group: str) -> GroupView:
        """A group's claims, at the log's time as this machine expects it to be."""
        claims = [claim for claim in self.world.claims() if claim.key.group == group]
        times = [(self.world.now_ms(number) or 0) + self.elapsed_ms(number) for number in range(self.world.partitions)]
        return GroupView(claims, times, self.world.interval_ms)

    # ---- writing ------------------------------------------------------------------------------------

    async def append(self, message: Message, key: Key) -> Position:
        """Write once. A log that compares takes it only if nobody wrote about this key since it was read."""
        assert not isinstance(message, ReleaseGroup), message
        number = self.where(key)
        expect = Newest(self.world.newest_of(*key), self.world.next_offset(number)) if self.log.compares else None
        return await self.log.append(message, number, expect=expect)
