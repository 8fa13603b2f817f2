"""Performs what `core/pin.py` decides, for one feed.

Sorts every delivery (hand out, hold, drop), resets the consumer on a takeover, asks the server after a standstill
of this process, sends a sign of life while the feed has no room for messages, and as standby looks after a consumer
whose last reader died. It never nacks what it drops: by then another reader may be at work on the same message.
It reads the machine's clock: the event loop's own (uvloop) stands still within a turn.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError

from keylane.core.pin import Action, Delivered, Event, Phase, Pin, event_of, step
from keylane.errors import AckFailed, ConsumerGone, Disconnected, FeedEnded, KeylaneError, NotFound, PermissionDenied
from keylane.jetstream import consumers
from keylane.jetstream.headers import parse_headers
from keylane.jetstream.message import Message

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

_log = logging.getLogger("keylane.pin")

PIN_HEADER = "Nats-Pin-Id"
_FATES = (Action.FORGET, Action.DELIVER, Action.HOLD, Action.DROP)
_RETRY_S = 0.1
_RESET_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOptions:
    """How a feed takes part in a `pinned_client` group."""

    group: str
    timeout_s: float
    """The consumer's priority_timeout."""
    reset_on_takeover: bool
    on_pinned: Callable[[str], None] | None = None
    """Told the pin id before the first message under it is handed out."""
    on_unpinned: Callable[[str], None] | None = None
    """Told the pin id when it is known to be lost, or when deliveries under it were: then `on_pinned` follows with
    the same id, and all that is not acked comes again. A handler may be at work at that moment."""


