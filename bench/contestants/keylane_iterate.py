"""keylane's feed by `async for`, each message acked."""

from __future__ import annotations

import argparse

import keylane
from bench.contestants.measured import Watch, contestant
from keylane.jetstream import open_feed


async def consume(options: argparse.Namespace, watch: Watch) -> int:
    seen = 0
    async with (
        await keylane.connect(options.url) as connection,
        await open_feed(connection, options.stream, options.consumer) as feed,
    ):
        async for message in feed:
            watch.first()
            message.ack()
            seen += 1
            if seen == options.count:
                break
        await connection.flush()
    return seen


if __name__ == "__main__":
    contestant(consume)
