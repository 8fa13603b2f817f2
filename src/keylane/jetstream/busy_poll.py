"""Keeps the event loop awake while the server answers quickly.

With one message in flight, each ack is answered within about 100 µs, and a good part of that is the machine putting
the process to sleep and waking it again. As long as such answers follow each other, the loop polls instead of
sleeping: other tasks run as ever, and the rate rises by a third (bench/README.md, `max_ack_pending` 1). The first pause
ends it, so that an idle or a slower reader costs nothing. Bulk traffic never starts it: there, sleeping makes larger
reads.
"""

from __future__ import annotations

import asyncio
import time

_QUICK_S = 0.0003
_SMALL_BYTES = 4096
_IN_A_ROW = 4


class Awake:
    """Told of every read. Polls after a row of small reads that followed each other quickly."""

    __slots__ = ("_in_a_row", "_last", "_loop", "is_polling")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._in_a_row = 0
        self.is_polling = False

    def was_read(self, size: int) -> None:
        now = time.perf_counter()
        quick = now - self._last < _QUICK_S and size < _SMALL_BYTES
        self._last = now
        self._in_a_row = self._in_a_row + 1 if quick else 0
        if self._in_a_row >= _IN_A_ROW and not self.is_polling:
            self.is_polling = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        self.is_polling = self._in_a_row >= _IN_A_ROW and time.perf_counter() - self._last < _QUICK_S
        if self.is_polling:
            self._loop.call_soon(self._poll)
