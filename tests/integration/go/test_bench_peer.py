"""The Go side of the benchmarks publishes, consumes and reads exactly what it is asked to."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from typing import Any

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from keylane.server import NatsServer
from tests.peers import go

pytestmark = [pytest.mark.go, pytest.mark.timeout(180)]

COUNT = 2000


def bench_peer(subcommand: str, url: str, **options: object) -> dict[str, Any]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [str(go.program("bench-peer")), subcommand, f"--url={url}", f"--count={COUNT}", "--timeout=60s"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


async def test_publish_consume_and_ordered_count_every_message(
    nats_server: NatsServer, unique: Callable[..., str]
) -> None:
    stream = unique("bench")
    client = await nats.connect(nats_server.url)
    jetstream = client.jetstream()
    await jetstream.add_stream(StreamConfig(name=stream, subjects=[stream]))
    try:
        config = ConsumerConfig(durable_name="c", ack_policy=AckPolicy.EXPLICIT, max_ack_pending=1000)
        await jetstream.add_consumer(stream, config)
        url = nats_server.url
        published = await asyncio.to_thread(bench_peer, "publish", url, subject=stream, size=16, async_max=500)
        consumed = await asyncio.to_thread(bench_peer, "consume", url, stream=stream, consumer="c", pull_max=300)
        ordered = await asyncio.to_thread(bench_peer, "ordered", url, stream=stream)

        for measured in (published, consumed, ordered):
            assert measured["count"] == COUNT
            assert measured["rate"] == pytest.approx(COUNT / measured["seconds"])
            assert measured["cpu_seconds"] > 0
        assert (await jetstream.stream_info(stream)).state.messages == COUNT
        consumer = await jetstream.consumer_info(stream, "c")
        assert (consumer.num_pending, consumer.num_ack_pending) == (0, 0)
    finally:
        await jetstream.delete_stream(stream)
        await client.close()
