"""Pulls without any of our rules: what a test wants to send, and what the server says to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats.aio.msg import Msg

from keylane import Connection


class RawPuller:
    """Pulls on one consumer; answers wait in a queue, oldest first."""

    def __init__(self, connection: Connection, stream: str, consumer: str) -> None:
        self._nats = connection.nats
        self._connection = connection
        self._subject = connection.api.subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}")
        self._inbox = self._nats.new_inbox()
        self.answers: asyncio.Queue[Msg] = asyncio.Queue()

    async def pull(self, **request: Any) -> None:
        body = {"batch": 1, "expires": 5_000_000_000, **request}
        await self._nats.publish(self._subject, json.dumps(body).encode(), reply=self._inbox)
        await self._connection.flush()

    async def answer(self, timeout_s: float = 5.0) -> Msg:
        return await asyncio.wait_for(self.answers.get(), timeout_s)

    async def status(self, timeout_s: float = 5.0) -> tuple[int, str]:
        """The next answer, which must be a status: code and text."""
        message = await self.answer(timeout_s)
        headers = message.headers or {}
        assert "Status" in headers, f"a message, not a status: {message.data!r}"
        return int(headers["Status"]), headers.get("Description", "")

    async def refusal(self, **request: Any) -> tuple[int, str]:
        await self.pull(**request)
        return await self.status()


@asynccontextmanager
async def raw_puller(connection: Connection, stream: str, consumer: str) -> AsyncIterator[RawPuller]:
    puller = RawPuller(connection, stream, consumer)

    async def take(message: Msg) -> None:
        puller.answers.put_nowait(message)

    subscription = await connection.nats.subscribe(puller._inbox, cb=take)
    try:
        yield puller
    finally:
        await subscription.unsubscribe()
