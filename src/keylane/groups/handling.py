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
from dataclasses import dataclass
from typing import Any, Literal

from keylane.core.lanes import Arrival, Entry, Lanes
from keylane.errors import InvalidInput
from keylane.groups.message import GroupMessage, Outcome

_log = logging.getLogger("keylane.groups")

Order = Literal["key", "partition", "strict", "none"]
Handler = Callable[[GroupMessage], Awaitable[None]] | Callable[[GroupMessage], None]
Failure = Callable[[GroupMessage, BaseException, int], None]
Which = Callable[[GroupMessage], bool]

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0
_CANCEL_S = 2.0

_LANES: dict[Order, Callable[[GroupMessage], Hashable]] = {
    "key": lambda message: (message.place.partition, message.place.key),
    "partition": lambda message: message.place.partition,
    "strict": lambda _: 0,
    "none": lambda message: message.sequence,
}


def backoff_s(tries: int) -> float:
    return min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(tries - 1, 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How the messages of a member are handled."""

    order: Order
    concurrency: int
    ack_wait_s: float
    remember: int
    manual_ack: bool = False
    acks: bool = True
    """False for a consumer without acks: what was delivered never comes again."""
    on_failure: Failure | None = None

    def check(self) -> None:
        if self.order not in _LANES:
            raise InvalidInput(f"order is {self.order!r}: use one of {', '.join(_LANES)}")
        if self.concurrency < 1:
            raise InvalidInput(f"concurrency is {self.concurrency}: at least 1 handler must be allowed to run")

    @property
    def server_retries(self) -> bool:
        """A failed message goes back to the server: nothing waits for it."""
        return self.order == "none" and self.acks


class Handling:
    """The messages of one member, from their delivery to their ack."""

    def __init__(self, handler: Handler, terms: Terms) -> None:
        terms.check()
        self._run_handler = _as_coroutine(handler)
        self._lane_of = _LANES[terms.order]
        self._terms = terms
        self._lanes = self._new_lanes()
        self._loop = asyncio.get_running_loop()
        self._workers: set[asyncio.Task[None]] = set()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._nudge: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self._old: set[int] = set()
        self._closed = False
        if terms.acks:
            self._keep_alive()

    def __repr__(self) -> str:
        return f"<Handling {self._lanes!r}, {len(self._workers)} workers>"

    def offer(self, messages: list[GroupMessage]) -> None:
        """New deliveries. What is known already is not run again."""
        lanes = self._lanes
        for message in messages:
            known = lanes.arrive(message.sequence, self._lane_of(message), message) is Arrival.DONE
            if known and not message.delivery.settled:
                message.delivery.ack()
        self._wake()

    def ack_known(self, messages: list[GroupMessage]) -> list[GroupMessage]:
        """Ack what was handled here before and came again; returns it."""
        known = [one for one in messages if one.sequence in self._lanes._done]
        for one in known:
            if not one.delivery.settled:
                one.delivery.ack()
        return known

    def forget(self, which: Which | None = None) -> list[GroupMessage]:
        """Drop what has not started: it is delivered again, here or to another member. Without acks all is kept."""
        return self._lanes.forget(which) if self._terms.acks else []

    async def finish(self, which: Which | None = None) -> None:
        """Wait until nothing (of these) is at work. Without acks: until all that arrived is handled."""
        while not self._closed and (self._lanes.running(which) if self._terms.acks else len(self._lanes)):
            await self._some_end()

    async def room(self, limit: int) -> None:
        """Wait until fewer than this many messages are here."""
        while not self._closed and len(self._lanes) >= limit:
            await self._some_end()

    async def start_anew(self) -> None:
        """Forget all that was ever here: another stream counts its sequences from 1 again."""
        self.forget()
        await self.finish()
        self._lanes = self._new_lanes()

    async def close(self) -> None:
        """End now: handlers at work are cancelled, and their messages come again, here or elsewhere."""
        self._closed = True
        self._quiet.set()
        for timer in (self._nudge, self._retry, self._beat):
            if timer is not None:
                timer.cancel()
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=_CANCEL_S)
            if late:
                _log.error("%d handlers did not end within %g s of being cancelled", len(late), _CANCEL_S)

    def _new_lanes(self) -> Lanes[GroupMessage]:
        return Lanes(max_tries=None, backoff=backoff_s, remember=self._terms.remember)

    async def _some_end(self) -> None:
        self._quiet.clear()
        await self._quiet.wait()

    # ---- workers ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._closed or not self._lanes.ready:
            return
        while self._idle:
            waiter = self._idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        if len(self._workers) < self._terms.concurrency:
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    def _wake_another(self) -> None:
        self._nudge = None
        self._wake()

    async def _work(self) -> None:
        while not self._closed:
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
        given = entry.item
        try:
            await self._run_handler(given)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self._lanes.release(entry)
                self._quiet.set()
                raise
            self._failed(entry, given, error)  # the handler's own affair: something it waited for was cancelled
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; the message is tried again
            self._failed(entry, given, error)
        else:
            self._returned(entry, given)
        self._quiet.set()

    def _returned(self, entry: Entry[GroupMessage], given: GroupMessage) -> None:
        if not self._terms.manual_ack or given.outcome is Outcome.DONE:
            self._done(entry)
        else:
            self._again(entry, 0.0 if given.outcome is Outcome.AGAIN else None)

    def _done(self, entry: Entry[GroupMessage]) -> None:
        # The newest delivery is the one to settle: a reset voids the earlier ones.
        if self._terms.acks and not entry.item.delivery.settled:
            entry.item.delivery.ack()
        self._lanes.finished(entry)

    def _again(self, entry: Entry[GroupMessage], delay_s: float | None) -> None:
        """The server is to deliver it again, after this delay or (None) when its ack wait is over; its lane goes on."""
        if delay_s is not None and not entry.item.delivery.settled:
            entry.item.delivery.nak(delay_s)
        self._lanes.release(entry)

    def _failed(self, entry: Entry[GroupMessage], given: GroupMessage, error: BaseException) -> None:
        if given.outcome is Outcome.DONE:
            self._done(entry)
            self._report(given, error, entry.tries + 1)
        elif given.outcome is Outcome.AGAIN or self._terms.server_retries:
            self._again(entry, backoff_s(given.delivered_count))
            self._report(given, error, given.delivered_count)
        else:
            retry_at = self._lanes.failed(entry, self._loop.time())
            assert retry_at is not None, "without max_tries a message is never given up"
            self._schedule_retry(retry_at)
            self._report(given, error, entry.tries)

    def _report(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        if self._terms.on_failure is None:
            _log.warning("handler failed on %r (try %d): %r", message, tries, error)
            return
        try:
            self._terms.on_failure(message, error, tries)
        except Exception:  # noqa: BLE001 - a hook may raise anything, and the message must not wait for it
            _log.exception("the hook on_failure failed; the message is tried again all the same")

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
                entry.item.delivery.in_progress()
        self._old = here
        self._beat = self._loop.call_later(self._terms.ack_wait_s / 3, self._keep_alive)


def _as_coroutine(handler: Handler) -> Callable[[GroupMessage], Awaitable[Any]]:
    """A plain function runs in a thread, so that it never blocks the event loop."""
    if not callable(handler):
        raise InvalidInput(f"handler is {handler!r}: give a function of one message")
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
        return handler  # type: ignore[return-value]  # just seen

    async def in_thread(message: GroupMessage) -> None:
        message.home = asyncio.get_running_loop()
        try:
            result = await asyncio.to_thread(handler, message)
        finally:
            message.home = None
        if inspect.isawaitable(result):
            await result  # a plain function around a coroutine function

    return in_thread
