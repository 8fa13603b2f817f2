"""Row `spark-write`: rows of Spark into a file stream, against a sink that awaits every publish."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

import keylane
from bench.contest import Job, Say, ratios, run_command, run_jobs, table
from bench.spark_ground import KEYS, SLOTS, session, used_cpu_seconds
from keylane.jetstream import streams
from keylane.server import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

INGEST = "keylane sink, stream with allow_batched"
LANES = "keylane sink, plain stream"
ATOMIC = "keylane sink, stream with allow_atomic"
AWAITING = "Python sink that awaits every publish"
IDLE = "Arrow sink that does nothing"
OUTSIDE = f"publisher outside Spark, {SLOTS} processes"
AIM = 20.0
"""Of the sink that awaits every publish."""
PAYLOAD_BYTES = 128
_STREAM = "BENCH"
_AWAITED_SHARE = 0.05
"""The slow sink writes fewer rows, which takes about as long; rates are compared."""


def run(rounds: int, scale: float, say: Say) -> tuple[dict[str, object], str]:
    """The figures as JSON and as Markdown."""
    from bench.bare_sinks import AwaitingSink, IdleSink  # noqa: PLC0415 - needs pyspark, which other rows do not

    count = max(2000, int(1_000_000 * scale))
    title = f"{count:,} rows of {PAYLOAD_BYTES} B, {KEYS} subjects, file storage, local[{SLOTS}]"
    say(title)
    with NatsServer.start() as server, session() as spark:
        for sink in (AwaitingSink, IdleSink):
            spark.dataSource.register(sink)
        jobs = _jobs(spark, server.url, count)
        say("  warming up: the first writes in a session start the workers and are not counted")
        for name in (INGEST, AWAITING):
            jobs[name](0)
        figures = run_jobs(jobs, server.pid, rounds, say)
    compared = ratios(figures, INGEST) | {f"{LANES} / {AWAITING}": round(_rate(figures, LANES, AWAITING), 2)}
    answer: dict[str, object] = {
        "row": "spark-write",
        "rounds": rounds,
        "count": count,
        "payload_bytes": PAYLOAD_BYTES,
        "contestants": {name: one.as_json() for name, one in figures.items()},
        "ratios": compared,
        "aim": {f"{INGEST} / {AWAITING}": AIM, f"{LANES} / {AWAITING}": AIM},
    }
    return answer, table(title, figures, compared)


def _rate(figures: dict[str, Any], one: str, other: str) -> float:
    return float(figures[one].rate / figures[other].rate)


def _jobs(spark: SparkSession, url: str, count: int) -> dict[str, Job]:
    few = max(1000, int(count * _AWAITED_SHARE))
    outside = [
        sys.executable, "-m", "bench.contestants.outside_writer", "--url", url, "--subject", "bench",
        "--keys", str(KEYS), "--count", str(count), "--processes", str(SLOTS),
    ]  # fmt: skip

    def apart(_: int) -> dict[str, float]:
        asyncio.run(_make(url))
        return run_command(outside)

    return {
        INGEST: _in_spark(spark, url, "keylane", count, allow_batched=True),
        LANES: _in_spark(spark, url, "keylane", count),
        ATOMIC: _in_spark(spark, url, "keylane", count, allow_atomic=True),
        AWAITING: _in_spark(spark, url, "awaiting", few),
        IDLE: _in_spark(spark, url, "idle", count),
        OUTSIDE: apart,
    }


def _in_spark(spark: SparkSession, url: str, sink: str, count: int, **config: bool) -> Job:
    def job(_: int) -> dict[str, float]:
        asyncio.run(_make(url, **config))
        rows = _rows(spark, count)
        options = {"url": url} | ({"stream": _STREAM} if sink == "keylane" else {})
        cpu, begun = used_cpu_seconds(spark), time.perf_counter()
        rows.write.format(sink).options(**options).mode("append").save()
        seconds = time.perf_counter() - begun
        used = used_cpu_seconds(spark) - cpu
        stored = asyncio.run(_stored(url))
        if stored != (0 if sink == "idle" else count):
            raise SystemExit(f"{sink}: {stored} of {count} rows are stored")
        return {"count": count, "seconds": seconds, "cpu_seconds": used}

    return job


def _rows(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count, numPartitions=SLOTS).selectExpr(
        f"concat('bench.', id % {KEYS}) AS subject", f"cast(repeat('x', {PAYLOAD_BYTES}) AS binary) AS data"
    )


async def _make(url: str, **config: bool) -> None:
    """A new stream for every run."""
    async with await keylane.connect(url) as connection:
        if _STREAM in await streams.names(connection):
            await streams.delete(connection, _STREAM)
        wanted = {"name": _STREAM, "subjects": ["bench.*"], "storage": "file", "num_replicas": 1}
        await connection.api.request(f"STREAM.CREATE.{_STREAM}", wanted | config)


async def _stored(url: str) -> int:
    async with await keylane.connect(url) as connection:
        return (await streams.state(connection, _STREAM)).messages
