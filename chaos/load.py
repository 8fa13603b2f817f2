"""A steady load: messages of many keys at a given rate, and what the server stored of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from keylane.jetstream.connection import Connection
from keylane.jetstream.publish import PublishAck, open_publisher

PREFIX = "orders."
FILTER = "orders.*"
KEYS = 200
_STEP_S = 0.004


class Load:
    """Publishes until it is stopped. Keys take turns, so every partition gets its share all the time."""

    def __init__(self, connection: Connection, rate: float) -> None:
        self.keys: dict[int, str] = {}
        """The key of every stored message, by its sequence."""
        self.longest_gap_s = 0.0
        """Between two messages: no member can be smoother than this."""
        self._connection = connection
        self._rate = rate
        self._stopped = asyncio.Event()
        self._pending: deque[tuple[str, asyncio.Future[PublishAck]]] = deque()
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
                while count < (now - start) * self._rate:
                    key = f"k{count % KEYS}"
                    self._pending.append((key, await publisher.send(PREFIX + key, b"%d" % count)))
                    count += 1
                self._collect()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(_STEP_S, 1 / self._rate)):
                        await self._stopped.wait()
        self._collect()

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].done():
            key, stored = self._pending.popleft()
            self.keys[stored.result().sequence] = key


@asynccontextmanager
async def load(connection: Connection, rate: float) -> AsyncIterator[Load]:
    """A load for as long as the block lasts, unless it is stopped before."""
    running = Load(connection, rate)
    try:
        yield running
    finally:
        await running.stop()
