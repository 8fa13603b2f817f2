"""Runs a member's handler: lanes decide what may start, workers run it, success is acked.

Workers are long-lived tasks. One that finds the next message ready goes on without a turn of the event loop, so a
handler that never waits costs no task per message; one that waits lets the others take over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from keylane.core.lanes import DONE, Entry, Lanes, State
from keylane.errors import Fenced, KeylaneError, LedgerMismatch
from keylane.groups.acks import Acks
from keylane.groups.calling import Handler, as_coroutine, is_coroutine_function
from keylane.groups.message import GroupMessage, Outcome
from keylane.groups.terms import LANES, Terms
from keylane.retries import RetryTimer, backoff_s

_log = logging.getLogger("keylane.groups")

Which = Callable[[GroupMessage], bool]

_CANCEL_S = 2.0
_STANDSTILL_S = 0.25
_LOOK_AGAIN_S = 0.01
_CROWDS_EVERY_S = 0.1
_OWED_S = 2.0

_DONE = "done"
_CANCELLED = "cancelled"
_SETTLED = (Outcome.DONE, Outcome.TERMINATED)


class Handling:
    """The messages of one member, from their delivery to their ack."""

    def __init__(self, handler: Handler, terms: Terms) -> None:
        terms.check()
        self._in_threads = not is_coroutine_function(handler)
        self._run_handler = as_coroutine(handler, terms.time_limit_s)
        self._lane_of = LANES[terms.order]
        self._terms = terms
        self._plain = terms.acks and not terms.manual_ack and terms.journal is None
        self._lanes = self._new_lanes()
        self._loop = asyncio.get_running_loop()
        self._workers: set[asyncio.Task[None]] = set()
        self._at_work: dict[asyncio.Task[None], Entry[GroupMessage]] = {}
        self._idle: deque[asyncio.Future[None]] = deque()
        self._nudge: asyncio.Handle | None = None
        self._retry = RetryTimer(self._due, self._wake)
        self._beat: asyncio.TimerHandle | None = None
        self._acks = Acks()
        self._quiet = asyncio.Event()
        self._ends_awaited = 0
        self._old: set[int] = set()
        self._closed = False
        self._crowd = max(2, terms.remember // 4)
        self._crowds: dict[Hashable, int] = {}
        self._crowds_seen_at = 0.0
        self._fenced: set[int] = set()
        self._revoked: dict[Entry[GroupMessage], GroupMessage] = {}
        self._revoking: asyncio.TimerHandle | None = None
        self._alive_at = time.monotonic()
        self.may_start: Callable[[], bool] = lambda: True
        """Asked before a handler starts after a while of nothing: this process may have stood still."""
        if terms.acks:
            self._keep_alive()

    def __repr__(self) -> str:
        return f"<Handling {self._lanes!r}, {len(self._workers)} workers>"

    def offer(self, messages: list[GroupMessage]) -> None:
        """New deliveries. What is known already is not run again."""
        if self._acks.in_doubt:
            self._acks.arrived(messages)
            self._quiet.set()
        arrive, lane_of = self._lanes.arrive, self._lane_of
        for message in messages:
            delivery = message.delivery
            if arrive(delivery.sequence, lane_of(message), message) is DONE and not delivery.settled:
                delivery.ack()
        if len(self._lanes) >= self._crowd and time.monotonic() > self._crowds_seen_at + _CROWDS_EVERY_S:
            self._look_for_crowds()
        self._wake()

    def pass_over(self, messages: list[GroupMessage]) -> None:
        """Deliveries that must not start here. Those that were handled here are acked, so that nobody gets them."""
        known = [message for message in messages if self._lanes.is_done(message.sequence)]
        self._acks.arrived(known)
        for message in known:
            if not message.delivery.settled:
                message.delivery.ack()
        self._quiet.set()

    @contextmanager
    def around_reset(self) -> Iterator[None]:
        """While the consumer is reset: acks that would not count are kept back."""
        with self._acks.around_reset(lambda: [entry.sequence for entry in self._lanes]):
            yield

    def forget_acks(self) -> None:
        """Nothing comes again from the consumer that they were kept back for."""
        self._acks.forget()

    async def acks_sent(self, which: Which | None = None) -> None:
        """Wait until no ack (of these) is kept back; gives up after a while, as the message may be gone."""
        try:
            async with asyncio.timeout(_OWED_S):
                while not self._closed and self._acks.owes(which):
                    await self._some_end()
        except TimeoutError:
            _log.warning("handled messages did not come again within %g s of a reset, to be acked", _OWED_S)

    def is_done(self, sequence: int) -> bool:
        """Whether this message was handled here not long ago."""
        return self._lanes.is_done(sequence)

    @property
    def highest_done(self) -> int:
        """The highest sequence that was handled here not long ago."""
        return self._lanes.highest_done

    def forget(self, which: Which | None = None) -> list[GroupMessage]:
        """Drop what has not started: it is delivered again, here or to another member. Without acks all is kept."""
        self._fenced.clear()
        return self._lanes.forget(which) if self._terms.acks else []

    async def let_go(self, which: Which | None = None) -> list[GroupMessage]:
        """Start nothing more (of these) and wait until nothing is at work; returns what was dropped.

        One that fails meanwhile is dropped as well: its next try is another's.
        """
        dropped = self.forget(which)
        while not self._closed and self._lanes.running(which):
            await self._some_end()
            dropped += self.forget(which)
        return dropped

    async def finish(self) -> None:
        """Wait until all that arrived is handled: without acks it never comes again."""
        while not self._closed and len(self._lanes):
            await self._some_end()

    async def finish_without_gaps(self) -> list[GroupMessage]:
        """Finish all that is older than anything that has begun; returns what was dropped instead.

        A stream with limits delivers again what lies above the oldest message that is not acked. A key whose message
        keeps failing is not waited for.
        """
        edge = max([self._lanes.highest_done, *(entry.sequence for entry in self._at_work.values())])
        dropped: list[GroupMessage] = []
        while not self._closed and len(self._lanes):
            failing = {entry.key for entry in self._lanes if entry.state is State.RETRYING}
            dropped += self._lanes.forget(lambda one: one.sequence > edge or self._lane_of(one) in failing)  # noqa: B023
            if len(self._lanes):
                await self._some_end()
        return dropped

    async def room(self, limit: int) -> None:
        """Wait until fewer than this many messages are here."""
        while not self._closed and len(self._lanes) >= limit:
            await self._some_end()

    async def start_anew(self) -> None:
        """Forget all that was ever here: another stream counts its sequences from 1 again."""
        await self.let_go()
        self._lanes = self._new_lanes()
        self._acks.forget()

    def revoke(self) -> None:
        """Another instance has the messages now: what is at work here may end within the grace, then it is cancelled.

        A plain function in a thread cannot be ended; its lane waits for it.
        """
        self._acks.forget()
        self._revoked = {entry: entry.item for entry in self._at_work.values()}
        if self._revoked and self._revoking is None and not self._in_threads:
            self._revoking = self._loop.call_later(self._terms.grace_s, self._cancel_revoked)

    def _cancel_revoked(self) -> None:
        self._revoking = None
        for worker, entry in self._at_work.items():
            if self._is_lost(entry):
                worker.cancel()

    def _is_lost(self, entry: Entry[GroupMessage]) -> bool:
        """Revoked, and not delivered here again since."""
        return self._revoked.get(entry) is entry.item

    async def close(self) -> None:
        """End now: handlers at work are cancelled, and their messages come again, here or elsewhere."""
        self._closed = True
        self._quiet.set()
        self._retry.cancel()
        for timer in (self._nudge, self._beat, self._revoking):
            if timer is not None:
                timer.cancel()
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=_CANCEL_S)
            if late:
                _log.error("%d handlers did not end within %g s of being cancelled", len(late), _CANCEL_S)

    def _new_lanes(self) -> Lanes[GroupMessage]:
        return Lanes(
            max_tries=self._terms.max_tries,
            backoff=backoff_s,
            remember=self._terms.remember,
        )

    async def _some_end(self) -> None:
        self._ends_awaited += 1
        self._quiet.clear()
        try:
            await self._quiet.wait()
        finally:
            self._ends_awaited -= 1

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
        me = asyncio.current_task()
        assert me is not None
        at_work, run, journal = self._at_work, self._run_handler, self._terms.journal
        while not self._closed:
            now = time.monotonic()
            if now - self._alive_at > _STANDSTILL_S and not self.may_start():
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            self._alive_at = now
            entry = self._lanes.take()
            if entry is None:
                waiter = self._loop.create_future()
                self._idle.append(waiter)
                await waiter
                continue
            if self._nudge is None and self._lanes.ready:
                # If this handler waits, the next turn of the loop lets another worker go on.
                self._nudge = self._loop.call_soon(self._wake_another)
            at_work[me] = entry
            given = entry.item
            started_ns = journal.now_ns() if journal is not None else 0
            try:
                await run(given)
            except BaseException as error:  # noqa: BLE001 - a handler may raise anything; the message is tried again
                outcome = await self._raised(me, entry, given, error)
            else:
                outcome = self._returned(entry, given)
            del at_work[me]
            if journal is not None:
                journal.note(given, outcome, started_ns, journal.now_ns())
            if self._ends_awaited:
                self._quiet.set()
            if self._revoked or outcome is _CANCELLED:
                self._end_if_cancelled(me, entry)

    async def _raised(
        self, me: asyncio.Task[None], entry: Entry[GroupMessage], given: GroupMessage, error: BaseException
    ) -> str:
        """What becomes of a message whose handler did not return."""
        if not me.cancelling():
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise error  # the program is to end
            try:
                # A cancellation that is not ours is the handler's own affair: something it waited for was cancelled.
                return await self._failed(entry, given, error)
            except asyncio.CancelledError:
                _log.debug("%r: cancelled while it was put away", given)
        self._lanes.release(entry)
        if entry in self._revoked:
            _log.warning("%r: its handler was cancelled, as another instance has the message now", given)
        return _CANCELLED

    def _end_if_cancelled(self, me: asyncio.Task[None], entry: Entry[GroupMessage]) -> None:
        """If this message alone was revoked, the worker goes on: what comes next is not concerned."""
        if self._revoked.pop(entry, None) is not None and not self._closed:
            while me.cancelling():
                me.uncancel()
        elif me.cancelling():
            raise asyncio.CancelledError

    def _returned(self, entry: Entry[GroupMessage], given: GroupMessage) -> str:
        if self._plain and not self._acks.in_doubt:
            # `_done` in the usual case, written out: it runs once for every message.
            delivery = entry.item.delivery
            if not delivery.settled:
                delivery.ack()
            self._lanes.finished(entry)
            return _DONE
        if not self._terms.manual_ack or given.outcome in _SETTLED:
            return self._done(entry, given)
        self._again(entry, 0.0 if given.outcome is Outcome.AGAIN else None)
        return "returned"

    def _done(self, entry: Entry[GroupMessage], given: GroupMessage) -> str:
        # The newest delivery is the one to settle: a reset voids the earlier ones.
        delivery = entry.item.delivery
        if self._acks.in_doubt:
            self._acks.done(entry.item)
        elif self._terms.acks and not delivery.settled:
            delivery.ack()
        self._lanes.finished(entry)
        return _DONE if given.outcome is not Outcome.TERMINATED else "terminated"

    def _again(self, entry: Entry[GroupMessage], delay_s: float | None) -> None:
        """The server is to deliver it again, after this delay or (None) when its ack wait is over; its lane goes on."""
        if delay_s is not None and not entry.item.delivery.settled:
            entry.item.delivery.nak(delay_s)
        self._lanes.release(entry)

    async def _failed(self, entry: Entry[GroupMessage], given: GroupMessage, error: BaseException) -> str:
        if given.outcome in _SETTLED:
            self._report(given, error, entry.tries + 1)
            return self._done(entry, given)
        if self._is_lost(entry):
            _log.info("%r failed after another instance took over: %r", given, error)
            self._lanes.release(entry)
            return _CANCELLED
        if isinstance(error, Fenced):
            self._tell_fenced(given, error)
            self._retry.set(self._lanes.postponed(entry, self._loop.time(), backoff_s(1)))
            return "failed"
        return await self._try_again(entry, given, error)

    async def _try_again(self, entry: Entry[GroupMessage], given: GroupMessage, error: BaseException) -> str:
        """Later, here or by the server; unless it had all its tries."""
        if given.outcome is Outcome.AGAIN or self._terms.server_retries:
            tries = given.delivered_count
            self._report(given, error, tries)
            if self._terms.max_tries is not None and tries >= self._terms.max_tries:
                return await self._give_up(entry, error, tries)
            self._again(entry, backoff_s(tries))
            return "failed"
        retry_at = self._lanes.failed(entry, self._loop.time())
        self._report(given, error, entry.tries)
        if retry_at is None:
            return await self._give_up(entry, error, entry.tries)
        self._retry.set(retry_at)
        return "failed"

    async def _give_up(self, entry: Entry[GroupMessage], error: BaseException, tries: int) -> str:
        """It had all its tries. Its lane goes on once the message is safe elsewhere."""
        attempt = 0
        while self._terms.give_up is not None:
            try:
                await self._terms.give_up(entry.item, error, tries)
                break
            except KeylaneError as trouble:
                attempt += 1
                pause_s = backoff_s(attempt)
                _log.error("%r cannot be put away, trying again in %g s: %s", entry.item, pause_s, trouble)
                await asyncio.sleep(pause_s)
        if not entry.item.delivery.settled:
            entry.item.delivery.term(f"given up after {tries} tries")
        self._lanes.finished(entry)
        return "dead"

    def _report(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        if self._terms.on_failure is None:
            _log.warning("handler failed on %r (try %d): %r", message, tries, error)
            return
        try:
            self._terms.on_failure(message, error, tries)
        except Exception:  # noqa: BLE001 - a hook may raise anything, and the message must not wait for it
            _log.exception("the hook on_failure failed; the message is tried again all the same")

    def _tell_fenced(self, given: GroupMessage, error: Fenced) -> None:
        """Once for each partition while it is had: every message of it is refused alike, and tried again."""
        is_news = given.partition not in self._fenced and not isinstance(error, LedgerMismatch)  # shown by the member
        self._fenced.add(given.partition)
        _log.log(logging.WARNING if is_news else logging.DEBUG, "%r: %s", given, error)

    def _look_for_crowds(self) -> None:
        """Tell of each lane that has come to hold half of what may be in flight, until it does not any more."""
        self._crowds_seen_at = time.monotonic()
        before = self._crowds
        self._crowds = {key: length for key, length in self._lanes.lengths().items() if length >= self._crowd}
        for key, length in self._crowds.items():
            if key not in before:
                self._tell_crowded(next(entry.item for entry in self._lanes if entry.key == key), length)

    def _tell_crowded(self, message: GroupMessage, length: int) -> None:
        _log.warning(
            "%d messages of key %r wait in one lane, half of all that may be in flight: soon nothing else is "
            "delivered. Raise max_ack_pending, or make its handler quicker",
            length,
            message.key,
        )
        if self._terms.on_crowded is not None:
            try:
                self._terms.on_crowded(message, length)
            except Exception:  # noqa: BLE001 - a hook may raise anything
                _log.exception("the hook on_crowded failed")

    def _due(self, now: float) -> float | None:
        return self._lanes.due(now)  # the lanes of now: a reset makes new ones

    def _keep_alive(self) -> None:
        """Messages that wait or are at work for long must not be delivered again meanwhile."""
        here = set()
        for entry in self._lanes:
            here.add(entry.sequence)
            if entry.sequence in self._old and not entry.item.delivery.settled:
                entry.item.delivery.in_progress()
        self._old = here
        if len(self._lanes) >= self._crowd:
            self._look_for_crowds()
        self._beat = self._loop.call_later(self._terms.ack_wait_s / 3, self._keep_alive)
