"""The feed: one continuous pull reader on one consumer.

Owns the pulls of one reader (overlapping, so the server never waits for the next request), its heartbeats,
its recovery after a lost link, a moved leader or a restarted server, and the buffer between the socket and
the reader. It never runs handlers and never acks on its own.

The way of a message: socket buffer → `Scanner` → `Feed.receive` → buffer → `async for` → `message.ack()` →
`Client.post`. Rules about credit and statuses are in `core/pulls.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from keylane.core.pulls import Meaning, Pull, PullWindow, Status
from keylane.errors import (
    ApiError,
    ApiUnavailable,
    ConsumerGone,
    Disconnected,
    FeedEnded,
    InvalidInput,
    KeylaneError,
    MessageTooLarge,
    NotFound,
    PullRefused,
)
from keylane.jetstream import consumers
from keylane.jetstream.headers import parse_headers, status_of
from keylane.jetstream.hooks import Hooks
from keylane.jetstream.message import Message
from keylane.jetstream.pinning import Pinning, PinOptions, settle_acks
from keylane.jetstream.refusals import refusal
from keylane.jetstream.settings import check_seconds

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

_log = logging.getLogger("keylane.feed")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_FIRST_DEADLINE_S = 1.0
_SHORTEST_WITH_HEARTBEAT_S = 0.2
_SIGN_OF_LIFE_S = 1.0
_LINGER_S = 1.0
_QUIET_S = 0.1


@dataclass(frozen=True, slots=True)
class Notice:
    """Something an operator may want to know; the feed goes on."""

    meaning: Meaning | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOptions:
    """Bounds and timers of a feed.

    `max_messages` and `max_bytes` bound what is held: buffered plus asked for. `expires_s` is the life of one
    pull; a server that sends neither messages nor heartbeats for two `heartbeat_s` is asked anew.
    """

    max_messages: int = 1000
    max_bytes: int = 32 * 1024 * 1024
    expires_s: float = 30.0
    heartbeat_s: float = 5.0
    on_notice: Callable[[Notice], None] | None = None
    pull_fields: Mapping[str, Any] = field(default_factory=dict)
    """Sent with every pull: the terms of a priority group."""
    pin: PinOptions | None = None
    on_demand: bool = False
    """Ask only when `fetch` is called."""
    on_messages: Callable[[list[Message]], None] | None = None
    """Given every batch inside the socket's read callback, instead of iteration: the shortest way from the
    server to code that never waits. What bounds it is the consumer's `max_ack_pending`."""

    def __post_init__(self) -> None:
        for name in ("max_messages", "max_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInput(f"{name} is {value!r}: a feed must hold something; give a whole number, at least 1")
        if check_seconds(self.expires_s, "expires_s") < 0.1:
            raise InvalidInput(f"expires_s is {self.expires_s}: a pull must live at least 0.1 s")
        if not 0 < self.heartbeat_s <= self.expires_s / 2:
            raise InvalidInput(
                f"heartbeat_s is {self.heartbeat_s}: it must be positive and at most half of expires_s "
                f"({self.expires_s}), as the server demands"
            )


class Feed:
    """Read a consumer's messages as fast as the server sends them.

    >>> async with await open_feed(connection, "ORDERS", "billing") as feed:
    ...     async for message in feed:
    ...         message.ack()

    Iteration ends after `drain` or `close`, and raises `FeedEnded` when the feed cannot go on.
    """

    def __init__(self, connection: Connection, stream: str, consumer: str, options: FeedOptions) -> None:
        self.stream = stream
        self.consumer = consumer
        self._connection = connection
        self._client = connection.nats
        self._options = options
        self._window = PullWindow(options.max_messages, options.max_bytes)
        self._loop = asyncio.get_running_loop()
        self._request = connection.api.subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}").encode()
        self._inbox = self._client.new_inbox()
        self._subscription: Subscription | None = None
        self._keeper: asyncio.Task[None] | None = None

        self._arrived: list[Message] = []
        self._statuses: list[tuple[bytes, bytes]] = []
        self._buffer: deque[Message] = deque()
        self._buffered_bytes = 0
        self._taken = 0
        self._refill_every = max(1, options.max_messages // 8)
        self._waiters: list[asyncio.Future[None]] = []
        self._last_handed: Message | None = None
        self._pinning: Pinning | None = None
        if options.pin is not None:
            self._pinning = Pinning(
                connection,
                stream,
                consumer,
                options.pin,
                hand_out=self._hand_over,
                forget=self._forget,
                void_pulls=self._pull_anew,
                reset=self.reset,
                sign_of_life=self._send_sign_of_life,
                fail=self._finish,
            )

        self._pulling = False
        self._held_back = 0
        self._linked = False
        self._unobserve: Callable[[], None] | None = None
        self._last_heard = self._last_moved = self._loop.time()
        self._all_here = asyncio.Event()
        self._trouble: Meaning | None = None
        self._attention = asyncio.Event()
        self._failures = 0
        self._error: KeylaneError | None = None
        self._finished = False

    def __repr__(self) -> str:
        state = "ended" if self._finished else "pulling" if self._pulling else "paused"
        return f"<Feed {self.stream}/{self.consumer} {state} buffered={len(self._buffer)} {self._window!r}>"

    @property
    def is_pinned(self) -> bool:
        """Whether this reader is the pinned one, as far as it knows. Never true without a pin policy."""
        return self._pinning is not None and self._pinning.holds

    @property
    def pin_id(self) -> str | None:
        return self._pinning.pin_id if self._pinning is not None else None

    # ---- life ---------------------------------------------------------------------------------------

    async def start(self) -> Self:
        self._subscription = await self._client.route(f"{self._inbox}.>", self)
        self._client.listen(self._link_changed)
        self._unobserve = self._connection.observe(Hooks(on_close=self._connection_closed))
        self._linked = True
        self._keeper = asyncio.create_task(self._keep(), name=f"feed {self.stream}/{self.consumer}")
        self._pulling = True
        if self._pinning is not None:
            self._pinning.start()
        self._refill()
        return self

    async def wait(self) -> None:
        """Wait until the feed has ended; raises the error that ended it, if one did."""
        while not self._finished:
            await self._wait_for_messages()
        if self._error is not None:
            raise self._error

    async def drain(self, linger_s: float = _LINGER_S) -> None:
        """Ask for nothing more. Everything that was on its way is still delivered, then iteration ends.

        The end of the subscription makes the server drop what it is just about to send; that would come back
        after the consumer's ack wait only. So this first waits until all that was asked for is here, or the
        server has fallen quiet, for `linger_s` at most. With `linger_s` above `expires_s` nothing can be
        dropped: every pull has ended by then.
        """
        self._pulling = False
        if self._subscription is None:
            return
        if self._pinning is not None:
            self._pinning.drain(unread=lambda: bool(self._buffer) or not self._finished)
        subscription, self._subscription = self._subscription, None
        try:
            await self._linger(linger_s)
        finally:
            await self._end(subscription)

    async def _linger(self, linger_s: float) -> None:
        now = self._loop.time()
        deadline, quiet_since = now + linger_s, self._last_moved
        if self._last_handed is not None and self._last_handed.delivery.pending:
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

    async def _end(self, subscription: Subscription) -> None:
        self._client.unlisten(self._link_changed)
        if self._unobserve is not None:
            self._unobserve()
        try:
            if self._client.is_connected:
                await subscription.unsubscribe()
                # Whatever the server sent before it read the UNSUB arrives before the answer to this.
                await self._connection.flush()
        except (KeylaneError, NatsError) as error:
            self._notify(None, f"the end of the pulls was not confirmed: {error}")
        finally:
            await self._client.unroute(subscription)
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.gather(self._keeper, return_exceptions=True)
            self._finish(None)

    async def settle(self) -> None:
        """Wait until the server has every ack that was sent so far."""
        if self._last_handed is not None:
            await settle_acks(self._connection, self._last_handed)

    async def close(self) -> None:
        """Drain, and give what was not read back to the server: it is redelivered at once.

        A pinned reader hands over at once: it clears its pin after its pulls are closed and its acks are in.
        """
        await self.drain(_LINGER_S if self._pinning is None else 0)
        if self._pinning is None:
            self._give_back()
            return
        await self._pinning.stop()
        try:
            # The server would clear another reader's pin just as well, and a nak would disturb its work.
            if self._client.is_connected and await self._pinning.is_ours():
                self._give_back()
                await self.settle()
                await self._pinning.hand_over()
        except KeylaneError as error:
            self._notify(None, f"the pin may not be handed over: then it moves after its timeout ({error})")
        self._forget()

    def _give_back(self) -> None:
        while self._buffer:
            self._take().nak()
        self._client.push()

    async def reset(self, sequence: int | None = None) -> int:
        """Reset the consumer, as `consumers.reset`, while no pull of this reader is open.

        In a cluster a reset that races with deliveries can lose messages when the leader moves (core/pin.py).
        Where this reader is pinned, or is the only one, nothing is delivered between the two.
        """
        if not self._client.is_connected:
            raise Disconnected(f"consumer {self.consumer!r} is not reset: the connection is down")
        self._held_back += 1
        try:
            await self._close_pulls()
            if self._pinning is not None:
                # It comes again, and acks of these deliveries will not count.
                self._forget()
                self._pinning.expect_restart()
            return await consumers.reset(self._connection, self.stream, self.consumer, sequence=sequence)
        finally:
            self._held_back -= 1
            self._refill()

    async def _close_pulls(self) -> None:
        """End all open pulls: their inbox is gone before the server reads what is sent next."""
        old = self._subscription
        if old is None:
            return
        inbox = self._client.new_inbox()
        new = await self._client.route(f"{inbox}.>", self)
        if self._subscription is not old:  # drained meanwhile
            await self._client.unroute(new)
            return
        self._inbox, self._subscription = inbox, new
        self._window.void()
        await self._client.unroute(old)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- the reader's side --------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        while not self._ready():
            if self._taken:
                self._refill()
            if self._finished:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            await self._wait_for_messages()
        return self._take()

    async def batches(self, size: int = 1000) -> AsyncIterator[list[Message]]:
        """Lists of up to `size` messages: all that is there, never waiting for a list to fill."""
        if size < 1:
            raise InvalidInput(f"batches of {size}: give at least 1 message")
        while True:
            while not self._ready():
                if self._finished:
                    if self._error is not None:
                        raise self._error
                    return
                await self._wait_for_messages()
            buffer = self._buffer
            if len(buffer) <= size:
                batch = list(buffer)
                buffer.clear()
                self._buffered_bytes = 0
            else:
                batch = [buffer.popleft() for _ in range(size)]
                self._buffered_bytes -= sum([len(message.data) + len(message.raw_headers) for message in batch])
            self._refill()
            yield batch

    async def next(self, timeout_s: float) -> Message | None:
        """The next message, or None if there is none within the time. Raises `FeedEnded` after the end."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self)
        except TimeoutError:
            return None
        except StopAsyncIteration:
            raise FeedEnded(f"the feed on {self.stream}/{self.consumer} is closed") from None

    async def fetch(self, batch: int, timeout_s: float) -> list[Message]:
        """Up to `batch` messages: as soon as they are there, or what there is when the time is up."""
        self._check_fetch(batch, timeout_s)
        messages: list[Message] = []
        deadline = self._loop.time() + timeout_s
        while True:
            while len(messages) < batch and self._ready():
                messages.append(self._take())
            left_s = deadline - self._loop.time()
            if len(messages) == batch or left_s <= 0:
                return messages
            if self._finished:
                if messages:
                    return messages
                raise self._error or FeedEnded(f"the feed on {self.stream}/{self.consumer} is closed")
            if self._window.asked == 0 and not self._held_back and self._trouble is None and self._client.is_connected:
                self._send(self._window.ask_for(batch - len(messages)), left_s)
            try:
                async with asyncio.timeout(left_s):
                    await self._wait_for_messages()
            except TimeoutError:
                continue

    def _check_fetch(self, batch: int, timeout_s: float) -> None:
        if not self._options.on_demand:
            raise InvalidInput("fetch needs a feed that was opened with on_demand: others ask by themselves")
        if batch < 1:
            raise InvalidInput(f"a batch of {batch}: fetch at least 1 message")
        if timeout_s <= 0:
            raise InvalidInput(f"timeout_s is {timeout_s}: a fetch needs some time")

    def _ready(self) -> bool:
        """A message may be handed out now."""
        if self._pinning is not None:
            self._pinning.check_for_standstill()
            return bool(self._buffer) and self._pinning.good
        return bool(self._buffer)

    def _forget(self) -> None:
        self._buffer.clear()
        self._buffered_bytes = 0

    def _take(self) -> Message:
        message = self._buffer.popleft()
        self._buffered_bytes -= len(message.data) + len(message.raw_headers)
        self._taken += 1
        if self._taken >= self._refill_every:
            self._refill()
        return message

    async def _wait_for_messages(self) -> None:
        # The reader has handled all it was given: send its acks now instead of one turn later.
        self._client.push()
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def _wake_reader(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _finish(self, error: KeylaneError | None) -> None:
        if not self._finished:
            self._finished = True
            self._pulling = False
            self._error = error
            if error is not None and self._pinning is not None:
                self._pinning.halt()
        self._wake_reader()

    # ---- the server's side --------------------------------------------------------------------------

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if reply:
            self._arrived.append(Message(self._client, subject, reply, headers, data))
        else:
            self._statuses.append((subject, headers))

    def received(self) -> None:
        try:
            self._sort()
        except Exception as error:  # noqa: BLE001 - it ends this feed, not the link that others share
            _log.exception("feed %s/%s failed", self.stream, self.consumer)
            self._fail(f"failed: {error!r}", error)

    def _sort(self) -> None:
        self._last_heard = self._loop.time()
        arrived = self._arrived
        if arrived:
            self._arrived = []
            self._last_moved = self._last_heard
            self._window.delivered(len(arrived), max([len(one.data) + len(one.raw_headers) for one in arrived]))
            self._refill_every = max(1, self._window.size // 8)
            self._failures = 0
            if self._pinning is not None:
                self._pinning.arrived(arrived)
            else:
                self._hand_over(arrived)
        if self._statuses:
            statuses, self._statuses = self._statuses, []
            for subject, headers in statuses:
                self._answered(subject, headers)
        if self._window.asked == 0:
            self._all_here.set()
        self._refill()

    def _hand_over(self, messages: list[Message]) -> None:
        if messages:
            self._last_handed = messages[-1]
        if not messages or self._options.on_messages is None or self._finished:
            self._buffered_bytes += sum([len(one.data) + len(one.raw_headers) for one in messages])
            self._buffer.extend(messages)
            self._wake_reader()
            return
        try:
            self._options.on_messages(messages)
        except Exception as error:  # noqa: BLE001 - it ends the feed, and its reader is told
            _log.exception("feed %s/%s: on_messages failed", self.stream, self.consumer)
            self._fail(f"on_messages raised {error!r}", error)
        self._client.push()

    def _fail(self, what: str, cause: Exception) -> None:
        failed = FeedEnded(f"feed on {self.stream}/{self.consumer}: {what}")
        failed.__cause__ = cause
        self._finish(failed)

    def _answered(self, subject: bytes, headers: bytes) -> None:
        code, text = status_of(headers)
        pending = parse_headers(headers).get("Nats-Pending-Messages")
        status = Status(code, text, int(pending) if pending else None)
        token = subject[len(self._inbox) + 1 :].decode()
        match self._window.answered(Pull.from_token(token), status):
            case None | Meaning.ALIVE | Meaning.ENDED | Meaning.OUT_OF_BYTES:
                pass
            case Meaning.PIN_LOST if self._pinning is not None:
                self._pinning.refused()
            case Meaning.DELETED:
                self._finish(ConsumerGone(f"consumer {self.consumer!r} of stream {self.stream!r} was deleted"))
            case Meaning.TOO_LARGE:
                self._finish(
                    MessageTooLarge(
                        f"the next message of consumer {self.consumer!r} is larger than the feed may hold "
                        f"(max_bytes {self._window.max_bytes}): raise max_bytes"
                    )
                )
            case Meaning.INVALID:
                self._finish(refusal(self.stream, self.consumer, code, text))
            case meaning:
                self._in_trouble(meaning, f"{code} {text}".strip())

    def _in_trouble(self, meaning: Meaning, text: str) -> None:
        self._trouble = meaning
        self._notify(meaning, text)
        self._attention.set()

    def _notify(self, meaning: Meaning | None, text: str) -> None:
        _log.info("feed %s/%s: %s", self.stream, self.consumer, text)
        if self._options.on_notice is not None:
            self._options.on_notice(Notice(meaning, text))

    def _pull_anew(self) -> None:
        self._window.void()
        self._loop.call_soon(self._refill)

    def _link_changed(self, up: bool) -> None:
        self._linked = up
        self._window.void()
        self._last_heard = self._loop.time()
        self._all_here.set()
        if up:
            self._refill()
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

    def _connection_closed(self, reason: str) -> None:
        # What waits in the buffer could not be acked any more.
        self._forget()
        self._all_here.set()
        self._finish(
            FeedEnded(
                f"feed on {self.stream}/{self.consumer}: the connection is closed ({reason}); connect again "
                "and open a new feed. What was not acked is delivered again after the consumer's ack wait"
            )
        )

    def _refill(self) -> None:
        if not self._pulling or self._held_back or self._trouble is not None:
            return
        # Both: the status falls before we are told, and rises before the subscriptions are known to be there.
        if not self._linked or not self._client.is_connected:
            return
        if self._options.on_demand:
            self._wake_reader()
            return
        self._taken = 0
        if self._pinning is not None:
            self._pinning.check_for_standstill()
        pull = self._window.ask(len(self._buffer), self._buffered_bytes)
        if pull is not None:
            self._send(pull, self._options.expires_s)

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

    def _send_sign_of_life(self) -> None:
        """A pull that can bring nothing, as no message has one byte: it only restarts the pin's timeout."""
        draining = self._subscription is None
        if not self._pulling and not draining:
            return
        if self._client.is_connected and self._trouble is not Meaning.UNAVAILABLE:
            request = {"batch": 1, "max_bytes": 1, "expires": round(_SIGN_OF_LIFE_S * 1e9)}
            self._post_pull(self._window.sign_of_life(), request)

    def _post_pull(self, pull: Pull, request: dict[str, Any]) -> None:
        request.update(self._options.pull_fields)
        if self._pinning is not None:
            if self._pinning.pin_id is not None:
                request["id"] = self._pinning.pin_id
            self._pinning.asked()
        payload = json.dumps(request, separators=(",", ":")).encode()
        reply = f"{self._inbox}.{pull.token}".encode()
        self._client.post(b"PUB %b %b %d\r\n%b\r\n" % (self._request, reply, len(payload), payload))

    # ---- when something is wrong --------------------------------------------------------------------

    async def _keep(self) -> None:
        """Watch for silence and for trouble, and get the feed going again or end it with a reason."""
        silence_s = 2 * self._options.heartbeat_s
        while not self._finished:
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
                self._finish(error)
            except Exception as error:  # noqa: BLE001 - it ends the feed, and its reader is told
                _log.exception("feed %s/%s failed", self.stream, self.consumer)
                self._fail(f"failed: {error!r}", error)

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
                await self._read_limits(deadline_s)
            except NotFound as error:
                raise ConsumerGone(
                    f"consumer {self.consumer!r} of stream {self.stream!r} does not exist any more"
                ) from error
            except (ApiError, ApiUnavailable, Disconnected, TimeoutError) as error:
                self._in_trouble(Meaning.UNAVAILABLE, f"the JetStream API does not answer: {error}")
                return
        self._trouble = None
        self._last_heard = self._loop.time()
        self._refill()

    async def _read_limits(self, timeout_s: float | None = None) -> None:
        """Keep pulls within what the consumer's configuration allows."""
        info = await consumers.info(self._connection, self.stream, self.consumer, timeout_s=timeout_s)
        config = info.config
        if config.deliver_subject is not None:
            raise PullRefused(
                f"consumer {self.consumer!r} of stream {self.stream!r} pushes to {config.deliver_subject!r}: "
                "a feed needs a pull consumer"
            )
        most, bytes_ = self._options.max_messages, self._options.max_bytes
        self._window.max_messages = min(most, config.max_batch or most)
        self._window.max_bytes = min(bytes_, config.max_bytes or bytes_)
        self._window.overlapping = config.max_waiting != 1
        if config.max_waiting and info.num_waiting >= config.max_waiting:
            # A pull that asks for heartbeats gets no answer at all when there is no room for it.
            self._notify(
                Meaning.REFUSED,
                f"the consumer has {info.num_waiting} open pulls, as many as its max_waiting allows: "
                "raise it to twice the number of readers",
            )
        if config.max_expires_s and config.max_expires_s < self._options.expires_s:
            raise PullRefused(
                f"consumer {self.consumer!r} allows pulls of at most {config.max_expires_s} s and the feed "
                f"asks for {self._options.expires_s} s: lower expires_s"
            )


async def open_feed(connection: Connection, stream: str, consumer: str, options: FeedOptions | None = None) -> Feed:
    """A started feed on an existing pull consumer. A missing consumer raises `NotFound`."""
    feed = Feed(connection, stream, consumer, options or FeedOptions())
    await feed._read_limits()
    return await feed.start()
