"""The coordination log as one participant sees it: `ClientIdentity` makes its records, `LogView` reads and appends.

Owns: the `World` of one consumer, and that tasks which ask for the end of the log at the same time share one read.
Never decides what to write. Every question about claims goes to `LogView.world`; `LogView` itself adds only what
depends on this machine's clock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from keylane.core.claim_balance import GroupView
from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Key, Misplaced, Owner, Verdict
from keylane.core.claim_records import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    Placing,
    ReleaseGroup,
    ReleasingPartition,
    check_id,
)
from keylane.core.world import World
from keylane.errors import KeylaneError, NotFound, ReadIncomplete, TwoHashes
from keylane.marshal.log import CoordinationLog, Newest, Position, catch_up
from keylane.retrying import Backoff

_log = logging.getLogger("keylane.marshal")

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def own_clock() -> float:
    """Seconds on this machine's monotonic clock, which also counts while the machine sleeps where that is possible."""
    return time.clock_gettime(_CLOCK)


def new_instance() -> str:
    """An instance id that no other process has."""
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """The client, instance and group that all records of one consumer or admin carry.

    `wall_s` gives Unix seconds. They are in the records for people who read them; nothing is decided by them.
    """

    client: str
    group: str
    instance: str = field(default_factory=new_instance)
    wall_s: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        check_id(self.client, "client id")
        check_id(self.group, "group id")
        check_id(self.instance, "instance id")

    @property
    def owner(self) -> Owner:
        return Owner(self.client, self.instance)

    def key(self, where: TopicPartition) -> Key:
        return Key(self.group, where.topic, where.partition)

    def claiming(self, where: TopicPartition) -> ClaimingPartition:
        return ClaimingPartition(self.instance, self.client, self.group, *where, self._seconds)

    def heartbeat(self, where: TopicPartition, offset: int) -> Heartbeat:
        return Heartbeat(self.instance, self.client, self.group, *where, offset, self._seconds)

    def releasing(self, where: TopicPartition, offset: int) -> ReleasingPartition:
        return ReleasingPartition(self.instance, self.client, self.group, *where, offset, self._seconds)

    def claiming_messages(self, where: TopicPartition, proposed: int) -> ClaimingMessages:
        return ClaimingMessages(self.instance, self.client, self.group, *where, proposed, self._seconds)

    def release_group(self, expiry_s: int) -> ReleaseGroup:
        return ReleaseGroup(self.instance, self.client, self.group, expiry_s, self._seconds)

    @property
    def _seconds(self) -> int:
        return max(int(self.wall_s()), 0)


class LogView:
    """A log, what one consumer has read of it, and appends on its behalf."""

    def __init__(
        self,
        log: CoordinationLog,
        identity: ClientIdentity,
        interval_s: float,
        new_backoff: Callable[[], Backoff],
        *,
        placing: Placing = "topic_partition",
    ) -> None:
        self.log = log
        self.identity = identity
        self.interval_s = interval_s
        self.new_backoff = new_backoff
        """For a writer: a successful read does not reset the backoff of its appends."""
        self.world = World(interval_s, log.partitions, placing=placing, first_offset=log.first_offset)
        self._backoff = new_backoff()
        self._locks = [asyncio.Lock() for _ in range(log.partitions)]
        self._begun = [0] * log.partitions
        self._read_by = [0] * log.partitions
        self._news_at = [own_clock()] * log.partitions
        self._older_ms = [0] * log.partitions
        self._skipped = 0

    def __repr__(self) -> str:
        return f"<LogView {self.log!r} {self.world!r}>"

    # ---- reading ------------------------------------------------------------------------------------

    async def read(self, partitions: Iterable[int] | None = None) -> None:
        """Read some partitions of the log, or all, to their present end. Transient errors are retried."""
        numbers = range(self.world.partitions) if partitions is None else sorted(set(partitions))
        if len(numbers) == 1:
            await self._read_with_retry(numbers[0])
            return
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                for number in numbers:
                    tasks.create_task(self._read_with_retry(number))

    async def _read_with_retry(self, number: int) -> None:
        asked = self._begun[number]
        async with self._locks[number]:
            while self._read_by[number] <= asked:  # else a read that began after the call has ended
                self._begun[number] += 1
                try:
                    await self._read(number)
                except NotFound as error:
                    # The log exists, or `bounds` would have raised: no server answers at the moment.
                    await self._backoff.after(ReadIncomplete(str(error)))
                except KeylaneError as error:
                    await self._backoff.after(error)
                else:
                    self._read_by[number] = self._begun[number]
                    self._backoff.succeeded()

    async def _read(self, number: int) -> None:
        before, is_first = self.world.next_offset(number), self._read_by[number] == 0
        await catch_up(self.log, self.world, number)
        now_ms = self.world.now_ms(number)
        if self.world.next_offset(number) != before:
            self._news_at[number] = own_clock()
            # Of a log that nobody has written to for long, this machine's wall clock hints when a claim is worth a try.
            older_ms = int(self.identity.wall_s() * 1000) - now_ms if is_first and now_ms else 0
            self._older_ms[number] = max(older_ms, 0)
        self._warn_of_skipped()
        if (found := self.world.other_hash(self.elapsed_ms)) is not None:
            raise self._two_hashes(found)

    def _warn_of_skipped(self) -> None:
        """At the first skipped record, and whenever their number has doubled: a writer may never stop."""
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
            f" with the other hash: give every consumer on this log the same placing; such records become void two "
            f"intervals ({2 * self.interval_s:g} s) after their writer has stopped"
        )

    # ---- time ---------------------------------------------------------------------------------------

    def elapsed_ms(self, number: int) -> int:
        """How long nobody has written to a partition of the log, as far as this machine can tell."""
        return int((own_clock() - self._news_at[number]) * 1000) + self._older_ms[number]

    def expected_ms(self, number: int) -> int:
        """The log's time in one of its partitions, as this machine expects it to be now."""
        return (self.world.now_ms(number) or 0) + self.elapsed_ms(number)

    def foresee(self, where: TopicPartition) -> Verdict:
        """What a claim would get now, as far as this machine can tell.

        A claim that would be unsure is not worth a try: two intervals later it is.
        """
        elapsed_ms = self.elapsed_ms(self.world.where(*where))
        return self.world.foresee(self.identity.group, *where, self.identity.owner, elapsed_ms=elapsed_ms)

    def group_view(self) -> GroupView:
        """The claims of the group, at the log's expected time."""
        claims = [claim for claim in self.world.claims() if claim.key.group == self.identity.group]
        times = [self.expected_ms(number) for number in range(self.world.partitions)]
        return GroupView(claims, times, self.world.interval_ms)

    # ---- writing ------------------------------------------------------------------------------------

    async def append(self, message: Message, key: Key) -> Position:
        """Write once. A log that compares accepts it only if nobody has written about this key since it was read."""
        assert not isinstance(message, ReleaseGroup), message
        number = self.world.where(key.topic, key.partition)
        expect = Newest(self.world.newest_of(*key), self.world.next_offset(number)) if self.log.compares else None
        return await self.log.append(message, number, expect=expect)


@contextmanager
def first_error() -> Iterator[None]:
    """Around a task group: raises its first error instead of a group, so that callers can catch it by its class."""
    try:
        yield
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__ or group
