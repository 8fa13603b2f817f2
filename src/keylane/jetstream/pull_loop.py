"""The pulls of a feed: asking, the answers to it, and recovery when something is wrong.

Pulls overlap, so that the server never waits for the next request. Rules about credit and statuses are in
`core/pulls.py`. What arrives goes to the feed, which is the route of the inbox; the end of the feed goes to its
`MessageBuffer`. Recovery covers a lost link, a moved leader, a restarted server and one that has fallen silent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from keylane.core.pull_budget import ACTIVE_EXPIRES_S
from keylane.core.pulls import Meaning, Pull, PullWindow, Status
from keylane.errors import (
    AckFailed,
    ApiError,
    ApiUnavailable,
    ConsumerGone,
    Disconnected,
    FeedEnded,
    KeylaneError,
    MessageTooLarge,
    NotADelivery,
    NotAnOverflowConsumer,
    NotAPinnedConsumer,
    NotFound,
    PermissionDenied,
    PriorityGroupInvalid,
    PriorityGroupMissing,
    PriorityOutOfRange,
    PullRefused,
)
from keylane.jetstream import consumers
from keylane.jetstream.feed_options import FeedOptions, Notice, SharedBudget
from keylane.jetstream.headers import number_in, parse_headers, status_of
from keylane.jetstream.hooks import ConnectionHooks
from keylane.jetstream.message import Message, parse_ack_subject
from keylane.jetstream.message_buffer import MessageBuffer
from keylane.jetstream.protocol import Route

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

_log = logging.getLogger("keylane.feed")

LINGER_S = 1.0
_QUIET_S = 0.1
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_FIRST_DEADLINE_S = 1.0
_SHORTEST_WITH_HEARTBEAT_S = 0.2
_SIGN_OF_LIFE_S = 1.0
_ACKS_BEFORE_RESET_S = 0.5
_SETTLE_S = 2.0

# The server's text after "Bad Request - ", the error for it, and what to do.
_REFUSALS: dict[str, tuple[type[PullRefused], str]] = {
    "Priority Group missing": (
        PriorityGroupMissing,
        "the consumer has a priority group: read it with keylane.priority",
    ),
    "Invalid Priority Group": (PriorityGroupInvalid, "look up the group's name in the consumer's configuration"),
    "Not a Overflow Priority consumer": (
        NotAnOverflowConsumer,
        "only the policy overflow knows min_pending and min_ack_pending",
    ),
    "Not a Pinned Client Priority consumer": (
        NotAPinnedConsumer,
        "the consumer was replaced by one without pins: open the feed again",
    ),
    "Priority must be between 0 and 9": (PriorityOutOfRange, "0 is served first, 9 last"),
}


def refusal(stream: str, consumer: str, code: int, text: str) -> PullRefused:
    """The error for a status that ends a feed because asking again cannot help."""
    kind, advice = _REFUSALS.get(text.removeprefix("Bad Request - "), (PullRefused, ""))
    what = f"the server refuses to serve consumer {consumer!r} of stream {stream!r}: {code} {text}"
    return kind(f"{what}; {advice}" if advice else what)


class PullLoop:
    """The pulls of one feed, their inbox, and the task that watches over them."""

    def __init__(
        self, connection: Connection, stream: str, consumer: str, options: FeedOptions, buffer: MessageBuffer
    ) -> None:
        self.strays = 0
        self.refill_every = max(1, options.max_messages // 8)
        """After so many messages taken from the buffer a refill is worth the call."""
        self.pin_id: str | None = None
        """Sent with every pull."""
        self.asked_at = time.monotonic()
        """When the last pull left: the server restarts the pin's timeout then."""
        self.before_pull: Callable[[], None] | None = None
        self._stream = stream
        self._consumer = consumer
        self._connection = connection
        self._client = connection.nats
        self._options = options
        self._buffer = buffer
        self._window = PullWindow(options.max_messages, options.max_bytes)
        self._most = options.max_messages
        self._loop = asyncio.get_running_loop()
        self._request = consumers.next_subject(connection, stream, consumer).encode()
        self._inbox = self._client.new_inbox()
        self._route: Route | None = None
        self._subscription: Subscription | None = None
        self._unobserve: Callable[[], None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._pulling = False
        self._is_refill_due = False
        self._held_back = 0
        self._linked = False
        self._last_heard = self._last_moved = self._loop.time()
        self._all_here = asyncio.Event()
        self._trouble: Meaning | None = None
        self._attention = asyncio.Event()
        self._failures = 0

    def __repr__(self) -> str:
        state = "ended" if self._buffer.ended else "pulling" if self._pulling else "paused"
        return f"<PullLoop {state} {self._window!r}>"

    # ---- life ---------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """Whether no more pulls will be sent, except signs of life."""
        return self._subscription is None

    async def start(self, route: Route) -> None:
        """Subscribe for `route`. The first `refill` pulls."""
        self._route = route
        self._client.listen_for_denials(self._denied)
        self._subscription = await self._client.route(f"{self._inbox}.>", route)
        self._client.listen(self._link_changed)
        self._unobserve = self._connection.observe(ConnectionHooks(on_close=self._connection_closed))
        self._linked = True
        self._keeper = asyncio.create_task(self._keep(), name=f"feed {self._buffer.feed}")
        self._pulling = True

    async def drain(self, linger_s: float, *, is_confirmed: bool = True) -> None:
        """Pull no more, wait for what is on its way (see `Feed.drain`), and end the buffer.

        `is_confirmed`: wait until the server has closed the inbox.
        """
        self._pulling = False
        if self._subscription is None:
            return
        subscription, self._subscription = self._subscription, None
        try:
            await self._linger(linger_s)
        finally:
            await self._end(subscription, is_confirmed=is_confirmed)

    async def _linger(self, linger_s: float) -> None:
        now = self._loop.time()
        deadline, quiet_since = now + linger_s, self._last_moved
        if self._buffer.last is not None and self._buffer.last.delivery.pending:
            quiet_since = now  # more is there: acks of the reader that leave only now let it come
        while self._window.asked and self._client.is_connected:
            quiet_since = max(quiet_since, self._last_moved)
            left_s = min(quiet_since + _QUIET_S, deadline) - self._loop.time()
            if left_s <= 0:
                return
            self._all_here.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._all_here.wait()

    async def _end(self, subscription: Subscription, *, is_confirmed: bool) -> None:
        self._client.unlisten(self._link_changed)
        self._client.unlisten_for_denials(self._denied)
        if self._unobserve is not None:
            self._unobserve()
        try:
            if self._client.is_connected:
                await subscription.unsubscribe()
                if is_confirmed:
                    # Whatever the server sent before it read the UNSUB arrives before the answer to this.
                    await self._connection.flush()
        except (KeylaneError, NatsError) as error:
            self.notify(None, f"the end of the pulls was not confirmed: {error}")
        finally:
            await self._client.unroute(subscription)
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.gather(self._keeper, return_exceptions=True)
            self._buffer.end(None)

    def _connection_closed(self, reason: str) -> None:
        self._buffer.clear()  # it could not be acked any more
        self._all_here.set()
        self._buffer.end(
            FeedEnded(
                f"feed on {self._buffer.feed}: the connection is closed ({reason}); connect again "
                "and open a new feed. What was not acked is delivered again after the consumer's ack wait"
            )
        )

    # ---- resetting the consumer ---------------------------------------------------------------------

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """No pull is open inside the block."""
        if not self._client.is_connected:
            raise Disconnected(f"consumer {self._consumer!r} is not reset: the connection is down")
        self._held_back += 1
        try:
            await self._close_pulls()
            yield
        finally:
            self._held_back -= 1
            self.refill()

    async def _close_pulls(self) -> None:
        """End all open pulls: their inbox is gone before the server reads what is sent next."""
        old = self._subscription
        if old is None:
            return
        assert self._route is not None
        inbox = self._client.new_inbox()
        new = await self._client.route(f"{inbox}.>", self._route)
        if self._subscription is not old:  # drained meanwhile
            await self._client.unroute(new)
            return
        self._inbox, self._subscription = inbox, new
        self._window.void()
        await self._client.unroute(old)

    async def reset_consumer(self, sequence: int | None = None) -> int:
        """As `consumers.reset`. Call it inside `closed`."""
        with self._options.around_reset() if self._options.around_reset is not None else nullcontext():
            try:
                # An ack that the server reads after the reset does not count, and its message comes again.
                await self.settle_acks(_ACKS_BEFORE_RESET_S)
            except AckFailed as error:
                self.notify(None, f"messages may come again after the reset: {error}")
            return await consumers.reset(self._connection, self._stream, self._consumer, sequence=sequence)

    async def settle_acks(self, timeout_s: float = _SETTLE_S) -> None:
        """Wait until the server has processed every ack that was sent before this call.

        The server answers an in-progress ack after the acks before it; on a settled message it changes nothing.
        """
        if self._buffer.last is None:
            return
        self._client.push()
        try:
            await self._client.ask(self._buffer.last.reply.decode(), b"+WPI", timeout_s)
        except (NatsError, Disconnected) as error:
            raise AckFailed(f"the server did not confirm the last acks within {timeout_s} s ({error})") from error

    # ---- asking -------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Pull for what the buffer has room for, if anything may be pulled now."""
        if not self._pulling or self._buffer.ended or self._held_back or self._trouble is not None:
            return
        # Both: the status falls before we are told, and rises before the subscriptions are known to be there.
        if not self._linked or not self._client.is_connected:
            return
        if self._options.on_demand:
            self._buffer.wake()
            return
        self._buffer.taken = 0
        if self.before_pull is not None:
            self.before_pull()
        if self._options.budget is not None:
            self._ask_within(self._options.budget)
            return
        pull = self._window.ask(len(self._buffer.messages), self._buffer.bytes)
        if pull is not None:
            self._send(pull, self._options.expires_s)

    def refill_with_acks(self) -> None:
        """Refill at the end of this turn of the event loop, when all that it settles is settled: one larger pull."""
        if not self._is_refill_due:
            self._is_refill_due = True
            self._client.before_push(self._refill_now)

    def _refill_now(self) -> None:
        self._is_refill_due = False
        self.refill()

    def _ask_within(self, budget: SharedBudget) -> None:
        window, share = self._window, budget.share
        in_flight = budget.in_flight()
        share.holds(in_flight + window.asked)
        window.max_messages = min(self._most, share.size(window.largest, self._loop.time()))
        pull = window.ask(in_flight, 0)
        if pull is not None:
            share.holds(in_flight + window.asked)
            self._send(pull, ACTIVE_EXPIRES_S if share.is_active else self._options.expires_s)
        budget.on_window(window.size, window.low_water)

    def ask_for(self, batch: int, expires_s: float) -> None:
        """Pull exactly so many messages, unless a pull is open already or nothing may be pulled now."""
        if self._window.asked == 0 and not self._held_back and self._trouble is None and self._client.is_connected:
            self._send(self._window.ask_for(batch), expires_s)

    def void(self) -> None:
        """Nothing that was asked for counts any more: ask again soon."""
        self._window.void()
        self._loop.call_soon(self.refill)

    def _send(self, pull: Pull, expires_s: float) -> None:
        expires_ns = round(expires_s * 1e9)
        request: dict[str, Any] = {
            "batch": pull.batch,
            "expires": expires_ns,
            "max_bytes": self._window.max_bytes,
        }
        if expires_s >= _SHORTEST_WITH_HEARTBEAT_S:
            # Whole nanoseconds, rounded down: the server refuses a heartbeat of more than half the life.
            request["idle_heartbeat"] = min(round(self._options.heartbeat_s * 1e9), expires_ns // 2)
        self._last_moved = self._loop.time()
        if self._window.asked == pull.batch:
            self._last_heard = self._last_moved  # until now there was nothing to hear
        self._post_pull(pull, request)

    def send_sign_of_life(self) -> None:
        """A pull that can bring nothing, as no message has one byte: it only restarts the pin's timeout."""
        if not self.is_draining and (not self._pulling or self._buffer.ended):
            return
        if self._client.is_connected and self._trouble is not Meaning.UNAVAILABLE:
            request = {"batch": 1, "max_bytes": 1, "expires": round(_SIGN_OF_LIFE_S * 1e9)}
            self._post_pull(self._window.sign_of_life(), request)

    def _post_pull(self, pull: Pull, request: dict[str, Any]) -> None:
        request.update(self._options.pull_fields)
        if self.pin_id is not None:
            request["id"] = self.pin_id
        self.asked_at = time.monotonic()
        payload = json.dumps(request, separators=(",", ":")).encode()
        reply = f"{self._inbox}.{pull.token}".encode()
        self._client.post(b"PUB %b %b %d\r\n%b\r\n" % (self._request, reply, len(payload), payload))

    # ---- answers ------------------------------------------------------------------------------------

    def received(self, messages: list[Message]) -> None:
        """The server sent a status or these messages."""
        self._last_heard = self._loop.time()
        if messages:
            self._last_moved = self._last_heard
            self._window.delivered(len(messages), max([len(one.data) + len(one.raw_headers) for one in messages]))
            self.refill_every = max(1, self._window.size // 8)
            self._failures = 0
            if self._options.budget is not None:
                self._options.budget.share.delivered()

    def go_on(self) -> None:
        """All that was received is sorted: pull for more."""
        if self._window.asked == 0:
            self._all_here.set()
        self.refill()

    def answered(self, subject: bytes, headers: bytes) -> bool:
        """Act on a status. Returns whether the server refused the pin id: then it is for the pin to act."""
        code, text = status_of(headers)
        pull = Pull.from_token(subject[len(self._inbox) + 1 :].decode(errors="replace"))
        if not code or pull is None:
            self._note_stray(subject)
            return False
        status = Status(code, text, number_in(parse_headers(headers).get("Nats-Pending-Messages")))
        asked_before = self._window.asked
        match self._window.answered(pull, status):
            case Meaning.ENDED if self._options.budget is not None and self._window.asked < asked_before:
                self._options.budget.share.fell_quiet()  # it was not filled
            case None | Meaning.ALIVE | Meaning.ENDED | Meaning.OUT_OF_BYTES:
                pass
            case Meaning.PIN_LOST if self._options.pin is not None:
                return True
            case Meaning.DELETED:
                self._buffer.end(ConsumerGone(f"consumer {self._consumer!r} of stream {self._stream!r} was deleted"))
            case Meaning.TOO_LARGE:
                self._buffer.end(
                    MessageTooLarge(
                        f"the next message of consumer {self._consumer!r} is larger than the feed may hold "
                        f"(max_bytes {self._window.max_bytes}): raise max_bytes"
                    )
                )
            case Meaning.INVALID:
                self._buffer.end(refusal(self._stream, self._consumer, code, text))
            case meaning:
                self._in_trouble(meaning, f"{code} {text}".strip())
        return False

    def _note_stray(self, subject: bytes) -> None:
        self.strays += 1
        if self.strays == 1:
            _log.warning(
                "feed %s/%s: skipping messages in its inbox that no consumer sent, the first on %r: give the program "
                "an inbox_prefix that only it may use",
                self._stream,
                self._consumer,
                subject[:200],
            )

    def _in_trouble(self, meaning: Meaning, text: str) -> None:
        self._trouble = meaning
        self.notify(meaning, text)
        self._attention.set()

    def notify(self, meaning: Meaning | None, text: str) -> None:
        _log.info("feed %s/%s: %s", self._stream, self._consumer, text)
        if self._options.on_notice is not None:
            self._options.on_notice(Notice(meaning, text))

    def _denied(self, denied: PermissionDenied) -> None:
        """Without pulls, acks or the inbox a feed cannot work."""
        if denied.operation == "publish":
            concerned = denied.subject == self._request.decode() or self._acks_on(denied.subject)
        else:
            concerned = denied.subject == f"{self._inbox}.>"
        if concerned:
            self._buffer.end(denied)

    def _acks_on(self, subject: str) -> bool:
        try:
            acked = parse_ack_subject(subject.encode())
        except NotADelivery:
            return False
        return (acked.stream, acked.consumer) == (self._stream, self._consumer)

    # ---- the link -----------------------------------------------------------------------------------

    def _link_changed(self, up: bool) -> None:
        self._linked = up
        self._window.void()
        self._last_heard = self._loop.time()
        self._all_here.set()
        if up:
            self.refill()
        else:
            self._disown_pulls()

    def _disown_pulls(self) -> None:
        """Let nothing come of the pulls of a lost link: they are not counted any more.

        The server keeps them open and would serve them again as soon as their inbox is subscribed to again.
        """
        outbox, beginning = self._client.outbox, b"PUB " + self._request + b" "
        outbox[:] = [command for command in outbox if not command.startswith(beginning)]
        if self._subscription is not None and not self._client.is_connected:
            self._inbox = self._client.new_inbox()
            self._client.move_route(self._subscription, f"{self._inbox}.>")

    # ---- when something is wrong --------------------------------------------------------------------

    async def _keep(self) -> None:
        """Watch for silence and for trouble, and get the feed going again or end it with a reason."""
        silence_s = 2 * self._options.heartbeat_s
        while not self._buffer.ended:
            try:
                try:
                    async with asyncio.timeout(self._options.heartbeat_s):
                        await self._attention.wait()
                except TimeoutError:
                    if not self._is_silent(silence_s):
                        continue
                    self._window.void()
                    self._in_trouble(Meaning.UNAVAILABLE, f"no heartbeat for {silence_s} s")
                self._attention.clear()
                await self._recover()
            except KeylaneError as error:
                self._buffer.end(error)
            except Exception as error:  # noqa: BLE001 - it ends the feed, and its reader is told
                _log.exception("feed %s/%s failed", self._stream, self._consumer)
                self._buffer.fail(f"failed: {error!r}", error)

    def _is_silent(self, silence_s: float) -> bool:
        waiting = self._window.asked > 0 and self._client.is_connected
        return waiting and self._loop.time() - self._last_heard > silence_s

    async def _recover(self) -> None:
        trouble = self._trouble
        self._failures += 1
        failures = self._failures  # messages that arrive in the meantime set it to zero
        await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures - 1, 10)))
        if trouble in (Meaning.UNAVAILABLE, Meaning.LIMIT) and self._client.is_connected:
            try:
                # Without a leader nobody answers: ask again soon rather than wait long for one answer.
                deadline_s = min(self._connection.request_timeout_s, _FIRST_DEADLINE_S * failures)
                await self.read_limits(deadline_s)
            except NotFound as error:
                raise ConsumerGone(
                    f"consumer {self._consumer!r} of stream {self._stream!r} does not exist any more"
                ) from error
            except (ApiError, ApiUnavailable, Disconnected, TimeoutError) as error:
                self._in_trouble(Meaning.UNAVAILABLE, f"the JetStream API does not answer: {error}")
                return
        self._trouble = None
        self._last_heard = self._loop.time()
        self.refill()

    async def read_limits(self, timeout_s: float | None = None) -> None:
        """Ask for the consumer's configuration, and keep pulls within it."""
        self.keep_limits(await consumers.info(self._connection, self._stream, self._consumer, timeout_s=timeout_s))

    def keep_limits(self, info: consumers.ConsumerInfo) -> None:
        """Keep pulls within what the consumer's configuration allows."""
        config = info.config
        if config.deliver_subject is not None:
            raise PullRefused(
                f"consumer {self._consumer!r} of stream {self._stream!r} pushes to {config.deliver_subject!r}: "
                "a feed needs a pull consumer"
            )
        most, bytes_ = self._options.max_messages, self._options.max_bytes
        self._most = self._window.max_messages = min(most, config.max_batch or most)
        self._window.max_bytes = min(bytes_, config.max_bytes or bytes_)
        self._window.overlapping = config.max_waiting != 1
        if config.max_waiting and info.num_waiting >= config.max_waiting:
            # A pull that asks for heartbeats gets no answer at all when there is no room for it.
            self.notify(
                Meaning.REFUSED,
                f"the consumer has {info.num_waiting} open pulls, as many as its max_waiting allows: "
                "raise it to twice the number of readers",
            )
        if config.max_expires_s and config.max_expires_s < self._options.expires_s:
            raise PullRefused(
                f"consumer {self._consumer!r} allows pulls of at most {config.max_expires_s} s and the feed "
                f"asks for {self._options.expires_s} s: lower expires_s"
            )