class Pinning:
    """The pin of one feed."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        options: PinOptions,
        *,
        hand_out: Callable[[list[Message]], None],
        forget: Callable[[], None],
        void_pulls: Callable[[], None],
        reset: Callable[[], Awaitable[int]],
        sign_of_life: Callable[[], None],
        fail: Callable[[KeylaneError], None],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._options = options
        self._hand_out = hand_out
        self._forget = forget
        self._void_pulls = void_pulls
        self._reset_quietly = reset
        self._sign_of_life = sign_of_life
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._pin = Pin()
        self._marker = b""
        self._held: list[Message] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempt = 0
        self._next_sequence = 0
        self._looking = False
        self._orphans: int | None = None
        self._draining: Callable[[], bool] | None = None
        self._ran_at = self._asked_at = self._doubted_at = time.monotonic()
        self._beat: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return repr(self._pin)

    @property
    def pin_id(self) -> str | None:
        return self._pin.pin_id

    @property
    def holds(self) -> bool:
        return self._pin.holds

    @property
    def good(self) -> bool:
        """Messages may be handed to handlers now."""
        return self._pin.phase is Phase.PINNED

    @property
    def in_doubt(self) -> bool:
        return self._pin.phase is Phase.DOUBTING

    @property
    def _is_over(self) -> bool:
        """The feed has ended, and all it had was read."""
        return self._draining is not None and not self._draining()

    def start(self) -> None:
        self._tick()

    def drain(self, unread: Callable[[], bool]) -> None:
        """Nothing more will be asked for: keep the pin as long as there are unread messages."""
        self._draining = unread

    def halt(self) -> None:
        """Do nothing more by itself: a pin that is there lapses after its timeout."""
        if self._beat is not None:
            self._beat.cancel()

    async def stop(self) -> None:
        self.halt()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what happens -------------------------------------------------------------------------------

    def arrived(self, messages: list[Message]) -> None:
        """Sort a batch; what may be handed out is handed out in one go."""
        self.check_for_standstill()
        if self._pin.phase is Phase.STANDBY and self._stood_still():
            return  # a pin that came before or during the standstill; with nobody using it, it lapses
        if self._all_follow(messages):
            self._next_sequence += len(messages)
            self._hand_out(messages)
            return
        good: list[Message] = []
        marker, expected, pinned = self._marker, self._next_sequence, self.good
        for message in messages:
            sequence = message.consumer_sequence
            if sequence == expected and pinned and marker in message.raw_headers:
                good.append(message)
                expected += 1
                continue
            delivered = Delivered(
                parse_headers(message.raw_headers).get(PIN_HEADER, ""), sequence, sequence == expected
            )
            event = event_of(self._pin, delivered, reset_on_takeover=self._options.reset_on_takeover)
            self._perform(event, delivered, message, good)
            marker, expected, pinned = self._marker, sequence + 1, self.good
        self._next_sequence = expected
        if good:
            self._hand_out(good)

    def _all_follow(self, messages: list[Message]) -> bool:
        """Whether a batch goes on where the last one ended, under our pin.

        Its first and its last message tell: the consumer counts its deliveries without gaps and a reset starts again
        at 1, so between the two nothing can be missing, be somebody else's, or come after a reset.
        """
        first, last = messages[0], messages[-1]
        return (
            self.good
            and first.consumer_sequence == self._next_sequence
            and last.consumer_sequence == self._next_sequence + len(messages) - 1
            and self._marker in first.raw_headers
            and self._marker in last.raw_headers
        )

    def refused(self) -> None:
        """The server answered 423 to one of our pulls."""
        self._perform(Event.REFUSED)

    def asked(self) -> None:
        """A pull was sent: the server starts the pin's timeout anew."""
        self._asked_at = time.monotonic()

    def expect_restart(self) -> None:
        """Deliveries were dropped: whatever comes next, it is the first after a reset, or others are missing."""
        self._next_sequence = 0

    def check_for_standstill(self) -> None:
        """Did a pull leave lately? If not, this process was stopped or blocked, or its link was down."""
        now = time.monotonic()
        if self._pin.pin_id is not None and now - max(self._asked_at, self._doubted_at) > self._options.timeout_s:
            self._doubted_at = now
            _log.warning("%s/%s: no pull for long; checking the pin", self._stream, self._consumer)
            self._perform(Event.STALLED)

    def _stood_still(self) -> bool:
        return time.monotonic() - self._ran_at > self._options.timeout_s

    # ---- what is done -------------------------------------------------------------------------------

    def _perform(
        self,
        event: Event,
        delivered: Delivered | None = None,
        message: Message | None = None,
        good: list[Message] | None = None,
    ) -> None:
        if self._is_over:
            return  # an answer to a question of before; the next reader may be at work by now
        before = self._pin
        self._pin, actions = step(before, event, delivered)
        if self._pin.phase is not before.phase:
            _log.info("%s/%s: %s, %r -> %r", self._stream, self._consumer, event.name, before, self._pin)
        for action in actions:
            if action in _FATES:
                self._decide(action, message, good)
            else:
                self._act(action, before)

    def _decide(self, action: Action, message: Message | None, good: list[Message] | None) -> None:
        """What becomes of the message, and of those before it."""
        if action is Action.FORGET:
            self._held.clear()
            if good is not None:
                good.clear()
            self._forget()
        elif action is Action.DELIVER:
            assert message is not None
            assert good is not None
            good.append(message)
        elif action is Action.HOLD:
            assert message is not None
            self._held.append(message)

    def _act(self, action: Action, before: Pin) -> None:
        match action:
            case Action.TELL_UNPINNED:
                self._tell(self._options.on_unpinned, before.pin_id)
            case Action.ADOPT:
                self._asked_at = time.monotonic()
                self._marker = f"{PIN_HEADER}: {self._pin.pin_id}\r\n".encode()
            case Action.DISCARD_ID:
                self._void_pulls()
            case Action.TELL_PINNED:
                self._tell(self._options.on_pinned, self._pin.pin_id)
            case Action.RELEASE:
                held, self._held = self._held, []
                self._hand_out(held)
            case Action.RESET:
                self._attempt += 1
                self._spawn(self._reset(self._attempt))
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
            failed = FeedEnded(f"feed on {self._stream}/{self._consumer}: {hook!r} raised {error!r}")
            failed.__cause__ = error
            self._fail(failed)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reset(self, attempt: int) -> None:
        event = Event.RESET_DONE
        try:
            async with asyncio.timeout(_RESET_S):
                await self._reset_quietly()
        except PermissionDenied as error:
            self._fail(error)
            return
        except (KeylaneError, TimeoutError) as error:
            _log.warning("%s/%s: reset on takeover failed, trying again: %s", self._stream, self._consumer, error)
            await asyncio.sleep(_RETRY_S)
            event = await self._why_reset_failed()
        if attempt == self._attempt:
            self._perform(event)

    async def _why_reset_failed(self) -> Event:
        try:
            return Event.RESET_FAILED if await self.is_ours() else Event.REFUSED
        except NotFound as error:
            self._fail(_gone(self._stream, self._consumer, error))
            return Event.REFUSED
        except KeylaneError:
            return Event.RESET_FAILED

    async def _revive(self) -> None:
        try:
            await consumers.reset(self._connection, self._stream, self._consumer)
        except PermissionDenied as error:
            self._fail(error)
        except KeylaneError as error:
            _log.warning("%s/%s: the consumer has no reader: %s", self._stream, self._consumer, error)

    async def _verify(self, attempt: int) -> None:
        while attempt == self._attempt and not self._is_over:
            try:
                ours = await self.is_ours()
            except NotFound as error:
                self._fail(_gone(self._stream, self._consumer, error))
                return
            except PermissionDenied as error:
                self._fail(error)
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

    async def hand_over(self) -> None:
        """Let the server pin another reader now. Ask `is_ours` first: it clears whatever pin there is."""
        if not self.good and self._options.reset_on_takeover:
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
        self.check_for_standstill()
        self._ran_at = now = time.monotonic()
        if self._is_over:
            return
        if self._pin.pin_id is not None and now - self._asked_at > self._options.timeout_s / 3:
            self._sign_of_life()
        if self._draining is None:
            looks = self._pin.phase is Phase.STANDBY and self._options.reset_on_takeover
        else:
            looks = self._pin.pin_id is not None
        if looks and not self._looking:
            self._looking = True
            self._spawn(self._look_around())
        # Not in step with other readers: two that reset an orphaned consumer at once would deliver twice.
        pause_s = self._options.timeout_s / 6 * random.uniform(0.7, 1.0)  # noqa: S311 - no secret
        self._beat = self._loop.call_later(pause_s, self._tick)


async def settle_acks(connection: Connection, last: Message, timeout_s: float = 2.0) -> None:
    """Wait until the server has processed every ack that was sent before this call.

    An in-progress sign is answered after the acks before it, and changes nothing on a message that is done.
    """
    client = connection.nats
    client.push()
    try:
        await client.ask(last.reply.decode(), b"+WPI", timeout_s)
    except (NatsError, Disconnected) as error:
        raise AckFailed(f"the server did not confirm the last acks within {timeout_s} s ({error})") from error


def _gone(stream: str, consumer: str, error: NotFound) -> ConsumerGone:
    gone = ConsumerGone(f"consumer {consumer!r} of stream {stream!r} does not exist any more")
    gone.__cause__ = error
    return gone
