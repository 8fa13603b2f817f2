"""Row `spark-read`: a stream read by Spark, against readers outside Spark; and what a small and an idle query cost."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import keylane
from bench import spark_micro
from bench.contest import Job, Say, ratios, run_command, run_jobs, table
from bench.peers.jnats import connector_reader
from bench.spark_ground import (
    PAYLOAD,
    SLOTS,
    STREAM,
    Part,
    fill,
    filled_stream,
    forget_peaks,
    largest_worker_megabytes,
    read_whole,
    session,
    used_cpu_seconds,
)
from keylane.jetstream import consumers
from keylane.server import NatsServer
from tests.peers.presence import PeerMissing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OURS = "keylane in Spark"
PLAIN = "plain reader, 2 processes"
SAME = "Spark's reader without Spark, 2 processes"
NATS_PY = "nats-py ordered consumer"
JAVA = "Java, as the JVM connector reads, 2 threads"
AIM = 0.85
"""Of the plain reader outside Spark."""


def run(rounds: int, scale: float, say: Say) -> tuple[dict[str, object], str]:
    """The figures as JSON and as Markdown."""
    count = max(10_000, int(1_000_000 * scale))
    with filled_stream(count) as (server, parts), session() as spark:
        title = (
            f"{count:,} messages of {len(PAYLOAD)} B, {len(parts)} partitions, file storage, local[{SLOTS}], noop sink"
        )
        say(title)
        figures = run_jobs(_jobs(spark, server, parts, count, say), server.pid, rounds, say)
        micro = spark_micro.measure(spark, server, rounds, say)
    compared = ratios(figures, OURS)
    answer: dict[str, object] = {
        "row": "spark-read",
        "rounds": rounds,
        "count": count,
        "payload_bytes": len(PAYLOAD),
        "contestants": {name: one.as_json() for name, one in figures.items()},
        "ratios": compared,
        "aim": {f"{OURS} / {PLAIN}": AIM},
        **micro.as_json(),
    }
    return answer, "\n\n".join([table(title, figures, compared), micro.as_text()])


def run_linear(millions: Sequence[float], say: Say) -> tuple[dict[str, object], str]:
    """The same read of more and more rows: rows a second, and the peak memory of the Python workers."""
    lines = ["### More and more rows", "", "| rows | rows/s | largest Python worker, MB |", "| ---: | ---: | ---: |"]
    rows: list[dict[str, float]] = []
    with filled_stream(100_000) as (server, _), session() as spark:
        read_whole(spark, server.url)
        for count in [int(one * 1_000_000) for one in sorted(millions)]:
            asyncio.run(fill(server.url, count))
            forget_peaks(spark)
            begun = time.perf_counter()
            read_whole(spark, server.url)
            rate = count / (time.perf_counter() - begun)
            peak = largest_worker_megabytes(spark)
            say(f"  {count:,} rows: {rate:,.0f} rows/s, workers up to {peak:.0f} MB")
            rows.append({"rows": count, "rate": round(rate), "worker_megabytes": round(peak, 1)})
            lines.append(f"| {count:,} | {rate:,.0f} | {peak:.0f} |")
    return {"row": "spark-read", "linear": rows}, "\n".join(lines)


# ---- the contest ----------------------------------------------------------------------------------------


def _jobs(spark: SparkSession, server: NatsServer, parts: list[Part], count: int, say: Say) -> dict[str, Job]:
    """What each reads is counted, so a contestant may read less than the others."""
    url = server.url

    def in_spark(_: int) -> dict[str, float]:
        cpu, begun = used_cpu_seconds(spark), time.perf_counter()
        read_whole(spark, url)
        seconds = time.perf_counter() - begun
        return {"count": count, "seconds": seconds, "cpu_seconds": used_cpu_seconds(spark) - cpu}

    def outside(reader: str) -> Job:
        wanted = json.dumps([[part.subject_filter, part.last] for part in parts])
        command = [sys.executable, "-m", "bench.contestants.outside_reader", "--url", url, "--reader", reader]
        return lambda _: run_command([*command, "--processes", str(SLOTS), "--parts", wanted])

    def nats_py(_: int) -> dict[str, float]:
        arguments = ["--url", url, "--stream", STREAM, "--consumer", "", "--count", str(max(1000, count // 20))]
        return run_command([sys.executable, "-m", "bench.contestants.natspy_ordered", *arguments])

    _check(in_spark, "the first read in a session starts the workers and is not counted", say)
    jobs: dict[str, Job] = {OURS: in_spark, PLAIN: outside("feed"), SAME: outside("split"), NATS_PY: nats_py}
    try:
        program = connector_reader(say)
    except PeerMissing as missing:
        say(f"left out: {JAVA} ({missing})")
    else:
        jobs[JAVA] = _java(url, program, max(1000, count // 5))
    return jobs


def _java(url: str, program: Sequence[str], count: int) -> Job:
    async def consumer() -> str:
        async with await keylane.connect(url) as connection:
            config = consumers.ConsumerConfig(
                durable_name=f"java-{secrets.token_hex(4)}", max_ack_pending=1_000_000, ack_wait_s=60
            )
            return (await consumers.create(connection, STREAM, config)).name

    def read(_: int) -> dict[str, float]:
        return run_command([*program, url, STREAM, asyncio.run(consumer()), str(count), str(SLOTS), "1000"])

    return read


def _check(job: Job, why: str, say: Say) -> None:
    say(f"  warming up: {why}")
    job(0)
    if os.cpu_count() != SLOTS:
        say(f"  this machine has {os.cpu_count()} cores, the readers use {SLOTS}")
