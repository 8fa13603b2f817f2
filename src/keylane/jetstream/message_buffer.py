"""What a feed has received and its reader has not taken: the bottom of a feed, below its pulls and its pin.

Owns the messages, the readers that wait for them, and the end of the feed: whoever finds out that the feed cannot go on
calls `end` or `fail`. It never asks the server for anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from keylane.errors import FeedEnded, KeylaneError
from keylane.jetstream.client import Client
from keylane.jetstream.message import Message

_log = logging.getLogger("keylane.feed")


class MessageBuffer:
    """The messages between a feed and its reader. With `on_messages` they go there instead."""

    __slots__ = (
        "_client",
        "_loop",
        "_on_messages",
        "_waiters",
        "bytes",
        "ended",
        "error",
        "feed",
        "last",
        "messages",
        "taken",
    )

    def __init__(self, client: Client, feed: str, on_messages: Callable[[list[Message]], None] | None) -> None:
        self.feed = feed
        """Stream and consumer, for errors and logs."""
        self.messages: deque[Message] = deque()
        self.bytes = 0
        """Payload and headers of `messages`. Who takes a message subtracts its own."""
        self.taken = 0
        """Messages that the reader took since the last refill."""
        self.last: Message | None = None
        """The newest message that was ever put here."""
        self.ended = False
        self.error: KeylaneError | None = None
        self._client = client
        self._on_messages = on_messages
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[None]] = []

    def put(self, messages: list[Message]) -> None:
        if messages:
            self.last = messages[-1]
        if not messages or self._on_messages is None or self.ended:
            self.bytes += sum([len(one.data) + len(one.raw_headers) for one in messages])
            self.messages.extend(messages)
            self.wake()
            return
        try:
            self._on_messages(messages)
        except Exception as error:  # noqa: BLE001 - it ends the feed, and its reader is told
            _log.exception("feed %s: on_messages failed", self.feed)
            self.fail(f"on_messages raised {error!r}", error)
        self._client.push()

    def take_batch(self, size: int) -> list[Message]:
        """Up to `size` messages."""
        if len(self.messages) <= size:
            batch = list(self.messages)
            self.clear()
        else:
            batch = [self.messages.popleft() for _ in range(size)]
            self.bytes -= sum([len(message.data) + len(message.raw_headers) for message in batch])
        return batch

    def clear(self) -> None:
        self.messages.clear()
        self.bytes = 0

    def give_back(self) -> None:
        """Nak every message: the server delivers it again at once."""
        for message in self.messages:
            message.nak()
        self.clear()
        self._client.push()

    async def wait(self) -> None:
        """Wait until something was put here, or the feed has ended."""
        # The reader has handled all it was given: send its acks now instead of one turn later.
        self._client.push()
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def end(self, error: KeylaneError | None) -> None:
        """Nothing more will be put here. The first call decides on the error."""
        if not self.ended:
            self.ended = True
            self.error = error
        self.wake()

    def fail(self, what: str, cause: Exception) -> None:
        failed = FeedEnded(f"feed on {self.feed}: {what}")
        failed.__cause__ = cause
        self.end(failed)

    def end_error(self) -> KeylaneError:
        """The error for a reader that asks after the end."""
        return self.error or FeedEnded(f"the feed on {self.feed} is closed")
