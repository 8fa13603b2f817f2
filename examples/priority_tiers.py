"""Priority tiers: the local rack (0) does the work, the cloud (5) only what the rack cannot take at once.

Starts its own server on a free port, runs for a few seconds and needs nothing prepared:

    python examples/priority_tiers.py
"""

from __future__ import annotations

import asyncio
import time

from nats.js.api import RetentionPolicy, StreamConfig

import keylane
from keylane import Connection, priority
from keylane.jetstream import streams
from keylane.server import NatsServer

RACK, CLOUD = 0, 5
A_JOB_TAKES_S = 0.01


class Tier:
    """Workers of one priority."""

    def __init__(self, name: str, level: int, progress: asyncio.Event) -> None:
        self.name = name
        self.level = level
        self._progress = progress
        self.jobs = 0
        self.last_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self, url: str, tasks: asyncio.TaskGroup) -> None:
        ready = asyncio.Event()
        self._task = tasks.create_task(self._work(url, ready))
        async with asyncio.timeout(10):
            await ready.wait()

    async def stop(self) -> None:
        """Leave: return unhandled messages to the server, and end the pulls."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self, url: str, ready: asyncio.Event) -> None:
        # A tier holds at most five jobs. While it is full, it has no pull open, so the server serves the next tier.
        async with (
            keylane.connect(url) as connection,
            priority.consume(connection, "RENDER", "farm", priority=self.level, max_messages=5) as feed,
        ):
            await connection.flush()
            ready.set()
            async for job in feed:
                await asyncio.sleep(A_JOB_TAKES_S)
                job.ack()
                self.jobs += 1
                self.last_at = time.monotonic()
                self._progress.set()


async def publish(connection: Connection, count: int, pause_s: float) -> None:
    for number in range(count):
        await connection.jetstream.publish("render.frame", b"frame %d" % number)
        await asyncio.sleep(pause_s)


async def report(title: str, count: int, progress: asyncio.Event, *tiers: Tier) -> None:
    """Wait until all frames are done, then say who did them."""
    async with asyncio.timeout(30):
        while sum(tier.jobs for tier in tiers) < count:
            progress.clear()
            await progress.wait()
    print(f"{title}: " + ", ".join(f"{tier.name} did {tier.jobs}" for tier in tiers))
    for tier in tiers:
        tier.jobs = 0


async def tell(connection: Connection, url: str, tasks: asyncio.TaskGroup) -> None:
    progress = asyncio.Event()
    rack, cloud = Tier("the rack", RACK, progress), Tier("the cloud", CLOUD, progress)
    await rack.start(url, tasks)
    await cloud.start(url, tasks)
    print(f"the rack has priority {RACK}, the cloud {CLOUD}; lower is served first")

    await publish(connection, 40, pause_s=0.03)
    await report("both are there, 40 frames, one after the other", 40, progress, rack, cloud)

    await publish(connection, 200, pause_s=0)
    await report("both are there, 200 frames at once", 200, progress, rack, cloud)

    await rack.stop()
    left_at = time.monotonic()
    await publish(connection, 1, pause_s=0)
    await report("the rack has left, 1 frame", 1, progress, rack, cloud)
    pause_ms = (cloud.last_at - left_at - A_JOB_TAKES_S) * 1000
    print(f"  the cloud had it {pause_ms:.0f} ms later: nothing has to time out")

    await rack.start(url, tasks)
    await publish(connection, 40, pause_s=0.03)
    await report("the rack is back, 40 frames, one after the other", 40, progress, rack, cloud)

    await rack.stop()
    await cloud.stop()


async def main() -> None:
    async with NatsServer.start() as server, keylane.connect(server.url) as connection:
        await streams.create(
            connection,
            StreamConfig(name="RENDER", subjects=["render.>"], retention=RetentionPolicy.WORK_QUEUE),
        )
        await priority.create(
            connection,
            "RENDER",
            priority.ConsumerConfig(durable_name="farm", priority_groups=("farm",), priority_policy="prioritized"),
        )
        async with asyncio.TaskGroup() as tasks:
            await tell(connection, server.url, tasks)


if __name__ == "__main__":
    keylane.run(main())
