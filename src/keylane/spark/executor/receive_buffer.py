"""What has arrived and was not read yet: between the connection's thread and the reader's.

The producer bounds it: `held` says how much waits, and no more is requested of the server while it is too much.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from enum import Enum, auto

from keylane.errors import KeylaneError
from keylane.spark.executor.framing import MessageRun


class EndOfRead(Enum):
    """Why nothing more comes."""

    REACHED = auto()
    """The end of the range was seen."""
    DRY = auto()
    """The server that answers has no more, though the end of the range was not seen."""


class ReceiveBuffer:
    """Runs of messages, first in, first out, until an end or a failure."""

    def __init__(self, rows: int, size: int) -> None:
        self._rows_wanted = rows
        self._size_wanted = size
        self._runs: deque[MessageRun] = deque()
        self._rows = 0
        self._size = 0
        self._end: EndOfRead | KeylaneError | None = None
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self.heard = time.monotonic()
        """When the server was last heard of."""

    @property
    def held(self) -> tuple[int, int]:
        """Messages and bytes that wait for the reader."""
        return self._rows, self._size

    @property
    def ended(self) -> bool:
        return self._end is not None

    # ---- the link's side ----------------------------------------------------------------------------

    def put(self, run: MessageRun) -> None:
        with self._lock:
            self._runs.append(run)
            self._rows += run.rows
            self._size += run.size
            if self._rows >= self._rows_wanted or self._size >= self._size_wanted:
                self._ready.set()

    def hand_over(self) -> None:
        """Let the reader have what there is: for the moment nothing more is on its way."""
        self._ready.set()

    def end(self, why: EndOfRead | KeylaneError) -> None:
        """Nothing comes behind what was put in so far. The first reason holds."""
        with self._lock:
            if self._end is None:
                self._end = why
            self._ready.set()

    # ---- the reader's side --------------------------------------------------------------------------

    def take(self, timeout_s: float) -> tuple[list[MessageRun], EndOfRead | KeylaneError | None]:
        """About as much as was wanted, or what there is when the time is up; the end once all was taken."""
        self._ready.wait(timeout_s)
        runs: list[MessageRun] = []
        rows = size = 0
        with self._lock:
            while self._runs and rows < self._rows_wanted and size < self._size_wanted:
                run = self._runs.popleft()
                runs.append(run)
                rows += run.rows
                size += run.size
            self._rows -= rows
            self._size -= size
            enough = self._rows >= self._rows_wanted or self._size >= self._size_wanted
            if not enough and self._end is None:
                self._ready.clear()
            return runs, self._end if not self._runs else None
