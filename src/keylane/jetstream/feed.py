"""The feed: one continuous pull reader on one consumer.

Composes three parts, each of which knows only those before it: `MessageBuffer` between the socket and the reader,
`PullLoop` that asks the server and recovers from lost links, moved leaders and restarts, and `FeedPin` for a
`pinned_client` group. A feed never runs handlers and never acks on its own.

The way of a message: socket buffer → `Scanner` → `Feed.receive` → `FeedPin.sort` → `MessageBuffer` → `async for` →
`message.ack()` → `Client.post`. Rules about credit and statuses are in `core/pulls.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from keylane.awaitable_context import awaitable_context
from keylane.core.run_state import RunState
from keylane.errors import InvalidInput, KeylaneError
from keylane.jetstream.feed_options import FeedOptions, Notice, PinOptions
from keylane.jetstream.feed_pin import FeedPin
from keylane.jetstream.message import ACK_PREFIX, Message
from keylane.jetstream.message_buffer import MessageBuffer
from keylane.jetstream.missing_names import naming_missing
from keylane.jetstream.pull_loop import LINGER_S, PullLoop

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection
    from keylane.jetstream.consumers import ConsumerInfo

__all__ = ["Feed", "FeedOptions", "Notice", "PinOptions", "open_feed"]

_log = logging.getLogger("keylane.feed")


class Feed:
    """Read a consumer's messages as fast as the server sends them.

    >>> async with open_feed(connection, "ORDERS", "billing") as feed:
    ...     async for message in feed:
    ...         message.ack()

    Iteration ends after `drain` or `stop`, and raises `FeedEnded` when the feed cannot go on.
    """

    def __init__(self, connection: Connection, stream: str, consumer: str, options: FeedOptions) -> None:
        self.stream = stream
        self.consumer = consumer
        self._options = options
        self._client = connection.nats
        self._buffer = MessageBuffer(self._client, f"{stream}/{consumer}", options.on_messages)
        self._messages = self._buffer.messages
        self._pulls = PullLoop(connection, stream, consumer, options, self._buffer)
        self._pin: FeedPin | None = None
        if options.pin is not None:
            self._pin = FeedPin(connection, stream, consumer, options.pin, pulls=self._pulls, buffer=self._buffer)
        self._arrived: list[Message] = []
        self._statuses: list[tuple[bytes, bytes]] = []

    def __repr__(self) -> str:
        return f"<Feed {self.stream}/{self.consumer} buffered={len(self._messages)} {self._pulls!r}>"

    @property
    def state(self) -> RunState:
        if self._buffer.ended:
            return RunState.ENDED
        return RunState.STOPPING if self._pulls.is_draining else RunState.RUNNING

    @property
    def strays(self) -> int:
        """Messages in the inbox that no consumer sent. The feed skips them."""
        return self._pulls.strays

    @property
    def is_pinned(self) -> bool:
        """Whether this reader is the pinned one, as far as it knows. Never true without a pin policy."""
        return self._pin is not None and self._pin.holds

    @property
    def pin_id(self) -> str | None:
        return self._pin.pin_id if self._pin is not None else None

    def may_hand_out(self) -> bool:
        """Whether handlers may start: not while it is in doubt, after a standstill, that this reader is pinned."""
        if self._pin is None:
            return True
        self._pin.check_for_standstill()
        return not self._pin.in_doubt

    # ---- life ---------------------------------------------------------------------------------------

    async def start(self) -> Self:
        await self._pulls.start(self)
        if self._pin is not None:
            self._pin.start()
        self._pulls.refill()
        return self

    async def wait(self) -> str:
        """Wait for the end and return its reason; raises the error if one ended it."""
        while not self._buffer.ended:
            await self._buffer.wait()
        if self._buffer.error is not None:
            raise self._buffer.error
        return "stopped"

    async def drain(self, linger_s: float = LINGER_S) -> None:
        """Ask for nothing more. Everything that was on its way is still delivered, then iteration ends.

        The end of the subscription makes the server drop what it is just about to send; the consumer delivers that
        again only after its ack wait. So this first waits until all that was asked for is here, or the server has
        fallen quiet, for `linger_s` at most. With `linger_s` above `expires_s` nothing can be dropped: every pull has
        ended by then.
        """
        await self._pulls.drain(linger_s)

    def refill(self) -> None:
        """Some of what is in flight is settled: pull with the acks of this turn, if the budget has room."""
        self._pulls.refill_with_acks()

    async def settle(self) -> None:
        """Wait until the server has every ack that was sent so far."""
        await self._pulls.settle_acks()

    async def stop(self) -> None:
        """Drain, and give what was not read back to the server: it is redelivered at once.

        A pinned reader hands over at once: it clears its pin after its pulls are closed and its acks are in.
        """
        await self.drain(LINGER_S if self._pin is None else 0)
        if self._pin is None:
            self._buffer.give_back()
            return
        await self._pin.stop()
        try:
            # The server would clear another reader's pin just as well, and a nak would disturb its work.
            if self._client.is_connected and await self._pin.is_ours():
                self._buffer.give_back()
                await self.settle()
                await self._pin.hand_over()
        except KeylaneError as error:
            self._pulls.notify(None, f"the pin may not be handed over: then it moves after its timeout ({error})")
        self._buffer.clear()

    async def hand_over(self) -> None:
        """As `stop`, for a pinned reader that has settled what it handled: with as few requests as possible.

        The next reader waits for each of them. What is not acked is delivered again from the first message on, so the
        next one need not reset the consumer.
        """
        assert self._pin is not None
        await self._pulls.drain(0, is_confirmed=False)  # the answers below come after what is on its way
        await self._pin.stop()
        try:
            if self._client.is_connected:
                is_ours, _ = await asyncio.gather(self._pin.is_ours(), self.settle())
                if is_ours:
                    await self._pin.hand_over(resets=True)
        except KeylaneError as error:
            self._pulls.notify(None, f"the pin may not be handed over: then it moves after its timeout ({error})")
        self._buffer.clear()

    async def reset(self, sequence: int | None = None) -> int:
        """Reset the consumer, as `consumers.reset`, while no pull of this reader is open.

        In a cluster a reset that races with deliveries can lose messages when the leader moves (core/pin.py).
        Where this reader is pinned, or is the only one, nothing is delivered between the two.
        """
        if self._pin is not None:
            return await self._pin.reset(sequence)
        async with self._pulls.closed():
            return await self._pulls.reset_consumer(sequence)

    async def take_pin(self) -> None:
        """Clear the pin of whoever has it, unless it is ours, and have what is in flight delivered again.

        The server pins one of the readers that have a pull open: this one, if the other is gone.
        """
        assert self._pin is not None
        await self._pin.take()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # ---- the reader's side --------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        buffer = self._buffer
        while not (self._messages if self._pin is None else self._pin.may_deliver()):
            if buffer.taken:
                self._pulls.refill()
            if buffer.ended:
                if buffer.error is not None:
                    raise buffer.error
                raise StopAsyncIteration
            await buffer.wait()
        return self._take()

    def _take(self) -> Message:
        buffer = self._buffer
        message = self._messages.popleft()
        buffer.bytes -= len(message.data) + len(message.raw_headers)
        buffer.taken += 1
        if buffer.taken >= self._pulls.refill_every:
            self._pulls.refill()
        return message

    async def batches(self, size: int = 1000) -> AsyncIterator[list[Message]]:
        """Lists of up to `size` messages: all that is there, never waiting for a list to fill."""
        if size < 1:
            raise InvalidInput(f"batches of {size}: give at least 1 message")
        buffer = self._buffer
        while True:
            while not (self._messages if self._pin is None else self._pin.may_deliver()):
                if buffer.ended:
                    if buffer.error is not None:
                        raise buffer.error
                    return
                await buffer.wait()
            batch = buffer.take_batch(size)
            self._pulls.refill()
            yield batch

    async def next(self, timeout_s: float) -> Message | None:
        """The next message, or None if there is none within the time. Raises `FeedEnded` after the end."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self)
        except TimeoutError:
            return None
        except StopAsyncIteration:
            raise self._buffer.end_error() from None

    async def fetch(self, batch: int, timeout_s: float) -> list[Message]:
        """Up to `batch` messages: as soon as they are there, or what there is when the time is up."""
        self._check_fetch(batch, timeout_s)
        messages: list[Message] = []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            while len(messages) < batch and (self._messages if self._pin is None else self._pin.may_deliver()):
                messages.append(self._take())
            left_s = deadline - loop.time()
            if len(messages) == batch or left_s <= 0:
                return messages
            if self._buffer.ended:
                if messages:
                    return messages
                raise self._buffer.end_error()
            self._pulls.ask_for(batch - len(messages), left_s)
            try:
                async with asyncio.timeout(left_s):
                    await self._buffer.wait()
            except TimeoutError:
                continue

    def _check_fetch(self, batch: int, timeout_s: float) -> None:
        if not self._options.on_demand:
            raise InvalidInput("fetch needs a feed that was opened with on_demand: others ask by themselves")
        if batch < 1:
            raise InvalidInput(f"a batch of {batch}: fetch at least 1 message")
        if timeout_s <= 0:
            raise InvalidInput(f"timeout_s is {timeout_s}: a fetch needs some time")

    # ---- the server's side --------------------------------------------------------------------------

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if reply.startswith(ACK_PREFIX):
            self._arrived.append(Message(self._client, subject, reply, headers, data))
        else:
            self._statuses.append((subject, headers))

    def received(self) -> None:
        try:
            arrived, self._arrived = self._arrived, []
            self._pulls.received(arrived)
            if arrived and self._pin is not None:
                arrived = self._pin.sort(arrived)
            if arrived:
                self._buffer.put(arrived)
            if self._statuses:
                statuses, self._statuses = self._statuses, []
                for subject, headers in statuses:
                    if self._pulls.answered(subject, headers) and self._pin is not None:
                        self._pin.refused()
            self._pulls.go_on()
        except Exception as error:  # noqa: BLE001 - it ends this feed, not the link that others share
            _log.exception("feed %s/%s failed", self.stream, self.consumer)
            self._buffer.fail(f"failed: {error!r}", error)


@awaitable_context
async def open_feed(
    connection: Connection,
    stream: str,
    consumer: str,
    options: FeedOptions | None = None,
    *,
    known: ConsumerInfo | None = None,
) -> Feed:
    """A started feed on an existing pull consumer. A missing consumer raises `NotFound`.

    `known`: the consumer as the server has just described it; otherwise it is asked.
    """
    feed = Feed(connection, stream, consumer, options or FeedOptions())
    if known is not None:
        feed._pulls.keep_limits(known)
    else:
        async with naming_missing(connection):
            await feed._pulls.read_limits()
    return await feed.start()
