"""`CoordinationLog`, what Marshal requires of a log; reading one into a `World`; and `MemoryLog` for tests.

Never decides what a record means: `core/claim_rules.py` does.

A log has one or more partitions. Each is a total order of records with growing offsets and the log's own timestamp on
every record. A record whose append returned is stored, and every read that begins afterwards returns it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from keylane.core.claim_facts import Key, LogRecord
from keylane.core.claim_records import CLAIMING_PARTITION, Message, ReleaseGroup, encode, subject_for
from keylane.core.world import World
from keylane.errors import InvalidInput, LogReplaced, ReadIncomplete, RevisionConflict

DEFAULT_INTERVAL_S = 10.0
"""The default heartbeat interval."""


class Position(NamedTuple):
    """Where a record is in the log."""

    partition: int
    offset: int


class Bounds(NamedTuple):
    """The first record that a partition of the log still has, and the offset after its last one."""

    first: int
    end: int


class Newest(NamedTuple):
    """What a writer has read: everything before `read_to`, and the newest record about a key, if there is one.

    An append that expects this succeeds if the key's subject has no record from `read_to` on. `offset` is only where a
    log looks first: a record that cannot be read, or is about another key, may be newer than it.
    """

    offset: int | None
    read_to: int = 0


class CoordinationLog(Protocol):
    """What Marshal requires of a log."""

    @property
    def partitions(self) -> int: ...

    @property
    def first_offset(self) -> int:
        """The offset of the first record of a log from which no record has expired."""
        ...

    @property
    def compares(self) -> bool:
        """Whether `append` honours `expect`; other logs ignore it."""
        ...

    @property
    def interval_s(self) -> float | None:
        """The heartbeat interval that it was opened with; None: every user of the log must give it."""
        ...

    async def append(self, message: Message, partition: int, *, expect: Newest | None = None) -> Position:
        """Write a message. It is in the log when this returns.

        `expect`: write only if the writer has read every record about the message's key; otherwise raise
        `RevisionConflict` and write nothing. So the loser of a race knows at once, and the log has the winner's claim
        only.
        """
        ...

    async def bounds(self, partition: int) -> Bounds:
        """The first offset and the end of a partition now."""
        ...

    def read(self, partition: int, offset: int) -> AsyncIterator[LogRecord]:
        """The records from an offset to the end at the time when the read begins: all of them, or an error.

        `ReadIncomplete`: for example if records after `offset` have expired.
        """
        ...

    async def kept_for_s(self) -> float | None:
        """How many seconds a record is kept, at least; None: for ever."""
        ...


async def catch_up(log: CoordinationLog, world: World, partition: int | None = None) -> None:
    """Read the log, or one partition of it, into the world up to its present end.

    >>> position = await log.append(claim, partition)
    >>> await catch_up(log, world, partition)
    >>> world.verdict_of(*position)
    """
    if world.partitions != log.partitions:
        raise InvalidInput(
            f"a world of {world.partitions} partitions and a coordination log of {log.partitions}: the number of "
            "partitions decides where claims are kept and must not change; stop all consumers before you change it"
        )
    for number in range(log.partitions) if partition is None else [partition]:
        await _catch_up(log, world, number)


async def _catch_up(log: CoordinationLog, world: World, number: int) -> None:
    first, end = await log.bounds(number)
    read_to = world.next_offset(number)
    if end < read_to:
        raise LogReplaced(
            f"partition {number} of the coordination log ends at {end} and was read to {read_to} before: "
            "it was truncated or recreated; stop all its consumers"
        )
    if world.now_ms(number) is None:
        world.begins(number, first, end)
    elif first > read_to:
        raise LogReplaced(
            f"partition {number} of the coordination log begins at {first} and was read to {read_to} before: "
            "the records in between have expired, and with them who owns what; begin again with a new World"
        )
    async for record in log.read(number, max(read_to, first)):
        world.apply(record)


class MemoryLog:
    """A log for tests, in this process only. Its clock advances only when you set it.

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
        """The log's time: the timestamp of the next record."""
        self.retention_s: float | None = None
        """What `kept_for_s` returns. Records expire only by `trim`."""
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
        """Append any bytes, also unreadable ones. `key`: on this key's subject."""
        offset = self._ends[partition]
        subject = None if key is None else subject_for(CLAIMING_PARTITION, *key)
        self._records[partition].append(LogRecord(partition, offset, self.now_ms, value, subject))
        self._ends[partition] = offset + 1
        if key is not None:
            self._newest[partition][key] = offset
        return Position(partition, offset)

    def trim(self, before: int, partition: int = 0) -> None:
        """Drop the records before an offset, as if they had expired."""
        self._records[partition] = [record for record in self._records[partition] if record.offset >= before]

    async def bounds(self, partition: int) -> Bounds:
        records = self._records[partition]
        return Bounds(records[0].offset if records else self._ends[partition], self._ends[partition])

    async def read(self, partition: int, offset: int) -> AsyncIterator[LogRecord]:
        first, end = await self.bounds(partition)
        if offset < first:
            raise ReadIncomplete(f"records {offset} to {first - 1} of the coordination log have expired")
        for record in self._records[partition][offset - first : end - first]:
            yield record

    async def kept_for_s(self) -> float | None:
        return self.retention_s
