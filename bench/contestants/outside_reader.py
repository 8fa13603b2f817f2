"""Reads partitions in several processes without Spark, over the splits that Spark gets.

`feed` is the fastest plain reader on keylane's client: an ordered consumer without acks, messages taken from callbacks
into lists. `split` is the reader that Spark's workers run, with its record batches thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

import keylane
from bench.spark_ground import PARTITIONING, STREAM, Part
from keylane.jetstream import Connection, FeedOptions, Message, consumers, open_feed

_ROWS = 10_000
_DEADLINE_S = 110.0


async def read_by_feed(connection: Connection, part: Part) -> int:
    """Subjects, payloads and sequences of a partition in lists, which are emptied when they are long."""
    config = consumers.ConsumerConfig(
        name=f"outside-{secrets.token_hex(6)}",
        deliver_policy="all",
        ack_policy="none",
        filter_subject=part.subject_filter,
        mem_storage=True,
        num_replicas=1,
        inactive_threshold_s=30,
    )
    created = await consumers.create(connection, STREAM, config)
    subjects: list[bytes] = []
    payloads: list[bytes] = []
    sequences: list[int] = []
    count = 0
    done = asyncio.Event()

    def handle(batch: list[Message]) -> None:
        nonlocal count
        subjects.extend([message.raw_subject for message in batch])
        payloads.extend([message.data for message in batch])
        sequences.extend([message.sequence for message in batch])
        count += len(batch)
        if sequences[-1] >= part.last:
            done.set()
        if len(sequences) >= _ROWS:
            subjects.clear()
            payloads.clear()
            sequences.clear()

    async with await open_feed(
        connection, STREAM, created.name, FeedOptions(on_messages=handle, max_messages=2 * _ROWS)
    ):
        await done.wait()
    await consumers.delete(connection, STREAM, created.name)
    return count


def feed_worker(url: str, parts: Iterator[Part], ready: Callable[[], None]) -> int:
    async def work() -> int:
        async with await keylane.connect(url) as connection:
            ready()
            return sum([await read_by_feed(connection, part) for part in parts])

    return keylane.run(work())


def split_worker(url: str, parts: Iterator[Part], ready: Callable[[], None]) -> int:
    from keylane.spark.address import Address  # noqa: PLC0415 - needs pyspark, which the other reader does not
    from keylane.spark.executor.split_reader import read_split  # noqa: PLC0415
    from keylane.spark.sync_connection import shared_connection  # noqa: PLC0415
    from keylane.spark.tasks import ReadSpec, Split  # noqa: PLC0415

    reading = ReadSpec(Address(url=url), STREAM, "consumer", numbered=True, partitioning=(PARTITIONING,))
    shared_connection(reading.address)
    ready()
    return sum(
        batch.num_rows
        for part in parts
        for batch in read_split(Split(reading, 0, part.last, part.subject_filter, part.last))
    )


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes have in common."""

    reader: str
    url: str
    parts: list[Part]
    taken: Any
    """How many parts are taken: a number that the processes share."""
    start: Barrier
    results: Queue[tuple[int, float, float]]


def work(job: Job) -> None:
    def next_parts() -> Iterator[Part]:
        """As Spark's slots do: each takes the next when it is done with one."""
        while True:
            with job.taken.get_lock():
                number = job.taken.value
                job.taken.value += 1
            if number >= len(job.parts):
                return
            yield job.parts[number]

    cpu = 0.0

    def ready() -> None:
        nonlocal cpu
        job.start.wait(_DEADLINE_S)
        cpu = time.process_time()

    run = feed_worker if job.reader == "feed" else split_worker
    count = run(job.url, next_parts(), ready)
    job.results.put((count, time.process_time() - cpu, time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--reader", choices=["feed", "split"], required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--parts", required=True, help="JSON list of [filter, last sequence]")
    options = parser.parse_args()
    parts = [Part(*one) for one in json.loads(options.parts)]
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(options.processes + 1)
    results: Queue[tuple[int, float, float]] = context.Queue()
    job = Job(options.reader, options.url, parts, context.Value("i", 0), start, results)
    processes = [context.Process(target=work, args=(job,), daemon=True) for _ in range(options.processes)]
    for process in processes:
        process.start()
    start.wait(_DEADLINE_S)
    begun = time.monotonic()
    ended = [results.get(timeout=_DEADLINE_S) for _ in processes]
    for process in processes:
        process.join(_DEADLINE_S)
    print(
        json.dumps(
            {
                "count": sum(count for count, _, _ in ended),
                "seconds": max(at for _, _, at in ended) - begun,
                "cpu_seconds": sum(cpu for _, cpu, _ in ended),
            }
        )
    )


if __name__ == "__main__":
    main()
