"""What the tests of Marshal on a real server share: a partitioned stream, a log beside it, and consumers of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import keylane
from keylane import Connection
from keylane.errors import PublishFailed
from keylane.jetstream import Outgoing, publish_many
from keylane.marshal import Consumer, JetStreamLog, StreamSource, open_jetstream_log
from keylane.server import NatsServer

INTERVAL_S = 3.0
PARTITIONS = 6


@dataclass(frozen=True)
class Ground:
    """A partitioned stream and a log, for one test."""

    server: NatsServer
    stream: str
    log_name: str
    interval_s: float = INTERVAL_S

    @asynccontextmanager
    async def consumer(self, client: str, handler: Any, **options: Any) -> AsyncIterator[Consumer]:
        """With a connection of its own, as another process would have."""
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(await keylane.connect(self.server.url))
            log = await stack.enter_async_context(
                open_jetstream_log(connection, self.log_name, interval_s=self.interval_s, max_age_s=3600)
            )
            commits = options.pop("commits", None)
            source = StreamSource(connection, commits=commits)
            yield await stack.enter_async_context(
                Consumer(log, source, "billing", client, [self.stream], handler, **options)
            )


async def make(connection: Connection, server: NatsServer, stream: str, log_name: str) -> Ground:
    transform = {"src": f"{stream}.*", "dest": f"{{{{Partition({PARTITIONS},1)}}}}.{stream}.{{{{Wildcard(1)}}}}"}
    await connection.api.request(
        f"STREAM.CREATE.{stream}",
        {"name": stream, "subjects": [f"{stream}.*"], "subject_transform": transform, "allow_direct": True},
    )
    return Ground(server, stream, log_name)


async def publish(connection: Connection, ground: Ground, count: int, *, first: int = 0) -> None:
    """Each is stored, or it is said. What a server that is away refuses is sent again."""
    left = [Outgoing(f"{ground.stream}.k{number % 30}", b"%d" % number) for number in range(first, first + count)]
    async with asyncio.timeout(30):
        while left:
            results = await publish_many(connection, left)
            left = [one for one, result in zip(left, results, strict=True) if isinstance(result, PublishFailed)]
            if left:
                await asyncio.sleep(0.1)


@asynccontextmanager
async def reopened(connection: Connection, ground: Ground) -> AsyncIterator[JetStreamLog]:
    async with open_jetstream_log(connection, ground.log_name) as log:
        yield log
