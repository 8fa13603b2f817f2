"""Runs a consumer's handler: lanes decide what may start, workers run it.

Owns: the messages of all partitions of one consumer, from the time they are read until their handler has ended. Before
a handler starts its tenure is asked: what may not start waits, or is dropped when the tenure is over. Never writes to a
log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Literal, NamedTuple, TypeAlias

from keylane.core.lanes import Entry, Lanes
from keylane.errors import KeylaneError
from keylane.marshal.logbook import own_clock
from keylane.marshal.message import Failure, GiveUp, Handler, MarshalMessage, as_coroutine
from keylane.marshal.source import SourceRecord
from keylane.marshal.tenure import Tenure
from keylane.retries import RetryTimer, backoff_s

_log = logging.getLogger("keylane.marshal")

Order: TypeAlias = Literal["key", "partition"]

_LOOK_AGAIN_S = 0.05
_LONGEST_TURN_S = 0.02
_CANCEL_S = 2.0


class Job(NamedTuple):
    message: MarshalMessage
    tenure: Tenure


class Crew:
    """The workers of one consumer."""

    def __init__(
        self,
        handler: Handler,
        *,
        concurrency: int,
        order: Order = "key",
        max_tries: int | None = None,
        give_up: GiveUp | None = None,
        on_failure: Failure | None = None,
    ) -> None:
        self._handle = as_coroutine(handler)
        self._concurrency = concurrency
        self._by_key = order == "key"
        self._give_up = give_up
        self._on_failure = on_failure
        self._lanes: Lanes[Job] = Lanes(max_tries=max_tries, backoff=backoff_s, remember=0)
        self._tickets = count(1)
        self._loop = asyncio.get_running_loop()
        self._workers: set[asyncio.Task[None]] = set()
        self._at_work: dict[asyncio.Task[None], Entry[Job]] = {}
        self._idle: deque[asyncio.Future[None]] = deque()
        self._cancelled: set[Entry[Job]] = set()
        self._retry = RetryTimer(self._lanes.due, self._wake)
        self._turn_began = own_clock()
        self._ended = asyncio.Event()
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        """Set when a worker broke: the consumer must end."""

    def __repr__(self) -> str:
        return f"<Crew {self._lanes!r}, {len(self._at_work)} at work>"

    def offer(self, tenure: Tenure, records: Iterable[SourceRecord]) -> None:
        """Messages of a partition, in order."""
        where, token = tenure.where, tenure.token
        for record in records:
            lane: Hashable = (where, record.key) if self._by_key else where
            self._lanes.arrive(next(self._tickets), lane, Job(MarshalMessage(record, where, token), tenure))
        self._wake()

    def drop(self, tenure: Tenure) -> None:
        """Forget what has not started."""
        self._lanes.forget(lambda job: job.tenure is tenure)

    async def let_go(self, tenure: Tenure, grace_s: float) -> bool:
        """Start nothing more of a tenure and wait until nothing of it is at work; then, after the grace, cancel.

        False: handlers were cancelled, or a plain function in a thread goes on.
        """
        self.drop(tenure)
        if await self._quiet(tenure, grace_s):
            return True
        for worker, entry in list(self._at_work.items()):
            if entry.item.tenure is tenure:
                self._cancelled.add(entry)
                worker.cancel()
        if not await self._quiet(tenure, _CANCEL_S):
            _log.error("handlers of %s/%d did not end within %g s of being cancelled", *tenure.where, _CANCEL_S)
        return False

    async def close(self) -> None:
        """End now: handlers at work are cancelled."""
        self._retry.cancel()
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=_CANCEL_S)
            if late:
                _log.error("%d handlers did not end within %g s of being cancelled", len(late), _CANCEL_S)
        if not self.failure.done():
            self.failure.cancel()

    async def _quiet(self, tenure: Tenure, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while self._lanes.running(lambda job: job.tenure is tenure):
                    self._ended.clear()
                    await self._ended.wait()
                    self.drop(tenure)
        except TimeoutError:
            return False
        return True

    # ---- workers ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        wanted = self._lanes.ready
        while wanted and self._idle:
            waiter = self._idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                wanted -= 1
        for _ in range(min(wanted, self._concurrency - len(self._workers))):
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._left)

    def _left(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and (error := worker.exception()) is not None and not self.failure.done():
            self.failure.set_result(error)

    async def _work(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        while True:
            if own_clock() - self._turn_began > _LONGEST_TURN_S:
                await asyncio.sleep(0)  # handlers that never wait must not keep heartbeats from going out
                self._turn_began = own_clock()
            entry = self._lanes.take()
            if entry is None:
                waiter = self._loop.create_future()
                self._idle.append(waiter)
                await waiter
                self._turn_began = own_clock()
                continue
            if not entry.item.tenure.may_start():
                self._put_off(entry)
                continue
            self._at_work[me] = entry
            try:
                await self._run(me, entry)
            except asyncio.CancelledError:
                self._lanes.release(entry)
                if entry not in self._cancelled:
                    raise
                while me.cancelling():
                    me.uncancel()
            finally:
                self._cancelled.discard(entry)
                del self._at_work[me]
                self._ended.set()

    def _put_off(self, entry: Entry[Job]) -> None:
        """It may not start now. If its tenure is over it is another owner's; those behind it come here as well."""
        if entry.item.tenure.is_over:
            self._lanes.release(entry)
        else:
            self._retry.set(self._lanes.postponed(entry, self._loop.time(), _LOOK_AGAIN_S))

    async def _run(self, me: asyncio.Task[None], entry: Entry[Job]) -> None:
        """Run the handler once and see what becomes of its message. Raises only if the worker is cancelled."""
        job = entry.item
        try:
            await self._handle(job.message)
        except (Exception, asyncio.CancelledError) as error:
            if me.cancelling():
                raise asyncio.CancelledError from error
            # A cancellation that is not ours is the handler's own affair: something it waited for was cancelled.
            await self._failed(entry, error)
        else:
            self._finished(entry)

    def _finished(self, entry: Entry[Job]) -> None:
        self._lanes.finished(entry)
        entry.item.tenure.finished(entry.item.message.offset)

    async def _failed(self, entry: Entry[Job], error: BaseException) -> None:
        job = entry.item
        if not job.tenure.retries:
            self._report(job.message, error, 1)
            self._finished(entry)
            return
        retry_at = self._lanes.failed(entry, self._loop.time())
        self._report(job.message, error, entry.tries)
        if retry_at is not None:
            self._retry.set(retry_at)
        elif await self._put_away(entry, error):
            self._finished(entry)
        else:
            self._lanes.release(entry)

    async def _put_away(self, entry: Entry[Job], error: BaseException) -> bool:
        """It had all its tries: its lane goes on once the message is safe elsewhere. False: the tenure is over."""
        message = entry.item.message
        if self._give_up is None:
            _log.error("%r is given up after %d tries: %r", message, entry.tries, error)
            return True
        attempt = 0
        while not entry.item.tenure.is_over:
            try:
                await self._give_up(message, error, entry.tries)
            except KeylaneError as trouble:
                attempt += 1
                _log.error("%r cannot be put away, trying again: %s", message, trouble)
                await asyncio.sleep(backoff_s(attempt))
            else:
                return True
        return False

    def _report(self, message: MarshalMessage, error: BaseException, tries: int) -> None:
        if self._on_failure is None:
            _log.warning("handler failed on %r (try %d): %r", message, tries, error)
            return
        try:
            self._on_failure(message, error, tries)
        except Exception:  # noqa: BLE001 - a hook may raise anything
            _log.exception("the hook on_failure failed")
