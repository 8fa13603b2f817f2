"""The coordination log as the rest of Marshal sees it, and one in memory for tests.

Owns: what a log must promise, and reading it into a world. Never decides what a record means: `core/claims.py` does.

A log is a few partitions. Each is a total order of records with growing offsets and the log's own time on every record;
an append that returned is in it for good, and a read that begins afterwards sees it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from keylane.core.claim_facts import Key, LogRecord
from keylane.core.claim_records import CLAIMING_PARTITION, Message, ReleaseGroup, encode, subject_for
from keylane.core.claims import World
from keylane.errors import InvalidInput, LogReplaced, ReadIncomplete, RevisionConflict

DEFAULT_INTERVAL_S = 10.0
"""The heartbeat interval where nobody says another one."""


class Position(NamedTuple):
    """Where a record is in the log."""

    partition: int
    offset: int


class Bounds(NamedTuple):
    """The first record that a partition of the log still has, and the offset after its last one."""

    first: int
    end: int


class Newest(NamedTuple):
    """What a writer has read: the newest record about a key, None if there is none; and all before `read_to`.

    `offset` is only where a log looks first. That nothing is on the key's subject from `read_to` on is what counts: a
    record there that cannot be read, or is about another key, is newer than `offset`.
    """

    offset: int | None
    read_to: int = 0


class CoordinationLog(Protocol):
    """What Marshal needs of a log."""

    @property
    def partitions(self) -> int: ...

    @property
    def first_offset(self) -> int:
        """The offset of the first record of a log that was never trimmed."""
        ...

    @property
    def compares(self) -> bool:
        """Whether `append` honours `expect`. One that does not ignores it."""
        ...

    @property
    def interval_s(self) -> float | None:
        """The heartbeat interval that it was opened with; None: everybody who uses it says what it is."""
        ...

    async def append(self, message: Message, partition: int, *, expect: Newest | None = None) -> Position:
        """Write a message. It is in the log when this returns.

        `expect`: only if nothing is there about the message's key that was not read; else `RevisionConflict`, and
        nothing was written. A loser of a race is told at once, and the log holds the winner's claim alone.
        """
        ...

    async def bounds(self, partition: int) -> Bounds:
        """What the partition holds now."""
        ...

    def read(self, partition: int, offset: int) -> AsyncIterator[LogRecord]:
        """The records from an offset to the end as it is when the reading begins: all of them, or an error.

        `ReadIncomplete`: among others if records after `offset` are gone by age.
        """
        ...

    async def kept_for_s(self) -> float | None:
        """How many seconds a record stays in the log, at least; None: for ever."""
        ...


async def catch_up(log: CoordinationLog, world: World, partition: int | None = None) -> None:
    """Read the log into the world to the end as it is now: one partition of it, or all.

    >>> position = await log.append(claim, partition)
    >>> await catch_up(log, world, partition)
    >>> world.verdict_of(*position)
    """
    if world.partitions != log.partitions:
        raise InvalidInput(
            f"a world of {world.partitions} partitions and a coordination log of {log.partitions}: the number of "
            "partitions decides where claims are kept and must not change; stop all consumers before it does"
        )
    for number in range(log.partitions) if partition is None else [partition]:
        await _catch_up(log, world, number)


async def _catch_up(log: CoordinationLog, world: World, number: int) -> None:
    first, end = await log.bounds(number)
    read_to = world.next_offset(number)
    if end < read_to:
        raise LogReplaced(
            f"partition {number} of the coordination log ends at {end} and was read to {read_to} before: "
            "it was cut off or made anew; stop all its consumers"
        )
    if world.now_ms(number) is None:
        world.begins(number, first, end)
    elif first > read_to:
        raise LogReplaced(
            f"partition {number} of the coordination log begins at {first} and was read to {read_to} before: "
            "records in between are gone by age, and with them who owns what; begin again with a new World"
        )
    async for record in log.read(number, max(read_to, first)):
        world.apply(record)


class MemoryLog:
    """A log for tests, in this process only. Its clock stands still until you set it.

    >>> log = MemoryLog(partitions=4)
    >>> log.now_ms += 10_000
    """

    first_offset = 0
    compares = True
    interval_s: float | None = None

    def __init__(self, partitions: int = 1, *, now_ms: int = 0) -> None:
        if partitions < 1:
            raise InvalidInput(f"a coordination log of {partitions} partitions: it has at least 1")
        self.now_ms = now_ms
        """The log's time: what the next record is stamped with."""
        self.retention_s: float | None = None
        """What it says that it keeps records for. It forgets nothing by itself: see `trim`."""
        self._records: list[list[LogRecord]] = [[] for _ in range(partitions)]
        self._ends = [0] * partitions
        self._newest: list[dict[Key, int]] = [{} for _ in range(partitions)]

    def __repr__(self) -> str:
        return f"<MemoryLog {self._ends} at {self.now_ms} ms>"

    @property
    def partitions(self) -> int:
        return len(self._records)

    async def append(self, message: Message, partition: int, *, expect: Newest | None = None) -> Position:
        value = encode(message)
        if isinstance(message, ReleaseGroup):
            return self.write(value, partition)
        key = Key(message.group, message.topic, message.partition)
        newest = self._newest[partition].get(key, -1)
        is_there = newest >= (await self.bounds(partition)).first
        if expect is not None and is_there and newest != expect.offset and newest >= expect.read_to:
            raise RevisionConflict(
                f"the newest record about {'/'.join(map(str, key))} is {newest} and not {expect.offset}: read the log"
            )
        return self.write(value, partition, key=key)

    def write(self, value: bytes, partition: int, *, key: Key | None = None) -> Position:
        """Put any bytes into the log, also such that nobody can read. `key`: on this key's subject."""
        offset = self._ends[partition]
        subject = None if key is None else subject_for(CLAIMING_PARTITION, *key)
        self._records[partition].append(LogRecord(partition, offset, self.now_ms, value, subject))
        self._ends[partition] = offset + 1
        if key is not None:
            self._newest[partition][key] = offset
        return Position(partition, offset)

    def trim(self, before: int, partition: int = 0) -> None:
        """Forget the records before an offset, as a log does with old ones."""
        self._records[partition] = [record for record in self._records[partition] if record.offset >= before]

    async def bounds(self, partition: int) -> Bounds:
        records = self._records[partition]
        return Bounds(records[0].offset if records else self._ends[partition], self._ends[partition])

    async def read(self, partition: int, offset: int) -> AsyncIterator[LogRecord]:
        first, end = await self.bounds(partition)
        if offset < first:
            raise ReadIncomplete(f"records {offset} to {first - 1} of the coordination log are gone by age")
        for record in self._records[partition][offset - first : end - first]:
            yield record

    async def kept_for_s(self) -> float | None:
        return self.retention_s
