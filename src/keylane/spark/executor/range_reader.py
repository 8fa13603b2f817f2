"""What the two readers of a range share: the buffer between the connection's thread and the task's, and the base class.

The reader bounds the buffer: `held` says how much waits, and no more is requested of the server while it is too much.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING

from nats.aio.subscription import Subscription

from keylane.errors import Disconnected, KeylaneError, PermissionDenied
from keylane.spark.executor.framing import MessageFramer, MessageRun
from keylane.spark.tasks import Split

if TYPE_CHECKING:
    from keylane.jetstream import Connection


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


class RangeReader(ABC):
    """Reads the messages behind `after` into `buffer` as they come, on the connection's loop.

    Stops at the first error, which becomes the end of the buffer.
    """

    def __init__(self, connection: Connection, split: Split, after: int, buffer: ReceiveBuffer, request: str) -> None:
        """`request`: the subject of the API that its requests go to."""
        self.buffer = buffer
        self._request = request
        self._connection = connection
        self._client = connection.nats
        self._split = split
        self._stream = split.reading.stream
        self._goal = min(split.last, split.upto)
        self._limit = split.last if split.last <= split.upto else split.upto + 1
        self._seen = after
        self._inbox = self._client.new_inbox()
        self._subscription: Subscription | None = None
        self._framer: MessageFramer | None = None
        self._arrived: list[MessageRun] = []

    @abstractmethod
    async def open(self) -> None:
        """Subscribe, and request the first messages."""

    @abstractmethod
    def refill(self) -> None:
        """Request more if there is room."""

    @abstractmethod
    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        """A status of the server."""

    @abstractmethod
    def _book(self) -> None:
        """Count what arrived, and see whether it is all."""

    def _listen(self) -> None:
        self._client.listen(self._link_changed)
        self._client.listen_for_denials(self._denied)

    async def close(self) -> None:
        self._client.unlisten(self._link_changed)
        self._client.unlisten_for_denials(self._denied)
        if self._subscription is not None:
            await self._client.unroute(self._subscription)

    def take(self, data: bytes, position: int) -> int:
        assert self._framer is not None
        run = self._framer.cut(data, position)
        if run is None:
            return position
        self._arrived.append(run)
        return int(run.ends[-1]) + 2

    def received(self) -> None:
        self.buffer.heard = time.monotonic()
        self._book()
        self.refill()

    def _link_changed(self, up: bool) -> None:
        self.buffer.end(Disconnected("the connection was lost"))

    def _denied(self, denied: PermissionDenied) -> None:
        if denied.subject in (self._request, self._inbox, f"{self._inbox}.>"):
            self.buffer.end(denied)
