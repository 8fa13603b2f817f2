"""The messages of one member, from their delivery to their ack.

A dispatcher runs the handlers, and `settlement` decides what becomes of each message. The member's consumer offers
deliveries, and stops or drops messages when it is moved, reset, lost or left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter

from keylane.core.lanes import DONE, Lanes, State
from keylane.core.parked_keys import KeyGate
from keylane.dispatch import Dispatcher, HandlerCall, HandlerSlots
from keylane.errors import HandlerCrashed
from keylane.hooks import call_hook
from keylane.processing.handler_options import LANES, Crowded, Gate, Handler, HandlerOptions
from keylane.processing.message import GroupMessage
from keylane.processing.partition_progress import PartitionProgress
from keylane.processing.settlement import Acks, KeyIsParked, Settlement

_log = logging.getLogger("keylane.groups")

Which = Callable[[GroupMessage], bool]

_LOOK_EVERY_S = 0.1
_OWED_S = 2.0
_SMALLEST_CROWD = 10
STALL_S = 1.0


class CrowdedLanes:
    """Reports lanes that hold at least `crowd` messages, each once until it holds fewer.

    With `stalls`, a lane counts only if its first message is still the same a second later: a partition whose window is
    small is often filled by one key, and that is no trouble while the key goes on.
    """

    def __init__(self, crowd: int, on_crowded: Crowded | None) -> None:
        self.crowd = crowd
        self.stalls = False
        self._on_crowded = on_crowded
        self._known: set[Hashable] = set()
        self._firsts: dict[Hashable, tuple[int, float]] = {}
        """The first message of each crowded lane that was not reported, and since when it is the first."""
        self._looked_at = 0.0

    def look_soon(self, lanes: Lanes[GroupMessage]) -> bool:
        """Like `look`, but does nothing if it looked shortly before."""
        due = len(lanes) >= self.crowd and time.monotonic() > self._looked_at + _LOOK_EVERY_S
        return due and self.look(lanes)

    def look(self, lanes: Lanes[GroupMessage]) -> bool:
        """Returns whether to look again in `STALL_S`: a lane may have stalled."""
        if len(lanes) < self.crowd:
            return False
        now = self._looked_at = time.monotonic()
        crowded = {key: length for key, length in lanes.lengths().items() if length >= self.crowd}
        self._known &= crowded.keys()
        before, self._firsts = self._firsts, {}
        for key in crowded.keys() - self._known:
            first = min((entry for entry in lanes if entry.key == key), key=attrgetter("sequence"))
            sequence, since = before.get(key, (first.sequence, now))
            if self.stalls and (sequence != first.sequence or now < since + STALL_S):
                self._firsts[key] = first.sequence, since if sequence == first.sequence else now
            else:
                self._known.add(key)
                self._report(first.item, crowded[key])
        return bool(self._firsts)

    def _report(self, message: GroupMessage, length: int) -> None:
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


class MessageProcessor:
    """The messages of one member."""

    def __init__(
        self,
        call: HandlerCall[GroupMessage],
        options: HandlerOptions,
        name: str,
        *,
        on_crash: Callable[[], None],
        slots: HandlerSlots | None = None,
    ) -> None:
        """`call`: made by `handler_call`, and closed by whoever made it.

        `name`: whose messages these are, for errors and logs. `on_crash`: called when `crash` is set. `slots`: shared
        with other processors.
        """
        self._call = call
        self._lane_of = LANES[options.order]
        self._options = options
        self._acks = Acks()
        self.may_start: Callable[[], bool] = lambda: True
        """Called before a handler starts after an idle time, because this process may have stood still, and before
        every start while it is guarded."""
        self._settlement = Settlement(options, self._acks, lambda: self.may_start())  # noqa: PLW0108 - it is set later
        lanes = self._new_lanes()
        self._is_acked = options.commits == "message"
        self.progress: PartitionProgress | None = None
        """How far the messages are handled; None if nobody asks for it."""
        if options.tracks_position or not self._is_acked:
            self.progress = PartitionProgress(
                lanes,
                commits=not self._is_acked,
                may_commit=lambda: self.may_start(),  # noqa: PLW0108 - as above
            )
        self._dispatcher = self._settlement.dispatcher = Dispatcher(
            self._call.run,
            lanes,
            self._settlement,
            name=name,
            concurrency=self._call.concurrency,
            log=_log,
            journal=options.journal,
            slots=slots,
            grace_s=options.grace_s,
            on_idle=self.progress.commit if self.progress is not None and not self._is_acked else None,
            on_returned=options.on_returned,
            on_outcome=options.on_outcome,
        )
        self._dispatcher.crash.add_done_callback(lambda _: on_crash())
        self._crowded = CrowdedLanes(max(2, options.remember // 4), options.on_crowded)
        self._old: set[int] = set()
        self._beside: dict[asyncio.Task[None], GroupMessage] = {}
        self._loop = asyncio.get_running_loop()
        self._beat: asyncio.TimerHandle | None = None
        self._revoking: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        if options.acks:
            self._keep_alive()

    def __repr__(self) -> str:
        return f"<MessageProcessor {self._dispatcher!r}>"

    @property
    def crash(self) -> HandlerCrashed | None:
        """The error that stopped all handlers: one of them raised what does not count as a failed try."""
        crash = self._dispatcher.crash
        return crash.result() if crash.done() and not crash.cancelled() else None

    @property
    def _lanes(self) -> Lanes[GroupMessage]:
        return self._dispatcher.lanes

    def guard(self, guarded: bool) -> None:
        """Ask `may_start` before every start. Call it again when the answer may have changed."""
        self._dispatcher.guard(guarded)

    def offer(self, messages: list[GroupMessage]) -> None:
        """Take new deliveries. A message that is already here is not run again."""
        if self._acks.in_doubt:
            self._acks.arrived(messages)
            self._dispatcher.notify()
        lanes = self._lanes
        arrive, lane_of, is_acked = lanes.arrive, self._lane_of, self._is_acked
        if self.progress is not None:
            messages = self._above_position(messages, self.progress)
        for message in messages:
            delivery = message.delivery
            if arrive(delivery.sequence, lane_of(message), message) is DONE and is_acked and not delivery.settled:
                delivery.ack()
        if self._crowded.look_soon(lanes) and self._looking is None:
            self._looking = self._loop.call_later(STALL_S, self._look_again)
        self._dispatcher.wake()

    def _above_position(self, messages: list[GroupMessage], progress: PartitionProgress) -> list[GroupMessage]:
        """Those that are not known to be handled. The others come from a consumer that went back; they are acked."""
        progress.arrived(messages)
        position = progress.position
        if messages[0].delivery_sequence > position:
            return messages
        known = [message for message in messages if message.delivery_sequence <= position]
        for message in known:
            if self._is_acked and not message.delivery.settled:
                message.delivery.ack()
        progress.passed(len(known))
        self.commit()
        return [message for message in messages if message.delivery_sequence > position]

    def pass_over(self, messages: list[GroupMessage]) -> None:
        """Take deliveries that must not start here. Those that were handled here are acked."""
        known = [message for message in messages if self._lanes.is_done(message.delivery_sequence)]
        if self.progress is not None:
            self.progress.arrived(messages)
            for message in messages:
                if message not in known and message.delivery_sequence not in self._lanes:
                    self._lanes.drop(message.delivery_sequence)
        if self._is_acked:
            self._acks.arrived(known)
            for message in known:
                if not message.delivery.settled:
                    message.delivery.ack()
        else:
            self.commit()
        self._dispatcher.notify()

    @contextmanager
    def around_reset(self) -> Iterator[None]:
        """Hold back acks that would not count while the consumer is reset."""
        call_hook(self._options.on_reset, log=_log, who=self)
        with self.progress.around_reset() if self.progress is not None else nullcontext():
            if not self._is_acked:
                yield
                return
            with self._acks.around_reset(lambda: [entry.sequence for entry in self._lanes]):
                yield

    def forget_acks(self) -> None:
        """Forget the acks that are held back: their messages are not delivered here again."""
        self._acks.forget()
        if self.progress is not None:
            self.progress.forget()

    def end_run(self) -> None:
        """What was delivered and not acked is delivered again: its acks would not count."""
        if self.progress is not None:
            self.progress.end_run()

    def commit(self) -> None:
        """Commit the handled prefix now, where it is committed at all."""
        if self.progress is not None and not self._is_acked:
            self.progress.commit()

    async def acks_sent(self, which: Which | None = None) -> None:
        """Wait until no ack (of these) is held back. Gives up after 2 s, because the message may be gone."""
        try:
            async with asyncio.timeout(_OWED_S):
                while not self._dispatcher.is_closed and self._owes(which):
                    await self._dispatcher.some_end()
        except TimeoutError:
            _log.warning("handled messages were not delivered again within %g s of a reset, to be acked", _OWED_S)

    def _owes(self, which: Which | None) -> bool:
        if self._is_acked:
            return self._acks.owes(which)
        self.commit()
        return self.progress is not None and self.progress.owes

    @property
    def in_flight(self) -> int:
        """How many messages wait or run here, or are handled and not committed."""
        here = len(self._lanes)
        return here if self._is_acked or self.progress is None else max(here, self.progress.uncommitted)

    def call_at_low_water(self, refill: Callable[[], None]) -> None:
        """Call this when `in_flight` has fallen to `low_water`; where a prefix is committed, after every commit."""
        if self.progress is not None and not self._is_acked:
            self.progress.committed = refill
        else:
            self._lanes.on_low_water = refill

    def set_window(self, size: int, low_water: int) -> None:
        """So many messages may be in flight here now, and with so few `call_at_low_water` is due."""
        self._lanes.low_water = low_water
        self._crowded.crowd = max(_SMALLEST_CROWD, size // 2)
        self._crowded.stalls = True

    @property
    def has_messages(self) -> bool:
        """Whether a message waits or runs here."""
        return bool(len(self._lanes))

    @property
    def lowest_waiting(self) -> int | None:
        """The lowest sequence that is here and not handled."""
        return min((entry.sequence for entry in self._lanes), default=None)

    def is_done(self, sequence: int) -> bool:
        """Whether this message was handled here recently."""
        return self._lanes.is_done(sequence)

    @property
    def highest_done(self) -> int:
        """The highest sequence that was handled here recently."""
        return self._lanes.highest_done

    def forget(self, which: Which | None = None) -> list[GroupMessage]:
        """Drop messages that have not started: they are delivered again. Without acks, keep all."""
        self._settlement.fenced.clear()
        return self._lanes.forget(which) if self._options.acks else []

    async def let_go(self, which: Which | None = None) -> list[GroupMessage]:
        """Start no more (of these), wait until none runs, and return those that were dropped.

        A message that fails meanwhile is dropped too.
        """
        dropped = self.forget(which)
        while not self._dispatcher.is_closed and (self._lanes.running(which) or self._runs_beside(which)):
            await self._dispatcher.some_end()
            dropped += self.forget(which)
        return dropped

    async def run_beside(self, message: GroupMessage, work: Coroutine[object, object, None]) -> None:
        """Do work on a message that no lane has, such as one of a key that is released.

        Whoever gives its partition away waits for the end of it, as for a handler.
        """
        task = asyncio.create_task(work)
        self._beside[task] = message
        task.add_done_callback(self._ended_beside)
        await task

    def _ended_beside(self, task: asyncio.Task[None]) -> None:
        self._beside.pop(task, None)
        self._dispatcher.notify()

    def _runs_beside(self, which: Which | None) -> bool:
        return any(which is None or which(message) for message in self._beside.values())

    async def finish(self) -> None:
        """Wait until everything that arrived is handled: without acks it is never delivered again."""
        while self._dispatcher.starts and len(self._lanes):
            await self._dispatcher.some_end()

    async def finish_without_gaps(self) -> list[GroupMessage]:
        """Finish all messages that are older than one that has started; return those that were dropped.

        A stream with limits delivers again everything after the oldest message that is not acked. Does not wait for a
        key whose message keeps failing.
        """
        edge = max([self._lanes.highest_done, *(entry.sequence for entry in self._dispatcher.at_work)])
        dropped: list[GroupMessage] = []
        while self._dispatcher.starts and len(self._lanes):
            failing = {entry.key for entry in self._lanes if entry.state is State.RETRYING}
            dropped += self._lanes.forget(lambda one: one.delivery_sequence > edge or self._lane_of(one) in failing)  # noqa: B023
            if len(self._lanes):
                await self._dispatcher.some_end()
        return dropped + await self.let_go()

    async def room(self, limit: int) -> None:
        """Wait until fewer than this many messages are here."""
        while self._dispatcher.starts and len(self._lanes) >= limit:
            await self._dispatcher.some_end()

    async def start_anew(self) -> None:
        """Forget everything: the stream was created again and counts its sequences from 1."""
        await self.let_go()
        self._dispatcher.lanes = self._new_lanes()
        self._acks.forget()

    def revoke(self) -> None:
        """Another instance has the messages now: handlers that run here are cancelled after the grace period.

        A plain function in a thread cannot be cancelled; its lane waits for it.
        """
        self._acks.forget()
        if self._beside:
            self._loop.call_later(self._options.grace_s, self._cancel_beside)
        self._settlement.revoked = {entry: entry.item for entry in self._dispatcher.at_work}
        if self._settlement.revoked and self._revoking is None and self._call.is_cancellable:
            self._revoking = self._loop.call_later(self._options.grace_s, self._cancel_revoked)

    def _cancel_beside(self) -> None:
        for task in list(self._beside):
            task.cancel()

    def _cancel_revoked(self) -> None:
        self._revoking = None
        self._dispatcher.cancel(entry for entry in self._dispatcher.at_work if self._settlement.is_lost(entry))

    async def close(self) -> None:
        """End now: running handlers are cancelled, and their messages are delivered again, here or elsewhere."""
        for timer in (self._beat, self._revoking, self._looking):
            if timer is not None:
                timer.cancel()
        self._cancel_beside()
        await self._dispatcher.close()

    def _new_lanes(self) -> Lanes[GroupMessage]:
        return Lanes(max_tries=self._options.max_tries, backoff=self._options.backoff, remember=self._options.remember)

    def _look_again(self) -> None:
        again = self._crowded.look(self._lanes)
        self._looking = self._loop.call_later(STALL_S, self._look_again) if again else None

    def _keep_alive(self) -> None:
        """Tell the server of messages that wait or run for long, so that it does not deliver them again."""
        if self._is_acked:
            here = set()
            for entry in self._lanes:
                here.add(entry.sequence)
                if entry.sequence in self._old and not entry.item.delivery.settled:
                    entry.item.delivery.in_progress()
            self._old = here
        elif self.progress is not None:
            self.progress.keep_alive()
        self._crowded.look(self._lanes)
        self._beat = self._loop.call_later(self._options.ack_wait_s / 3, self._keep_alive)


def handler_call(handler: Handler, options: HandlerOptions) -> HandlerCall[GroupMessage]:
    """How a handler is called with a message. Start it first, and close it after all processors that use it."""
    options.check()
    call = HandlerCall(
        handler,
        concurrency=options.concurrency,
        executor=options.executor,
        time_limit_s=options.time_limit_s,
        lend=_lent_to_a_thread,
    )
    if options.gate is not None:
        call.run = _gated(call.run, options.gate)
    return call


def _gated(run: Callable[[GroupMessage], Awaitable[object]], gate: Gate) -> Callable[[GroupMessage], Awaitable[object]]:
    async def gated(message: GroupMessage) -> object:
        passed = await gate(message)
        if passed is KeyGate.RUN:
            return await run(message)
        if passed is KeyGate.PARK:
            raise KeyIsParked(f"an earlier message of key {message.key!r} is parked")
        return None

    return gated


@contextmanager
def _lent_to_a_thread(message: GroupMessage) -> Iterator[None]:
    message.home = asyncio.get_running_loop()
    try:
        yield
    finally:
        message.home = None
