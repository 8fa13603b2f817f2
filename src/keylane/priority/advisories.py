"""The server's advisories about pins, typed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from keylane.core.names import check_consumer_name, check_stream_name
from keylane.errors import Disconnected, PermissionDenied
from keylane.jetstream import Connection, parse_time

_log = logging.getLogger("keylane.priority")

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
    """Pin changes of one consumer, of one stream's consumers, or of all, from now on.

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
        advisory = parse_advisory(message.data)
        if advisory is None:
            _log.warning("skipped a message on %s that is no advisory: %r", message.subject, message.data[:80])
        else:
            await queue.put(advisory)

    subscriptions = await _subscribe(connection, where, take)

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


async def _subscribe(connection: Connection, where: str, take: Callable[[Msg], Awaitable[None]]) -> list[Subscription]:
    prefix = f"{connection.event_prefix}.ADVISORY.CONSUMER"
    refused: list[PermissionDenied] = []

    def hear(denied: PermissionDenied) -> None:
        if denied.subject.startswith(prefix):
            refused.append(denied)

    connection.nats.listen_for_denials(hear)
    try:
        subscriptions = [
            await connection.nats.subscribe(f"{prefix}.{what}.{where}", cb=take) for what in ("PINNED", "UNPINNED")
        ]
        await connection.flush()
    finally:
        connection.nats.unlisten_for_denials(hear)
    if refused:
        raise refused[0]
    return subscriptions


def parse_advisory(data: bytes) -> Pinned | Unpinned | None:
    """Parse an advisory about a pin; None for anything else: everybody who may publish there can send anything."""
    try:
        wire = json.loads(data)
        where = (str(wire["stream"]), str(wire["consumer"]), str(wire["group"]))
        if str(wire["type"]).endswith("consumer_group_pinned"):
            return Pinned(*where, str(wire["pinned_id"]), parse_time(wire["timestamp"]))
        return Unpinned(*where, str(wire["reason"]), parse_time(wire["timestamp"]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None
