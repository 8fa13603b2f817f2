"""The messages of one member, from their delivery to their ack: what arrived, what may start, what is let go of.

A dispatcher runs the handlers, `settlement` says what becomes of each message. This is what the member's consumer talks
to while it is taken, moved, reset, lost and left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from keylane.core.lanes import DONE, Lanes, State
from keylane.dispatch import Dispatcher, HandlerCall
from keylane.errors import HandlerCrashed
from keylane.groups.handler_options import LANES, Crowded, Handler, HandlerOptions
from keylane.groups.message import GroupMessage
from keylane.groups.settlement import Acks, Settlement
from keylane.retrying import backoff_s

_LOOK_EVERY_S = 0.1


class CrowdedLanes:
    """Looks for lanes that hold at least `crowd` messages, and tells of each once, until it does not any more."""

    def __init__(self, crowd: int, on_crowded: Crowded | None) -> None:
        self._crowd = crowd
        self._on_crowded = on_crowded
        self._known: dict[Hashable, int] = {}
        self._looked_at = 0.0

    def look_soon(self, lanes: Lanes[GroupMessage]) -> None:
        """For whoever calls often."""
        if len(lanes) >= self._crowd and time.monotonic() > self._looked_at + _LOOK_EVERY_S:
            self.look(lanes)

    def look(self, lanes: Lanes[GroupMessage]) -> None:
        if len(lanes) < self._crowd:
            return
        self._looked_at = time.monotonic()
        before = self._known
        self._known = {key: length for key, length in lanes.lengths().items() if length >= self._crowd}
        for key, length in self._known.items():
            if key not in before:
                self._tell(next(entry.item for entry in lanes if entry.key == key), length)

    def _tell(self, message: GroupMessage, length: int) -> None:
        _log.warning(
            "%d messages of key %r wait in one lane, half of all that may be in flight: soon nothing else is "
            "delivered. Raise max_ack_pending, or make its handler quicker",
            length,
            message.key,
        )
        if self._on_crowded is not None:
            try:
                self._on_crowded(message, length)
            except Exception:  # noqa: BLE001 - a hook may raise anything
                _log.exception("the hook on_crowded failed")


_log = logging.getLogger("keylane.groups")

Which = Callable[[GroupMessage], bool]

_OWED_S = 2.0


class MessageProcessor:
    """The messages of one member."""

    def __init__(self, handler: Handler, terms: HandlerOptions, name: str) -> None:
        """`name`: whose messages these are, for errors and logs."""
        terms.check()
        self._call: HandlerCall[GroupMessage] = HandlerCall(
            handler,
            concurrency=terms.concurrency,
            executor=terms.executor,
            time_limit_s=terms.time_limit_s,
            lend=_lent_to_a_thread,
        )
        self._lane_of = LANES[terms.order]
        self._terms = terms
        self._acks = Acks()
        self.may_start: Callable[[], bool] = lambda: True
        """Asked before a handler starts after a while of nothing: this process may have stood still."""
        self._settlement = Settlement(terms, self._acks, lambda: self.may_start())  # noqa: PLW0108 - it is set later
        self._dispatcher = self._settlement.dispatcher = Dispatcher(
            self._call.run,
            self._new_lanes(),
            self._settlement,
            name=name,
            concurrency=self._call.concurrency,
            log=_log,
            journal=terms.journal,
            grace_s=terms.grace_s,
        )
        self._crowded = CrowdedLanes(max(2, terms.remember // 4), terms.on_crowded)
        self._old: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._beat: asyncio.TimerHandle | None = None
        self._revoking: asyncio.TimerHandle | None = None
        if terms.acks:
            self._keep_alive()

    def __repr__(self) -> str:
        return f"<MessageProcessor {self._dispatcher!r}>"

    async def start(self, on_crash: Callable[[], None]) -> None:
        """Raises if the handler cannot be called where it is to run. `on_crash`: told when `crash` is there."""
        self._dispatcher.crash.add_done_callback(lambda _: on_crash())
        try:
            await self._call.start()
        except BaseException:
            await self.close()
            raise

    @property
    def crash(self) -> HandlerCrashed | None:
        """Why nothing starts any more: a handler raised what cannot count as a failed try."""
        crash = self._dispatcher.crash
        return crash.result() if crash.done() and not crash.cancelled() else None

    @property
    def _lanes(self) -> Lanes[GroupMessage]:
        return self._dispatcher.lanes

    def offer(self, messages: list[GroupMessage]) -> None:
        """New deliveries. What is known already is not run again."""
        if self._acks.in_doubt:
            self._acks.arrived(messages)
            self._dispatcher.notify()
        lanes = self._lanes
        arrive, lane_of = lanes.arrive, self._lane_of
        for message in messages:
            delivery = message.delivery
            if arrive(delivery.sequence, lane_of(message), message) is DONE and not delivery.settled:
                delivery.ack()
        self._crowded.look_soon(lanes)
        self._dispatcher.wake()

    def pass_over(self, messages: list[GroupMessage]) -> None:
        """Deliveries that must not start here. Those that were handled here are acked, so that nobody gets them."""
        known = [message for message in messages if self._lanes.is_done(message.sequence)]
        self._acks.arrived(known)
        for message in known:
            if not message.delivery.settled:
                message.delivery.ack()
        self._dispatcher.notify()

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
                while not self._dispatcher.is_closed and self._acks.owes(which):
                    await self._dispatcher.some_end()
        except TimeoutError:
            _log.warning("handled messages did not come again within %g s of a reset, to be acked", _OWED_S)

    @property
    def has_messages(self) -> bool:
        """Whether something waits here or is at work."""
        return bool(len(self._lanes))

    def is_done(self, sequence: int) -> bool:
        """Whether this message was handled here not long ago."""
        return self._lanes.is_done(sequence)

    @property
    def highest_done(self) -> int:
        """The highest sequence that was handled here not long ago."""
        return self._lanes.highest_done

    def forget(self, which: Which | None = None) -> list[GroupMessage]:
        """Drop what has not started: it is delivered again, here or to another member. Without acks all is kept."""
        self._settlement.fenced.clear()
        return self._lanes.forget(which) if self._terms.acks else []

    async def let_go(self, which: Which | None = None) -> list[GroupMessage]:
        """Start nothing more (of these) and wait until nothing is at work; returns what was dropped.

        One that fails meanwhile is dropped as well: its next try is another's.
        """
        dropped = self.forget(which)
        while not self._dispatcher.is_closed and self._lanes.running(which):
            await self._dispatcher.some_end()
            dropped += self.forget(which)
        return dropped

    async def finish(self) -> None:
        """Wait until all that arrived is handled: without acks it never comes again."""
        while self._dispatcher.starts and len(self._lanes):
            await self._dispatcher.some_end()

    async def finish_without_gaps(self) -> list[GroupMessage]:
        """Finish all that is older than anything that has begun; returns what was dropped instead.

        A stream with limits delivers again what lies above the oldest message that is not acked. A key whose message
        keeps failing is not waited for.
        """
        edge = max([self._lanes.highest_done, *(entry.sequence for entry in self._dispatcher.at_work)])
        dropped: list[GroupMessage] = []
        while self._dispatcher.starts and len(self._lanes):
            failing = {entry.key for entry in self._lanes if entry.state is State.RETRYING}
            dropped += self._lanes.forget(lambda one: one.sequence > edge or self._lane_of(one) in failing)  # noqa: B023
            if len(self._lanes):
                await self._dispatcher.some_end()
        return dropped + await self.let_go()

    async def room(self, limit: int) -> None:
        """Wait until fewer than this many messages are here."""
        while self._dispatcher.starts and len(self._lanes) >= limit:
            await self._dispatcher.some_end()

    async def start_anew(self) -> None:
        """Forget all that was ever here: another stream counts its sequences from 1 again."""
        await self.let_go()
        self._dispatcher.lanes = self._new_lanes()
        self._acks.forget()

    def revoke(self) -> None:
        """Another instance has the messages now: what is at work here may end within the grace, then it is cancelled.

        A plain function in a thread cannot be ended; its lane waits for it.
        """
        self._acks.forget()
        self._settlement.revoked = {entry: entry.item for entry in self._dispatcher.at_work}
        if self._settlement.revoked and self._revoking is None and self._call.is_cancellable:
            self._revoking = self._loop.call_later(self._terms.grace_s, self._cancel_revoked)

    def _cancel_revoked(self) -> None:
        self._revoking = None
        self._dispatcher.cancel(entry for entry in self._dispatcher.at_work if self._settlement.is_lost(entry))

    async def close(self) -> None:
        """End now: handlers at work are cancelled, and their messages come again, here or elsewhere."""
        for timer in (self._beat, self._revoking):
            if timer is not None:
                timer.cancel()
        await self._dispatcher.close()
        await self._call.close()

    def _new_lanes(self) -> Lanes[GroupMessage]:
        return Lanes(max_tries=self._terms.max_tries, backoff=backoff_s, remember=self._terms.remember)

    def _keep_alive(self) -> None:
        """Messages that wait or are at work for long must not be delivered again meanwhile."""
        here = set()
        for entry in self._lanes:
            here.add(entry.sequence)
            if entry.sequence in self._old and not entry.item.delivery.settled:
                entry.item.delivery.in_progress()
        self._old = here
        self._crowded.look(self._lanes)
        self._beat = self._loop.call_later(self._terms.ack_wait_s / 3, self._keep_alive)


@contextmanager
def _lent_to_a_thread(message: GroupMessage) -> Iterator[None]:
    message.home = asyncio.get_running_loop()
    try:
        yield
    finally:
        message.home = None
