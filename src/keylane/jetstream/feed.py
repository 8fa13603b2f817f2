"""The feed: one continuous pull reader on one consumer.

Owns the buffer between the socket and the reader, the ways to read it, and the life of a reader. Its pulls and its
recovery after a lost link, a moved leader or a restarted server are in `pulling.py`. It never runs handlers and never
acks on its own.

The way of a message: socket buffer → `Scanner` → `Feed.receive` → buffer → `async for` → `message.ack()` →
`Client.post`. Rules about credit and statuses are in `core/pulls.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from keylane.awaitable_context import awaitable_context
from keylane.errors import AckFailed, Disconnected, FeedEnded, InvalidInput, KeylaneError
from keylane.jetstream import consumers
from keylane.jetstream.feed_options import FeedOptions, Notice
from keylane.jetstream.hooks import Hooks
from keylane.jetstream.message import ACK_PREFIX, Message
from keylane.jetstream.pin_performer import Pinning, PinOptions, settle_acks
from keylane.jetstream.pull_loop import Pulling

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

__all__ = ["Feed", "FeedOptions", "Notice", "PinOptions", "open_feed"]

_log = logging.getLogger("keylane.feed")

_LINGER_S = 1.0
_LAST_ACKS_S = 0.5
_QUIET_S = 0.1


class Feed(Pulling):
    """Read a consumer's messages as fast as the server sends them.

    >>> async with open_feed(connection, "ORDERS", "billing") as feed:
    ...     async for message in feed:
    ...         message.ack()

    Iteration ends after `drain` or `close`, and raises `FeedEnded` when the feed cannot go on.
    """

    def __init__(self, connection: Connection, stream: str, consumer: str, options: FeedOptions) -> None:
        super().__init__(connection, stream, consumer, options)
        self._keeper: asyncio.Task[None] | None = None
        self._arrived: list[Message] = []
        self._statuses: list[tuple[bytes, bytes]] = []
        self._buffer: deque[Message] = deque()
        self._buffered_bytes = 0
        self._refill_every = max(1, options.max_messages // 8)
        self._waiters: list[asyncio.Future[None]] = []
        self._last_handed: Message | None = None
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

        self._unobserve: Callable[[], None] | None = None
        self._error: KeylaneError | None = None

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
        self._client.listen_for_denials(self._denied)
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
        self._client.unlisten_for_denials(self._denied)
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
            with self._options.around_reset() if self._options.around_reset is not None else nullcontext():
                await self._let_acks_arrive()
                return await consumers.reset(self._connection, self.stream, self.consumer, sequence=sequence)
        finally:
            self._held_back -= 1
            self._refill()

    async def _let_acks_arrive(self) -> None:
        """An ack that the server reads after the reset does not count, and its message comes again."""
        if self._last_handed is None:
            return
        try:
            await settle_acks(self._connection, self._last_handed, _LAST_ACKS_S)
        except AckFailed as error:
            self._notify(None, f"messages may come again after the reset: {error}")

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

    def may_hand_out(self) -> bool:
        """Whether handlers may start: not while it is in doubt, after a standstill, that this reader is pinned."""
        if self._pinning is None:
            return True
        self._pinning.check_for_standstill()
        return not self._pinning.in_doubt

    def _ready(self) -> bool:
        """A message may be handed out now."""
        if self._pinning is not None:
            self._pinning.check_for_standstill()
            return bool(self._buffer) and self._pinning.good
        return bool(self._buffer)

    def _held(self) -> tuple[int, int]:
        return len(self._buffer), self._buffered_bytes

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
        if reply.startswith(ACK_PREFIX):
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


@awaitable_context
async def open_feed(connection: Connection, stream: str, consumer: str, options: FeedOptions | None = None) -> Feed:
    """A started feed on an existing pull consumer. A missing consumer raises `NotFound`."""
    feed = Feed(connection, stream, consumer, options or FeedOptions())
    await feed._read_limits()
    return await feed.start()
