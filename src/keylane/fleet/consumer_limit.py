"""How many consumers a stream takes, and how fast a worker makes them.

A stream takes `max_consumers`. Where that is not set, server 2.15 takes 1,000 (its `default_max_consumers`). A stream's
own limit can be raised while it is in use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from keylane.errors import FleetError, KeylaneError
from keylane.jetstream import Connection, consumers, streams

_log = logging.getLogger("keylane.fleet")

TOO_MANY_CONSUMERS = 10026
DEFAULT_MAX_CONSUMERS = 1000
_DEFAULT_SINCE = (2, 15, 0)

CREATIONS_PER_S = 200.0
_AT_ONCE = 4
"""A cluster makes a hundred replicated consumers a second: the answers set the pace of many workers together."""


async def ensure_room(connection: Connection, stream: str, needed: Collection[str]) -> None:
    """See to it that the stream takes these consumers; raise its limit, or `FleetError`."""
    wire = await streams.info_json(connection, stream)
    limit, others = wire["config"].get("max_consumers", -1), wire["state"]["consumer_count"]
    if limit <= 0:
        if connection.server_version < _DEFAULT_SINCE:
            return
        limit = DEFAULT_MAX_CONSUMERS
    if others + len(needed) <= limit:
        return
    total = len({*await consumers.names(connection, stream), *needed})
    if total <= limit:
        return
    wanted = total + DEFAULT_MAX_CONSUMERS
    try:
        await streams.update_json(connection, {**wire["config"], "max_consumers": wanted})
    except KeylaneError as error:
        raise FleetError(
            f"stream {stream!r} takes {limit} consumers, and the fleet makes it {total}; the limit could not be raised "
            f"({error}). Set max_consumers to {wanted}: `nats stream edit {stream} --interactive`, or raise "
            "default_max_consumers of the server"
        ) from error
    _log.info("stream %r took %d consumers and now takes %d, for the partitions of a fleet", stream, limit, wanted)


class CreationPace:
    """Lets the readers of one worker make consumers, a few at once and so many a second."""

    def __init__(self, waits: Callable[[int], None], per_s: float = CREATIONS_PER_S) -> None:
        """`waits`: told how many wait now, whenever that has changed much."""
        self._tell = waits
        self._pause_s = 1 / per_s
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0
        self._next_at = 0.0

    def __repr__(self) -> str:
        return f"<CreationPace {self._waiting} wait>"

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        self._waiting += 1
        self._say()
        try:
            async with self._limit:
                now = time.monotonic()
                self._next_at = max(now, self._next_at) + self._pause_s
                await asyncio.sleep(self._next_at - self._pause_s - now)
                yield
        finally:
            self._waiting -= 1
            self._say()

    def _say(self) -> None:
        if self._waiting % 100 == 0:
            self._tell(self._waiting)
