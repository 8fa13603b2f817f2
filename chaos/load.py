"""A steady load: messages of many keys at a given rate, and what the server stored of them.

A message whose fate is unknown is sent again under the same id, so that it is stored once. It may then lie behind a
later one of its key: the order that counts is that of the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from keylane.errors import NotStored, OutcomeUnknown
from keylane.jetstream import Connection, PublishAck, Publisher, open_publisher

PREFIX = "orders."
FILTER = "orders.*"
KEYS = 200
ID = "Nats-Msg-Id"
_STEP_S = 0.004
_STORED_TIMEOUT_S = 60.0


class Load:
    """Publishes until it is stopped. Keys take turns, so every partition gets its share all the time."""

    def __init__(self, connection: Connection, rate: float, keys: int = KEYS) -> None:
        self.keys: dict[int, str] = {}
        """The key of every stored message, by its sequence."""
        self.numbers: dict[int, int] = {}
        """The number (which is its id) of every stored message, by its sequence."""
        self.longest_gap_s = 0.0
        """Between two messages: no member can be smoother than this."""
        self.repeats = 0
        """How many were sent again."""
        self._connection = connection
        self._rate = rate
        self._keys = keys
        self._stopped = asyncio.Event()
        self._pending: deque[tuple[int, asyncio.Future[PublishAck]]] = deque()
        self._again: deque[int] = deque()
        self._task = asyncio.create_task(self._run(), name="load")

    async def stop(self) -> None:
        """Stop, and wait until all that was sent is stored."""
        self._stopped.set()
        await self._task

    def check(self) -> None:
        """Raise what ended it early."""
        if self._task.done():
            self._task.result()

    async def _run(self) -> None:
        start = last = time.monotonic()
        count = 0
        async with open_publisher(self._connection) as publisher:
            while not self._stopped.is_set():
                now = time.monotonic()
                self.longest_gap_s = max(self.longest_gap_s, now - last)
                last = now
                await self._repeat(publisher)
                while count < (now - start) * self._rate and not self._again:
                    await self._send(publisher, count)
                    count += 1
                self._collect()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(_STEP_S, 1 / self._rate)):
                        await self._stopped.wait()
            async with asyncio.timeout(_STORED_TIMEOUT_S):
                while self._pending or self._again:
                    await self._repeat(publisher)
                    self._collect()
                    await asyncio.sleep(_STEP_S)

    async def _send(self, publisher: Publisher, number: int) -> None:
        try:
            sent = await publisher.send(f"{PREFIX}k{number % self._keys}", b"%d" % number, {ID: str(number)})
        except NotStored:
            self._again.append(number)
        else:
            self._pending.append((number, sent))

    async def _repeat(self, publisher: Publisher) -> None:
        for _ in range(len(self._again) if self._connection.is_connected else 0):
            self.repeats += 1
            await self._send(publisher, self._again.popleft())

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].done():
            number, stored = self._pending.popleft()
            try:
                sequence = stored.result().sequence
            except (NotStored, OutcomeUnknown):
                self._again.append(number)
            else:
                self.keys[sequence] = f"k{number % self._keys}"
                self.numbers[sequence] = number


@asynccontextmanager
async def load(connection: Connection, rate: float, keys: int = KEYS) -> AsyncIterator[Load]:
    """A load for as long as the block lasts, unless it is stopped before."""
    running = Load(connection, rate, keys)
    try:
        yield running
    finally:
        await running.stop()
