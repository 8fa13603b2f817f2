"""nats-py's ordered consumer over the whole stream, as its documentation reads it."""

from __future__ import annotations

import argparse

import nats

from bench.contestants.measured import Watch, contestant


async def consume(options: argparse.Namespace, watch: Watch) -> int:
    client = await nats.connect(options.url)
    subscription = await client.jetstream().subscribe(">", stream=options.stream, ordered_consumer=True)
    seen = 0
    while seen < options.count:
        await subscription.next_msg(timeout=10)
        watch.first()
        seen += 1
    await client.close()
    return seen


if __name__ == "__main__":
    contestant(consume)
