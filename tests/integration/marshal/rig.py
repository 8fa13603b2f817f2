"""What the tests of Marshal consumers share: a log whose time goes on, handlers that keep what they saw, waiting."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from keylane.core.claim_facts import LogRecord, overlaps
from keylane.core.claim_records import Message
from keylane.core.world import World
from keylane.errors import Disconnected
from keylane.marshal import Consumer, CoordinationLog, MarshalMessage, MemoryLog, MemorySource, catch_up
from keylane.marshal.log import Bounds, Newest, Position
from tests.waiter import DEADLINE_S, until

INTERVAL_S = 0.5
TICK_S, LONGEST_TICK_S = 0.01, 0.04
"""How often the time of a log in memory is told, and how much of it may pass between."""
GROUP, TOPIC = "billing", "orders"


class LiveLog(MemoryLog):
    """In memory, with a time that goes on by itself; `ahead_ms` is added to it.

    It stands still while this process does: nobody here could send a heartbeat meanwhile, so whoever comes first
    afterwards would rightly take what others own.
    """

    def __init__(self, partitions: int = 1) -> None:
        self.ahead_ms = 1_700_000_000_000
        self._stood_still_s = 0.0
        self._ticked_at = time.monotonic()
        self._tick()
        super().__init__(partitions)

    @property
    def now_ms(self) -> int:
        now = min(time.monotonic(), self._ticked_at + LONGEST_TICK_S)
        return int((now - self._stood_still_s) * 1000) + self.ahead_ms

    @now_ms.setter
    def now_ms(self, _: int) -> None:
        """The clock decides."""

    @property
    def records(self) -> list[LogRecord]:
        """All records of the first partition, the oldest first."""
        return self._records[0]

    @property
    def end(self) -> int:
        """The offset of the next record of the first partition."""
        return self._ends[0]

    def make_older(self, by_ms: int) -> None:
        """As if all that is written had been written so much earlier."""
        for records in self._records:
            records[:] = [record._replace(time_ms=record.time_ms - by_ms) for record in records]

    def cut_off(self) -> None:
        """Lose all records of the first partition, and count anew."""
        self._records[0].clear()
        self._newest[0].clear()
        self._ends[0] = 0

    def add_partition(self) -> None:
        self._records.append([])
        self._newest.append({})
        self._ends.append(0)

    def _tick(self) -> None:
        now = time.monotonic()
        self._stood_still_s += max(now - self._ticked_at - LONGEST_TICK_S, 0.0)
        self._ticked_at = now
        asyncio.get_running_loop().call_later(TICK_S, self._tick)


class View:
    """A log as one consumer reaches it. `down`: nothing gets through. `before_append` may raise instead of writing.

    Every call gives the others a turn, as a network does. Without `compares` it is like Kafka.
    """

    def __init__(self, log: MemoryLog, *, compares: bool = True) -> None:
        self.log = log
        self.compares = compares
        self.first_offset = log.first_offset
        self.interval_s: float | None = None
        self.down = False
        self.before_append: Callable[[Message], None] | None = None

    @property
    def partitions(self) -> int:
        return self.log.partitions

    async def append(self, message: Message, partition: int, *, expect: Newest | None = None) -> Position:
        await self._through()
        if self.before_append is not None:
            self.before_append(message)
        return await self.log.append(message, partition, expect=expect if self.compares else None)

    async def bounds(self, partition: int) -> Bounds:
        await self._through()
        return await self.log.bounds(partition)

    async def read(self, partition: int, offset: int) -> AsyncIterator[LogRecord]:
        await self._through()
        async for record in self.log.read(partition, offset):
            yield record

    async def kept_for_s(self) -> float | None:
        await self._through()
        return await self.log.kept_for_s()

    async def _through(self) -> None:
        await asyncio.sleep(0)
        if self.down:
            raise Disconnected("the link to the log is down")


class Seen:
    """A handler that keeps what it was given and when. `hold` makes it wait."""

    def __init__(self) -> None:
        self.began_at: list[float] = []
        self.messages: list[MarshalMessage] = []
        self.hold: asyncio.Event | None = None
        self.began: list[MarshalMessage] = []

    async def __call__(self, message: MarshalMessage) -> None:
        self.began.append(message)
        self.began_at.append(time.monotonic())
        if self.hold is not None:
            await self.hold.wait()
        self.messages.append(message)

    @property
    def offsets(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for message in self.messages:
            found.setdefault(message.partition, []).append(message.offset)
        return found

    @property
    def times(self) -> Counter[tuple[int, int]]:
        return Counter((message.partition, message.offset) for message in self.messages)

    async def until(self, done: Callable[[Seen], bool], deadline_s: float = DEADLINE_S) -> None:
        await until(lambda: self, done, deadline_s=deadline_s)

    def __repr__(self) -> str:
        return f"<Seen {len(self.began)} began, {len(self.messages)} done, {len(self.times)} different>"


def fill(source: MemorySource, partitions: int, each: int, *, keys: int = 5, first: int = 0) -> None:
    for partition in range(partitions):
        for number in range(first, first + each):
            source.put(TOPIC, partition, b"%d" % number, key=b"k%d" % (number % keys))


def consumer(log: CoordinationLog, source: Any, client: str, handler: Any, **options: Any) -> Consumer:
    options.setdefault("heartbeat_interval_s", INTERVAL_S)
    return Consumer(log, source, GROUP, client, [TOPIC], handler, **options)


async def world_of(log: CoordinationLog, *, interval_s: float = INTERVAL_S, history: bool = False) -> World:
    world = World(interval_s, log.partitions, first_offset=log.first_offset, keep_history=history)
    await catch_up(log, world)
    return world


async def check_log(log: CoordinationLog, *, interval_s: float = INTERVAL_S) -> World:
    """At no place of the log two owners."""
    world = await world_of(log, interval_s=interval_s, history=True)
    assert list(overlaps(world.tenures())) == []
    return world


def in_order_per_key(messages: Iterable[MarshalMessage]) -> bool:
    newest: dict[tuple[int, bytes | None], int] = {}
    for message in messages:
        key = (message.partition, message.key)
        if message.offset <= newest.get(key, -1):
            return False
        newest[key] = message.offset
    return True


async def kill(member: Consumer) -> None:
    """As if its process ended: nothing more is written or handled."""
    running, member._running = member._running, None
    assert running is not None
    running.cancel()
    await asyncio.wait({running}, timeout=10)
    assert running.cancelled()


def may_start(member: Consumer) -> bool:
    """Whether it would handle a message of its only partition now, by what it knows of its claim."""
    [owned] = member._owned.values()
    return owned.may_start()
