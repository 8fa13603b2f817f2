"""`Source`, what Marshal requires of a source of messages; and `MemorySource` for tests.

A source has topics with numbered partitions; each partition is a sequence of messages with growing offsets, possibly
with gaps. An offset is always that of *the next message to read*. Sources know nothing of claims: the coordination log
alone decides who may read a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from keylane.errors import InvalidInput, NoSuchTopic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class SourceRecord(NamedTuple):
    """One message of a partition.

    `key`: messages of one key are handled in order; messages of a partition without a key are handled in order too.
    `subject`: the subject it was published on, if the source has subjects. `is_tombstone`: its value is null, not just
    empty: in a compacted topic its key is deleted.
    """

    offset: int
    key: bytes | None
    data: bytes
    timestamp_ms: int
    headers: tuple[tuple[str, bytes], ...] = ()
    subject: str | None = None
    is_tombstone: bool = False


class Extent(NamedTuple):
    """The offsets of a partition: no message is before `earliest`, and none yet at `end` or after it."""

    earliest: int
    end: int


class Reader(Protocol):
    """Reads one partition onwards from an offset. Used by one task."""

    async def next(self, most: int, wait_s: float) -> list[SourceRecord]:
        """Up to `most` messages, in order, without gaps. Waits up to `wait_s` for the first one; empty if none came.

        Transient failures (a lost connection, a new leader) are retried within the call, or raised as an error whose
        `is_transient` is true; the next call continues after the last one that returned. Messages that expired before
        they were read are skipped.
        """
        ...


class Source(Protocol):
    """What Marshal requires of a source. Every call has its own deadline."""

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has; `NoSuchTopic` if it does not exist, or this user may not see it."""
        ...

    async def extent(self, topic: str, partition: int) -> Extent:
        """The earliest offset and the end of a partition now."""
        ...

    async def backlog(self, topic: str, partition: int, offset: int) -> int:
        """How many messages there are from this offset on."""
        ...

    async def committed(self, group: str, topic: str, partition: int) -> int | None:
        """The offset last committed for a group; None if there is none, or the source does not keep offsets."""
        ...

    async def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        """Store an offset, for other tools and for a log whose heartbeats have expired.

        A source that does not keep offsets does nothing. Marshal does not depend on it: heartbeats carry the offsets.
        """
        ...

    def reader(self, topic: str, partition: int, offset: int) -> AbstractAsyncContextManager[Reader]:
        """A reader of a partition from an offset on, for as long as the block lasts."""
        ...


class MemorySource:
    """A source for tests, in this process only.

    >>> source = MemorySource({"orders": 4})
    >>> source.put("orders", 0, b"hello", key=b"customer-1")
    0
    """

    def __init__(self, topics: Mapping[str, int]) -> None:
        for topic, count in topics.items():
            if count < 1:
                raise InvalidInput(f"topic {topic!r} with {count} partitions: it has at least 1")
        self._rows: dict[str, list[list[SourceRecord]]] = {
            topic: [[] for _ in range(count)] for topic, count in topics.items()
        }
        self._ends: dict[tuple[str, int], int] = {}
        self._changed = asyncio.Event()
        self.commits: dict[tuple[str, str, int], int] = {}
        """Committed offsets, by group, topic and partition."""

    def __repr__(self) -> str:
        return f"<MemorySource { ({topic: len(rows) for topic, rows in self._rows.items()}) }>"

    def put(self, topic: str, partition: int, data: bytes, *, key: bytes | None = None, timestamp_ms: int = 0) -> int:
        """Add a message; returns its offset."""
        offset = self._ends.get((topic, partition), 0)
        self._row(topic, partition).append(SourceRecord(offset, key, data, timestamp_ms))
        self._ends[topic, partition] = offset + 1
        self._changed.set()
        self._changed = asyncio.Event()
        return offset

    def trim(self, topic: str, partition: int, before: int) -> None:
        """Drop the messages before an offset, as if they had expired."""
        row = self._row(topic, partition)
        row[:] = [record for record in row if record.offset >= before]

    async def partitions(self, topic: str) -> int:
        return len(self._rows_of(topic))

    async def extent(self, topic: str, partition: int) -> Extent:
        row, end = self._row(topic, partition), self._ends.get((topic, partition), 0)
        return Extent(row[0].offset if row else end, end)

    async def backlog(self, topic: str, partition: int, offset: int) -> int:
        return sum(record.offset >= offset for record in self._row(topic, partition))

    async def committed(self, group: str, topic: str, partition: int) -> int | None:
        return self.commits.get((group, topic, partition))

    async def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        self.commits[group, topic, partition] = offset

    @asynccontextmanager
    async def reader(self, topic: str, partition: int, offset: int) -> AsyncIterator[Reader]:
        yield _MemoryReader(self._row(topic, partition), offset, lambda: self._changed)

    def _rows_of(self, topic: str) -> list[list[SourceRecord]]:
        if topic not in self._rows:
            raise NoSuchTopic(f"there is no topic {topic!r}: there are {', '.join(sorted(self._rows)) or 'none'}")
        return self._rows[topic]

    def _row(self, topic: str, partition: int) -> list[SourceRecord]:
        rows = self._rows_of(topic)
        if not 0 <= partition < len(rows):
            raise InvalidInput(f"partition {partition} of topic {topic!r}: it has 0 to {len(rows) - 1}")
        return rows[partition]


class _MemoryReader:
    def __init__(self, row: list[SourceRecord], offset: int, change: Callable[[], asyncio.Event]) -> None:
        self._row = row
        self._offset = offset
        self._change = change

    async def next(self, most: int, wait_s: float) -> list[SourceRecord]:
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            changed = self._change()
            skip = max(self._offset - self._row[0].offset, 0) if self._row else 0
            if found := self._row[skip : skip + most]:
                self._offset = found[-1].offset + 1
                return found
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return []
