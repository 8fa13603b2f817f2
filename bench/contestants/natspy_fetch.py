"""nats-py's pull subscription with `fetch`, each message acked."""

from __future__ import annotations

import argparse

import nats

from bench.contestants.measured import Watch, contestant


async def consume(options: argparse.Namespace, watch: Watch) -> int:
    client = await nats.connect(options.url)
    subscription = await client.jetstream().pull_subscribe_bind(options.consumer, options.stream)
    # A fetch waits for its whole batch, which never comes if fewer may be unacknowledged.
    limit = (await subscription.consumer_info()).config.max_ack_pending or 1
    batch = min(500, limit)
    seen = 0
    while seen < options.count:
        for message in await subscription.fetch(batch, timeout=10):
            watch.first()
            await message.ack()
            seen += 1
    await client.flush()
    await client.close()
    return seen


if __name__ == "__main__":
    contestant(consume)
