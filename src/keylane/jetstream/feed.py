"""The feed: one continuous pull reader on one consumer.

Owns the pulls of one reader (overlapping, so the server never waits for the next request), its heartbeats, its
recovery after a lost link, a moved leader or a restarted server, and the buffer between the socket and the
reader. It never runs handlers and never acks on its own.

The way of a message: socket buffer → `Scanner` → `Feed.receive` → buffer → `async for` → `message.ack()` →
`Client.post`. Rules about credit and statuses are in `core/pulls.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nats.aio.subscription import Subscription

from keylane.core.pulls import Meaning, Pull, PullWindow, Status
from keylane.errors import (
    ApiError,
    ConsumerGone,
    FeedEnded,
    InvalidInput,
    KeylaneError,
    MessageTooLarge,
    NotFound,
    PullRefused,
)
from keylane.jetstream import consumers
from keylane.jetstream.headers import parse_headers, status_of
from keylane.jetstream.message import Message

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection

_log = logging.getLogger("keylane.feed")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


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
    on_messages: Callable[[list[Message]], None] | None = None
    """Given every batch inside the socket's read callback, instead of iteration: the shortest way from the
    server to code that never waits. What bounds it is the consumer's `max_ack_pending`."""

    def __post_init__(self) -> None:
        if self.max_messages < 1:
            raise InvalidInput(f"max_messages is {self.max_messages}: a feed must hold at least 1 message")
        if self.max_bytes < 1:
            raise InvalidInput(f"max_bytes is {self.max_bytes}: a feed must hold at least 1 byte")
        if self.expires_s < 0.1:
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
        self._reader: asyncio.Future[None] | None = None

        self._pulling = False
        self._last_heard = self._loop.time()
        self._trouble: Meaning | None = None
        self._attention = asyncio.Event()
        self._failures = 0
        self._error: KeylaneError | None = None
        self._finished = False

    def __repr__(self) -> str:
        state = "ended" if self._finished else "pulling" if self._pulling else "paused"
        return f"<Feed {self.stream}/{self.consumer} {state} buffered={len(self._buffer)} {self._window!r}>"

    # ---- life ---------------------------------------------------------------------------------------

    async def start(self) -> Self:
        self._subscription = await self._client.route(f"{self._inbox}.>", self)
        self._client.listen(self._link_changed)
        self._keeper = asyncio.create_task(self._keep(), name=f"feed {self.stream}/{self.consumer}")
        self._pulling = True
        self._refill()
        return self

    async def wait(self) -> None:
        """Wait until the feed has ended; raises the error that ended it, if one did."""
        while not self._finished:
            await self._wait_for_messages()
        if self._error is not None:
            raise self._error

    async def drain(self) -> None:
        """Ask for nothing more. Everything that was on its way is still delivered, then iteration ends."""
        self._pulling = False
        if self._subscription is None:
            return
        subscription, self._subscription = self._subscription, None
        self._client.unlisten(self._link_changed)
        if not self._client.is_closed:
            await subscription.unsubscribe()
            if self._client.is_connected:
                # Whatever the server sent before it read the UNSUB arrives before the answer to this.
                await self._connection.flush()
        await self._client.unroute(subscription)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._finish(None)

    async def close(self) -> None:
        """Drain, and give what was not read back to the server: it is redelivered at once."""
        await self.drain()
        while self._buffer:
            self._take().nak()
        self._client.push()

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
        while not self._buffer:
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
        while True:
            while not self._buffer:
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
                self._buffered_bytes -= sum(
                    [len(message.data) + len(message.raw_headers) for message in batch]
                )
            self._refill()
            yield batch

    async def next(self, timeout_s: float) -> Message | None:
        """The next message, or None if there is none within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self)
        except TimeoutError:
            return None

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
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _finish(self, error: KeylaneError | None) -> None:
        if not self._finished:
            self._finished = True
            self._pulling = False
            self._error = error
        self._wake_reader()

    # ---- the server's side --------------------------------------------------------------------------

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if reply:
            self._arrived.append(Message(self._client, subject, reply, headers, data))
        else:
            self._statuses.append((subject, headers))

    def received(self) -> None:
        self._last_heard = self._loop.time()
        arrived = self._arrived
        if arrived:
            self._arrived = []
            weights = [len(message.data) + len(message.raw_headers) for message in arrived]
            self._window.delivered(len(arrived), max(weights))
            self._failures = 0
            self._hand_over(arrived, sum(weights))
        if self._statuses:
            statuses, self._statuses = self._statuses, []
            for subject, headers in statuses:
                self._answered(subject, headers)
        self._refill()

    def _hand_over(self, arrived: list[Message], size: int) -> None:
        if self._options.on_messages is None:
            self._buffered_bytes += size
            self._buffer.extend(arrived)
            self._wake_reader()
            return
        try:
            self._options.on_messages(arrived)
        except Exception as error:
            _log.exception("feed %s/%s: on_messages failed", self.stream, self.consumer)
            failed = FeedEnded(f"feed on {self.stream}/{self.consumer}: on_messages raised {error!r}")
            failed.__cause__ = error
            self._finish(failed)
        self._client.push()

    def _answered(self, subject: bytes, headers: bytes) -> None:
        code, text = status_of(headers)
        pending = parse_headers(headers).get("Nats-Pending-Messages")
        status = Status(code, text, int(pending) if pending else None)
        token = subject[len(self._inbox) + 1 :].decode()
        match self._window.answered(Pull.from_token(token), status):
            case None | Meaning.ALIVE | Meaning.ENDED | Meaning.OUT_OF_BYTES:
                pass
            case Meaning.DELETED:
                self._finish(
                    ConsumerGone(f"consumer {self.consumer!r} of stream {self.stream!r} was deleted")
                )
            case Meaning.TOO_LARGE:
                self._finish(
                    MessageTooLarge(
                        f"the next message of consumer {self.consumer!r} is larger than the feed may hold "
                        f"(max_bytes {self._window.max_bytes}): raise max_bytes"
                    )
                )
            case Meaning.INVALID:
                self._finish(
                    PullRefused(
                        f"the server refuses to serve consumer {self.consumer!r} of stream {self.stream!r}: "
                        f"{code} {text}"
                    )
                )
            case meaning:
                self._in_trouble(meaning, f"{code} {text}")

    def _in_trouble(self, meaning: Meaning, text: str) -> None:
        self._trouble = meaning
        self._notify(meaning, text)
        self._attention.set()

    def _notify(self, meaning: Meaning | None, text: str) -> None:
        _log.info("feed %s/%s: %s", self.stream, self.consumer, text)
        if self._options.on_notice is not None:
            self._options.on_notice(Notice(meaning, text))

    def _link_changed(self, up: bool) -> None:
        self._window.void()
        self._last_heard = self._loop.time()
        if up:
            self._refill()

    def _refill(self) -> None:
        if not self._pulling or self._trouble is not None or not self._client.is_connected:
            return
        self._taken = 0
        pull = self._window.ask(len(self._buffer), self._buffered_bytes)
        if pull is not None:
            self._send(pull)

    def _send(self, pull: Pull) -> None:
        request: dict[str, Any] = {
            "batch": pull.batch,
            "expires": round(self._options.expires_s * 1e9),
            "idle_heartbeat": round(self._options.heartbeat_s * 1e9),
            "max_bytes": self._window.max_bytes,
        }
        payload = json.dumps(request, separators=(",", ":")).encode()
        reply = f"{self._inbox}.{pull.token}".encode()
        self._client.post(b"PUB %b %b %d\r\n%b\r\n" % (self._request, reply, len(payload), payload))

    # ---- when something is wrong --------------------------------------------------------------------

    async def _keep(self) -> None:
        """Watch for silence and for trouble, and get the feed going again or end it with a reason."""
        silence_s = 2 * self._options.heartbeat_s
        while not self._finished:
            try:
                async with asyncio.timeout(self._options.heartbeat_s):
                    await self._attention.wait()
            except TimeoutError:
                if not self._is_silent(silence_s):
                    continue
                self._window.void()
                self._in_trouble(Meaning.UNAVAILABLE, f"no heartbeat for {silence_s} s")
            self._attention.clear()
            try:
                await self._recover()
            except KeylaneError as error:
                self._finish(error)
            except Exception as error:
                _log.exception("feed %s/%s failed", self.stream, self.consumer)
                self._finish(FeedEnded(f"feed on {self.stream}/{self.consumer} failed: {error!r}"))

    def _is_silent(self, silence_s: float) -> bool:
        waiting = self._window.asked > 0 and self._client.is_connected
        return waiting and self._loop.time() - self._last_heard > silence_s

    async def _recover(self) -> None:
        trouble = self._trouble
        self._failures += 1
        await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10)))
        if trouble in (Meaning.UNAVAILABLE, Meaning.LIMIT) and self._client.is_connected:
            try:
                await self._read_limits()
            except NotFound as error:
                raise ConsumerGone(
                    f"consumer {self.consumer!r} of stream {self.stream!r} does not exist any more"
                ) from error
            except (ApiError, TimeoutError) as error:
                self._in_trouble(Meaning.UNAVAILABLE, f"the JetStream API does not answer: {error}")
                return
        self._trouble = None
        self._last_heard = self._loop.time()
        self._refill()

    async def _read_limits(self) -> None:
        """Keep pulls within what the consumer's configuration allows."""
        config = (await consumers.info(self._connection, self.stream, self.consumer)).config
        if config.deliver_subject is not None:
            raise PullRefused(
                f"consumer {self.consumer!r} of stream {self.stream!r} pushes to {config.deliver_subject!r}: "
                "a feed needs a pull consumer"
            )
        if config.max_batch:
            self._window.max_messages = min(self._options.max_messages, config.max_batch)
        if config.max_bytes:
            self._window.max_bytes = min(self._options.max_bytes, config.max_bytes)
        if config.max_expires_s and config.max_expires_s < self._options.expires_s:
            raise PullRefused(
                f"consumer {self.consumer!r} allows pulls of at most {config.max_expires_s} s and the feed asks for "
                f"{self._options.expires_s} s: lower expires_s"
            )


async def open_feed(
    connection: Connection, stream: str, consumer: str, options: FeedOptions | None = None
) -> Feed:
    """A started feed on an existing pull consumer. A missing consumer raises `NotFound`."""
    feed = Feed(connection, stream, consumer, options or FeedOptions())
    await feed._read_limits()
    return await feed.start()
