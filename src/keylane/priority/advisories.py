"""What the server announces about pins, typed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from nats.aio.msg import Msg

from keylane.core.names import check_consumer_name, check_stream_name
from keylane.errors import Disconnected
from keylane.jetstream.connection import Connection
from keylane.jetstream.consumers import parse_time

_QUEUE = 10_000


@dataclass(frozen=True, slots=True)
class Pinned:
    """A client was pinned."""

    stream: str
    consumer: str
    group: str
    pin_id: str
    time: datetime


@dataclass(frozen=True, slots=True)
class Unpinned:
    """A pin was lost: by an admin's call, or because its client did not pull in time."""

    stream: str
    consumer: str
    group: str
    reason: Literal["admin", "timeout"] | str
    time: datetime


@asynccontextmanager
async def advisories(
    connection: Connection, stream: str | None = None, consumer: str | None = None
) -> AsyncIterator[AsyncIterator[Pinned | Unpinned]]:
    """Pin changes of one consumer, of one stream's, or of all, from now on.

    >>> async with advisories(connection, "JOBS") as events:
    ...     async for event in events:
    ...         print(event)
    """
    where = ".".join(
        (
            check_stream_name(stream) if stream is not None else "*",
            check_consumer_name(consumer) if consumer is not None else "*",
        )
    )
    queue: asyncio.Queue[Pinned | Unpinned] = asyncio.Queue(_QUEUE)

    async def take(message: Msg) -> None:
        await queue.put(parse_advisory(message.data))

    prefix = f"{connection.event_prefix}.ADVISORY.CONSUMER"
    subscriptions = [
        await connection.nats.subscribe(f"{prefix}.{what}.{where}", cb=take) for what in ("PINNED", "UNPINNED")
    ]
    await connection.flush()

    async def events() -> AsyncIterator[Pinned | Unpinned]:
        closed = asyncio.ensure_future(connection.wait_closed())
        try:
            while True:
                got = asyncio.ensure_future(queue.get())
                try:
                    await asyncio.wait({got, closed}, return_when=asyncio.FIRST_COMPLETED)
                    if not got.done():
                        raise Disconnected(f"no more advisories: the connection is closed ({closed.result()})")
                    yield got.result()
                finally:
                    got.cancel()
        finally:
            closed.cancel()

    try:
        yield events()
    finally:
        if not connection.is_closed:
            for subscription in subscriptions:
                await subscription.unsubscribe()


def parse_advisory(data: bytes) -> Pinned | Unpinned:
    wire = json.loads(data)
    where = (wire["stream"], wire["consumer"], wire["group"])
    if wire["type"].endswith("consumer_group_pinned"):
        return Pinned(*where, wire["pinned_id"], parse_time(wire["timestamp"]))
    return Unpinned(*where, wire["reason"], parse_time(wire["timestamp"]))
