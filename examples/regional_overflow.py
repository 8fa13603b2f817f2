"""Regional overflow: us-east does the work, us-west helps only while 50 or more jobs are waiting.

Starts its own server on a free port, runs for a few seconds and needs nothing prepared:

    python examples/regional_overflow.py
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from nats.js.api import RetentionPolicy, StreamConfig

import keylane
from keylane import Connection, priority
from keylane.jetstream import streams
from keylane.server import NatsServer

MANY = 50
A_JOB_TAKES_S = 0.01


@dataclass
class Region:
    """What one region did since the last report."""

    name: str
    jobs: int = 0
    waiting: list[int] = field(default_factory=list)
    """For each of its jobs: how many jobs were waiting at its delivery, including that one."""


async def work(connection: Connection, region: Region, min_pending: int | None, progress: asyncio.Event) -> None:
    # A small window: what a reader holds in its buffer no longer counts as waiting, and cannot go elsewhere.
    async with priority.consume(connection, "JOBS", "workers", min_pending=min_pending, max_messages=5) as feed:
        async for job in feed:
            await asyncio.sleep(A_JOB_TAKES_S)
            job.ack()
            region.jobs += 1
            region.waiting.append(job.delivery.pending + 1)
            progress.set()


async def publish(connection: Connection, count: int, pause_s: float) -> None:
    for number in range(count):
        await connection.jetstream.publish("jobs.resize", b"image %d" % number)
        await asyncio.sleep(pause_s)


async def report(title: str, count: int, east: Region, west: Region, progress: asyncio.Event) -> None:
    """Wait until all jobs are done, then say who did them."""
    async with asyncio.timeout(30):
        while east.jobs + west.jobs < count:
            progress.clear()
            await progress.wait()
    print(f"{title}: us-east did {east.jobs}, us-west did {west.jobs}")
    if west.jobs:
        print(f"  each time us-west was given a job, at least {min(west.waiting)} were waiting")
    for region in (east, west):
        region.jobs = 0
        region.waiting.clear()


async def tell(connection: Connection, east: Region, west: Region, progress: asyncio.Event) -> None:
    print(f"us-east takes every job; us-west only while {MANY} or more are waiting")

    await publish(connection, 40, pause_s=0.02)
    await report("a quiet time, 40 jobs", 40, east, west, progress)

    await publish(connection, 400, pause_s=0)
    await report("a rush, 400 jobs at once", 400, east, west, progress)

    await publish(connection, 40, pause_s=0.02)
    await report("quiet again, 40 jobs", 40, east, west, progress)


async def main() -> None:
    async with (
        NatsServer.start() as server,
        keylane.connect(server.url) as east_link,
        keylane.connect(server.url) as west_link,
    ):
        await streams.create(
            east_link, StreamConfig(name="JOBS", subjects=["jobs.>"], retention=RetentionPolicy.WORK_QUEUE)
        )
        await priority.create(
            east_link,
            "JOBS",
            priority.ConsumerConfig(durable_name="workers", priority_groups=("jobs",), priority_policy="overflow"),
        )
        east, west = Region("us-east"), Region("us-west")
        progress = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            workers = [
                tasks.create_task(work(east_link, east, None, progress)),
                tasks.create_task(work(west_link, west, MANY, progress)),
            ]
            await tell(east_link, east, west, progress)
            for worker in workers:
                worker.cancel()


if __name__ == "__main__":
    keylane.run(main())
