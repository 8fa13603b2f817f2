"""Runs a member's handler: lanes decide what may start, workers run it, success is acked.

Workers are long-lived tasks. One that finds the next message ready goes on without a turn of the event loop, so a
handler that never waits costs no task per message; one that waits lets the others take over.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from keylane.core.lanes import Arrival, Entry, Lanes
from keylane.errors import InvalidInput
from keylane.groups.message import GroupMessage

_log = logging.getLogger("keylane.groups")

Handler = Callable[[GroupMessage], Awaitable[None]] | Callable[[GroupMessage], None]
Failure = Callable[[GroupMessage, BaseException, int], None]

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0


def backoff_s(tries: int) -> float:
    return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(tries - 1, 20))


class Handling:
    """The messages of one member, from their delivery to their ack."""

    def __init__(
        self,
        handler: Handler,
        *,
        lane_of: Callable[[GroupMessage], Hashable],
        concurrency: int,
        ack_wait_s: float,
        manual_ack: bool,
        remember: int,
        on_failure: Failure | None = None,
    ) -> None:
        if concurrency < 1:
            raise InvalidInput(f"concurrency is {concurrency}: at least 1 handler must be allowed to run")
        self._run_handler = _as_coroutine(handler)
        self._lane_of = lane_of
        self._concurrency = concurrency
        self._ack_wait_s = ack_wait_s
        self._manual_ack = manual_ack
        self._on_failure = on_failure
        self._lanes: Lanes[GroupMessage] = Lanes(max_tries=None, backoff=backoff_s, remember=remember)
        self._loop = asyncio.get_running_loop()
        self._workers: set[asyncio.Task[None]] = set()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._nudge: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self._old: set[int] = set()
        self._closed = False
        self._keep_alive()

    def __repr__(self) -> str:
        return f"<Handling {self._lanes!r}, {len(self._workers)} workers>"

    def offer(self, messages: list[GroupMessage]) -> None:
        """New deliveries. What is known already is not run again."""
        lanes = self._lanes
        for message in messages:
            if lanes.arrive(message.sequence, self._lane_of(message), message) is Arrival.DONE:
                message.ack()
        self._wake()

    def forget(self, which: Callable[[GroupMessage], bool] | None = None) -> None:
        """Drop what has not started: it is delivered again, here or to another member."""
        self._lanes.forget(which)

    async def finish(self, which: Callable[[GroupMessage], bool] | None = None) -> None:
        """Wait until nothing (of these) is at work."""
        while self._lanes.running(which):
            self._quiet.clear()
            await self._quiet.wait()

    async def close(self) -> None:
        self._closed = True
        for timer in (self._nudge, self._retry, self._beat):
            if timer is not None:
                timer.cancel()
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    # ---- workers ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._closed or not self._lanes.ready:
            return
        while self._idle:
            waiter = self._idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        if len(self._workers) < self._concurrency:
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    def _wake_another(self) -> None:
        self._nudge = None
        self._wake()

    async def _work(self) -> None:
        while True:
            entry = self._lanes.take()
            if entry is None:
                waiter = self._loop.create_future()
                self._idle.append(waiter)
                await waiter
                continue
            if self._nudge is None and self._lanes.ready:
                # If this handler waits, the next turn of the loop lets another worker go on.
                self._nudge = self._loop.call_soon(self._wake_another)
            await self._handle(entry)

    async def _handle(self, entry: Entry[GroupMessage]) -> None:
        try:
            await self._run_handler(entry.item)
        except asyncio.CancelledError:
            self._lanes.release(entry)
            self._quiet.set()
            raise
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; the message is tried again
            self._failed(entry, error)
        else:
            # The newest delivery is the one to settle: a reset voids the earlier ones.
            if not self._manual_ack and not entry.item.delivery.settled:
                entry.item.ack()
            self._lanes.finished(entry)
        self._quiet.set()

    def _failed(self, entry: Entry[GroupMessage], error: Exception) -> None:
        message = entry.item
        retry_at = self._lanes.failed(entry, self._loop.time())
        assert retry_at is not None, "without max_tries a message is never given up"
        if self._on_failure is not None:
            self._on_failure(message, error, entry.tries)
        else:
            _log.warning("handler failed on %r (try %d): %r", message, entry.tries, error)
        self._schedule_retry(retry_at)

    def _schedule_retry(self, retry_at: float) -> None:
        if self._retry is None or retry_at < self._retry.when():
            if self._retry is not None:
                self._retry.cancel()
            self._retry = self._loop.call_at(retry_at, self._retry_due)

    def _retry_due(self) -> None:
        self._retry = None
        following = self._lanes.due(self._loop.time())
        if following is not None:
            self._schedule_retry(following)
        self._wake()

    def _keep_alive(self) -> None:
        """Messages that wait or are at work for long must not be delivered again meanwhile."""
        here = set()
        for entry in self._lanes:
            here.add(entry.sequence)
            if entry.sequence in self._old and not entry.item.delivery.settled:
                entry.item.in_progress()
        self._old = here
        self._beat = self._loop.call_later(self._ack_wait_s / 3, self._keep_alive)


def _as_coroutine(handler: Handler) -> Callable[[GroupMessage], Awaitable[Any]]:
    """A plain function runs in a thread, so that it never blocks the event loop."""
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):
        return handler  # type: ignore[return-value]

    async def in_thread(message: GroupMessage) -> None:
        await asyncio.to_thread(handler, message)

    return in_thread
