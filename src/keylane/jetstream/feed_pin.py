"""The pin of a feed on a `pinned_client` consumer: performs what `core/pin.py` decides.

Sorts every delivery (hand out, hold, drop), resets the consumer on a takeover, asks the server after a standstill
of this process, sends a sign of life while the feed has no room for messages, and as standby looks after a consumer
whose last reader died. It acts on the feed's pulls and buffer, which do not know it. It never naks what it drops: by
then another reader may be at work on the same message. It reads the machine's clock: the event loop's own (uvloop)
stands still within a turn.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from keylane.core.pin import Action, Delivered, Event, Phase, Pin, event_of, step
from keylane.errors import ConsumerGone, KeylaneError, NotFound, PermissionDenied
from keylane.jetstream import consumers
from keylane.jetstream.feed_options import PinOptions
from keylane.jetstream.headers import parse_headers
from keylane.jetstream.message import Message
from keylane.jetstream.message_buffer import MessageBuffer
from keylane.jetstream.pull_loop import PullLoop

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

_log = logging.getLogger("keylane.pin")

PIN_HEADER = "Nats-Pin-Id"
_RETRY_S = 0.1
_RESET_S = 2.0
_CHOSEN_S = 0.1


class FeedPin:
    """Whether one feed is the pinned reader, and what follows from it."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        options: PinOptions,
        *,
        pulls: PullLoop,
        buffer: MessageBuffer,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._options = options
        self._pulls = pulls
        self._buffer = buffer
        self._loop = asyncio.get_running_loop()
        self._pin = Pin()
        self._marker = b""
        self._held: list[Message] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempt = 0
        self._chosen = asyncio.Event()
        self._next_sequence = 0
        self._looking = False
        self._looks_left = self._most_looks = math.inf if options.looks is None else options.looks
        self._orphans: int | None = None
        self._ran_at = self._doubted_at = time.monotonic()
        self._beat: asyncio.TimerHandle | None = None
        # A pull restarts the time that a standstill is measured by.
        pulls.before_pull = self.check_for_standstill

    def __repr__(self) -> str:
        return repr(self._pin)

    @property
    def pin_id(self) -> str | None:
        return self._pin.pin_id

    @property
    def holds(self) -> bool:
        return self._pin.holds

    @property
    def in_doubt(self) -> bool:
        return self._pin.phase is Phase.DOUBTING

    @property
    def _is_good(self) -> bool:
        return self._pin.phase is Phase.PINNED

    @property
    def _is_over(self) -> bool:
        """The feed has ended, and its reader has taken all messages."""
        return self._pulls.is_draining and self._buffer.ended and not self._buffer.messages

    def may_deliver(self) -> bool:
        """Whether the buffer has a message for the reader, and it may have it now."""
        self.check_for_standstill()
        return self._is_good and bool(self._buffer.messages)

    def start(self) -> None:
        self._tick()

    async def stop(self) -> None:
        """Do nothing more: a pin that is there lapses after its timeout."""
        if self._beat is not None:
            self._beat.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what happens -------------------------------------------------------------------------------

    def sort(self, messages: list[Message]) -> list[Message]:
        """Act on a batch, and return those of it that may be handed out."""
        self.check_for_standstill()
        if self._pin.phase is Phase.STANDBY and self._stood_still():
            return []  # a pin that came before or during the standstill; with nobody using it, it lapses
        if self._all_follow(messages):
            self._next_sequence += len(messages)
            return messages
        good: list[Message] = []
        marker, expected, pinned = self._marker, self._next_sequence, self._is_good
        for message in messages:
            sequence = message.consumer_sequence
            if sequence == expected and pinned and marker in message.raw_headers:
                good.append(message)
                expected += 1
                continue
            delivered = Delivered(
                parse_headers(message.raw_headers).get(PIN_HEADER, ""), sequence, sequence == expected
            )
            event = event_of(
                self._pin,
                delivered,
                reset_on_takeover=self._options.reset_on_takeover,
                resumes=sequence == 1 and self._resume_at() is not None,
            )
            for action in self._perform(event, delivered):
                if action is Action.FORGET:
                    good.clear()
                elif action is Action.DELIVER:
                    good.append(message)
                elif action is Action.HOLD:
                    self._held.append(message)
            marker, expected, pinned = self._marker, sequence + 1, self._is_good
        self._next_sequence = expected
        return good

    def _all_follow(self, messages: list[Message]) -> bool:
        """Whether a batch goes on where the last one ended, under our pin.

        Its first and its last message tell: the consumer counts its deliveries without gaps and a reset starts again
        at 1, so between the two nothing can be missing, be somebody else's, or come after a reset.
        """
        first, last = messages[0], messages[-1]
        return (
            self._is_good
            and first.consumer_sequence == self._next_sequence
            and last.consumer_sequence == self._next_sequence + len(messages) - 1
            and self._marker in first.raw_headers
            and self._marker in last.raw_headers
        )

    def refused(self) -> None:
        """The server answered 423 to one of our pulls."""
        self._perform(Event.REFUSED)

    def check_for_standstill(self) -> None:
        """Did a pull leave lately? If not, this process was stopped or blocked, or its link was down."""
        now = time.monotonic()
        if self._pin.pin_id is not None and now - max(self._pulls.asked_at, self._doubted_at) > self._options.timeout_s:
            self._doubted_at = now
            _log.warning("%s/%s: no pull for long; checking the pin", self._stream, self._consumer)
            self._perform(Event.STALLED)

    def _stood_still(self) -> bool:
        return time.monotonic() - self._ran_at > self._options.timeout_s

    # ---- what is done -------------------------------------------------------------------------------

    def _perform(self, event: Event, delivered: Delivered | None = None) -> tuple[Action, ...]:
        """Step the pin and act. Returns the actions: what becomes of a delivery is for the caller."""
        if self._is_over:
            return ()  # an answer to an old question; the next reader may be at work by now
        before = self._pin
        self._pin, actions = step(before, event, delivered)
        self._pulls.pin_id = self._pin.pin_id
        if self._pin.phase is not before.phase:
            self._looks_left = self._most_looks
            _log.info("%s/%s: %s, %r -> %r", self._stream, self._consumer, event.name, before, self._pin)
        for action in actions:
            self._act(action, before)
        return actions

    def _act(self, action: Action, before: Pin) -> None:
        match action:
            case Action.TELL_UNPINNED:
                self._tell(self._options.on_unpinned, before.pin_id)
            case Action.FORGET:
                self._held.clear()
                self._buffer.clear()
            case Action.ADOPT:
                self._chosen.set()
                self._pulls.asked_at = time.monotonic()
                self._marker = f"{PIN_HEADER}: {self._pin.pin_id}\r\n".encode()
            case Action.DISCARD_ID:
                self._pulls.void()
            case Action.TELL_PINNED:
                self._tell(self._options.on_pinned, self._pin.pin_id)
            case Action.RELEASE:
                held, self._held = self._held, []
                self._buffer.put(held)
            case Action.RESET:
                self._attempt += 1
                self._spawn(self._take_over(self._attempt))
            case Action.REVIVE:
                self._spawn(self._revive())
            case Action.VERIFY:
                self._attempt += 1
                self._spawn(self._verify(self._attempt))

    def _tell(self, hook: Callable[[str], None] | None, pin_id: str | None) -> None:
        if hook is None:
            return
        try:
            hook(pin_id or "")
        except Exception as error:  # noqa: BLE001 - it ends the feed, and its reader is told
            _log.exception("%s/%s: %r failed", self._stream, self._consumer, hook)
            self._buffer.fail(f"{hook!r} raised {error!r}", error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def reset(self, sequence: int | None = None) -> int:
        """As `Feed.reset`."""
        async with self._pulls.closed():
            # What was delivered comes again, and acks of these deliveries will not count.
            self._buffer.clear()
            self._next_sequence = 0
            return await self._pulls.reset_consumer(sequence)

    async def take(self) -> None:
        """As `Feed.take_pin`."""
        info = await consumers.info(self._connection, self._stream, self._consumer)
        pinned = self._pinned_in(info)
        if pinned is not None:
            # It may be ours, and the delivery that says so under way: an unpin would take it away from this reader.
            if pinned == self._pin.pin_id or await self._is_chosen(pinned):
                return
            await consumers.unpin(self._connection, self._stream, self._consumer, self._options.group)
        # The pulls stay open: the server pins one of them, under an id that would be lost with it.
        if await self._is_chosen(but=pinned) or not info.num_ack_pending:
            return
        # It has nothing to deliver: all is in flight, to a reader that is gone.
        await consumers.reset(self._connection, self._stream, self._consumer)

    async def _is_chosen(self, wanted: str | None = None, *, but: str | None = None) -> bool:
        """Whether a delivery brings the pin now: this one, or any but that."""

        def is_there() -> bool:
            pin_id = self._pin.pin_id
            return pin_id is not None and (pin_id == wanted if wanted is not None else pin_id != but)

        with suppress(TimeoutError):
            async with asyncio.timeout(_CHOSEN_S):
                while not is_there():
                    self._chosen.clear()
                    await self._chosen.wait()
        return is_there()

    async def _take_over(self, attempt: int) -> None:
        event = Event.RESET_DONE
        try:
            async with asyncio.timeout(_RESET_S):
                await self.reset(self._resume_at())
        except PermissionDenied as error:
            self._buffer.end(error)
            return
        except (KeylaneError, TimeoutError) as error:
            _log.warning("%s/%s: reset on takeover failed, trying again: %s", self._stream, self._consumer, error)
            await asyncio.sleep(_RETRY_S)
            event = await self._why_reset_failed()
        if attempt == self._attempt:
            self._perform(event)

    def _resume_at(self) -> int | None:
        return self._options.resume_at() if self._options.resume_at is not None else None

    async def _why_reset_failed(self) -> Event:
        try:
            return Event.RESET_FAILED if await self.is_ours() else Event.REFUSED
        except NotFound as error:
            self._buffer.end(_gone(self._stream, self._consumer, error))
            return Event.REFUSED
        except KeylaneError:
            return Event.RESET_FAILED

    async def _revive(self) -> None:
        try:
            await consumers.reset(self._connection, self._stream, self._consumer)
        except PermissionDenied as error:
            self._buffer.end(error)
        except KeylaneError as error:
            _log.warning("%s/%s: the consumer has no reader: %s", self._stream, self._consumer, error)

    async def _verify(self, attempt: int) -> None:
        while attempt == self._attempt and not self._is_over:
            try:
                ours = await self.is_ours()
            except NotFound as error:
                self._buffer.end(_gone(self._stream, self._consumer, error))
                return
            except PermissionDenied as error:
                self._buffer.end(error)
                return
            except KeylaneError as error:
                _log.warning("%s/%s: cannot check the pin, trying again: %s", self._stream, self._consumer, error)
                await asyncio.sleep(_RETRY_S)
                continue
            if attempt == self._attempt:
                self._perform(Event.CONFIRMED if ours else Event.DENIED)
            return

    async def is_ours(self) -> bool:
        """Whether the server says that we are pinned."""
        if self._pin.pin_id is None:
            return False
        info = await consumers.info(self._connection, self._stream, self._consumer)
        return self._pinned_in(info) == self._pin.pin_id

    async def hand_over(self, *, resets: bool = False) -> None:
        """Let the server pin another reader now. Ask `is_ours` first: it clears whatever pin there is.

        `resets`: reset the consumer before, which the next reader would otherwise do.
        """
        if resets or (not self._is_good and self._options.reset_on_takeover):
            # What was dropped or held would come again after ack_wait only, if nothing new is published.
            await consumers.reset(self._connection, self._stream, self._consumer)
        await consumers.unpin(self._connection, self._stream, self._consumer, self._options.group)
        self._pin = Pin()

    def _pinned_in(self, info: consumers.ConsumerInfo) -> str | None:
        states = {state.group: state.pinned_client_id for state in info.priority_groups}
        return states.get(self._options.group)

    async def _look_around(self) -> None:
        """What nobody tells us: as standby that the pin's last holder died at work, draining that we lost it."""
        asked_as = self._pin
        try:
            info = await consumers.info(self._connection, self._stream, self._consumer)
        except KeylaneError as error:
            _log.debug("%s/%s: cannot look at the pin: %s", self._stream, self._consumer, error)
            return
        finally:
            self._looking = False
        if self._pin != asked_as:
            return
        pinned = self._pinned_in(info)
        if self._pin.phase is not Phase.STANDBY:
            if pinned != self._pin.pin_id:
                self._perform(Event.REFUSED)
            return
        if pinned is not None or info.num_ack_pending == 0:
            self._orphans = None
        elif info.num_ack_pending == info.config.max_ack_pending or self._orphans == info.delivered_sequence:
            self._orphans = None
            self._perform(Event.ORPHANED)
        else:
            self._orphans = info.delivered_sequence  # a pin may be on its way: look once more

    def _tick(self) -> None:
        if self._is_over or self._buffer.error is not None:
            return  # a pin that is there lapses after its timeout
        self.check_for_standstill()
        self._ran_at = now = time.monotonic()
        if self._pin.pin_id is not None and now - self._pulls.asked_at > self._options.timeout_s / 3:
            self._pulls.send_sign_of_life()
        if self._pulls.is_draining:
            looks = self._pin.pin_id is not None
        else:
            looks = self._pin.phase is Phase.STANDBY and self._options.reset_on_takeover and self._looks_left > 0
        if looks and not self._looking:
            self._looking = True
            self._looks_left -= 1
            self._spawn(self._look_around())
        # Not in step with other readers: two that reset an orphaned consumer at once would deliver twice.
        pause_s = self._options.timeout_s / 6 * random.uniform(0.7, 1.0)  # noqa: S311 - no secret
        self._beat = self._loop.call_later(pause_s, self._tick)


def _gone(stream: str, consumer: str, error: NotFound) -> ConsumerGone:
    gone = ConsumerGone(f"consumer {consumer!r} of stream {stream!r} does not exist any more")
    gone.__cause__ = error
    return gone
