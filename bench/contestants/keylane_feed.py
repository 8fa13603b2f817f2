"""keylane's feed with a callback, as the Go client's `Consume` has one; each message acked."""

from __future__ import annotations

import argparse
import asyncio

import keylane
from bench.contestants.measured import Watch, contestant
from keylane.jetstream import FeedOptions, Message, open_feed


async def consume(options: argparse.Namespace, watch: Watch) -> int:
    seen = 0
    done = asyncio.Event()

    def handle(batch: list[Message]) -> None:
        nonlocal seen
        watch.first()
        for message in batch:
            message.ack()
        seen += len(batch)
        if seen >= options.count:
            done.set()

    async with (
        await keylane.connect(options.url) as connection,
        await open_feed(connection, options.stream, options.consumer, FeedOptions(on_messages=handle)),
    ):
        await done.wait()
        await connection.flush()
    return seen


if __name__ == "__main__":
    contestant(consume)
