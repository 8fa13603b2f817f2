"""Row `spark-read`: a stream read by Spark, against readers outside Spark; and what a small and an idle query cost."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, TYPE_CHECKING

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
"""A task per partition, which keeps whole keys together."""
RANGES = "keylane in Spark, splitBy=sequence"
"""A task per range of sequences: the server need not look for a partition's messages among the others."""
PLAIN = "plain reader, 2 processes"
SAME = "Spark's reader without Spark, 2 processes"
NATS_PY = "nats-py ordered consumer"
JAVA = "Java, as the JVM connector reads, 2 threads"
CONNECTOR = "JVM nats-spark-connector"
STREAMED = "keylane in Spark, streaming query"
STREAMED_RANGES = f"{STREAMED}, splitBy=sequence"
_BY_SEQUENCE = {"splitBy": "sequence"}
AIM = 0.85
"""Of the plain reader outside Spark."""
_READ_DEADLINE_S = 120


def run(rounds: int, scale: float, say: Say, connector: Sequence[Path] = ()) -> tuple[dict[str, object], str]:
    """The figures as JSON and as Markdown. `connector`: jars of the JVM's connector, which then takes part."""
    count = max(10_000, int(1_000_000 * scale))
    peer: JvmConnector | None = None
    with filled_stream(count) as (server, parts), session() as spark:
        title = (
            f"{count:,} messages of {len(PAYLOAD)} B, {len(parts)} partitions, file storage, local[{SLOTS}], noop sink"
        )
        say(title)
        jobs = _jobs(spark, server, parts, count, say)
        with ExitStack() as held:
            if connector:
                peer = held.enter_context(_jvm_connector(server.url, count, connector, say))
                jobs |= {
                    CONNECTOR: peer.read,
                    STREAMED: _streamed(spark, server.url, count, say),
                    STREAMED_RANGES: _streamed(spark, server.url, count, say, **_BY_SEQUENCE),
                }
            figures = run_jobs(jobs, server.pid, rounds, say)
        micro = spark_micro.measure(spark, server, rounds, say)
    compared = ratios(figures, OURS)
    if peer is not None:
        for one in (RANGES, STREAMED, STREAMED_RANGES):
            compared[f"{one} / {CONNECTOR}"] = round(figures[one].rate / figures[CONNECTOR].rate, 2)
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
    texts = [table(title, figures, compared), micro.as_text()]
    if peer is not None:
        ours = {name: figures[name].rate for name in (OURS, RANGES, STREAMED, STREAMED_RANGES)}
        answer["connector"] = peer.as_json(ours)
        texts.insert(1, peer.as_text(ours))
    return answer, "\n\n".join(texts)


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

    def in_spark(**options: str) -> Job:
        def read(_: int) -> dict[str, float]:
            cpu, begun = used_cpu_seconds(spark), time.perf_counter()
            read_whole(spark, url, **options)
            seconds = time.perf_counter() - begun
            return {"count": count, "seconds": seconds, "cpu_seconds": used_cpu_seconds(spark) - cpu}

        return read

    def outside(reader: str) -> Job:
        wanted = json.dumps([[part.subject_filter, part.last] for part in parts])
        command = [sys.executable, "-m", "bench.contestants.outside_reader", "--url", url, "--reader", reader]
        return lambda _: run_command([*command, "--processes", str(SLOTS), "--parts", wanted])

    def nats_py(_: int) -> dict[str, float]:
        arguments = ["--url", url, "--stream", STREAM, "--consumer", "", "--count", str(max(1000, count // 20))]
        return run_command([sys.executable, "-m", "bench.contestants.natspy_ordered", *arguments])

    _check(in_spark(), "the first read in a session starts the workers and is not counted", say)
    jobs: dict[str, Job] = {
        OURS: in_spark(),
        RANGES: in_spark(**_BY_SEQUENCE),
        PLAIN: outside("feed"),
        SAME: outside("split"),
        NATS_PY: nats_py,
    }
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


# ---- with --connector -----------------------------------------------------------------------------------


@dataclass(slots=True)
class JvmConnector:
    """The program `jvm_connector` beside us: it reads when it is told to."""

    process: subprocess.Popen[str]
    errors: IO[str]
    with_acks: list[float] = field(default_factory=list)
    """Messages a second if the clock stops when its acks are sent."""
    unacknowledged: list[int] = field(default_factory=list)
    """Of each read, after its acks."""

    def read(self, _: int) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("read\n")
        self.process.stdin.flush()
        answer: dict[str, float] = json.loads(self.line(_READ_DEADLINE_S))
        self.with_acks.append(answer["count"] / (answer["seconds"] + answer["acks_seconds"]))
        self.unacknowledged.append(int(answer["unacknowledged"]))
        return answer

    def line(self, deadline_s: float) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        text = self.process.stdout.readline() if ready else ""
        if not text:
            self.errors.seek(0)
            raise SystemExit(f"{CONNECTOR} gave no answer within {deadline_s:.0f} s:\n{self.errors.read()[-8000:]}")
        return text

    def as_json(self, ours: Mapping[str, float]) -> dict[str, object]:
        rate = statistics.median(self.with_acks)
        return {
            "rates_with_acks": [round(one) for one in self.with_acks],
            "left_unacknowledged": self.unacknowledged,
            "ratios_with_acks": {name: round(one / rate, 2) for name, one in ours.items()},
        }

    def as_text(self, ours: Mapping[str, float]) -> str:
        rate = statistics.median(self.with_acks)
        left = ", ".join(f"{one:,}" for one in self.unacknowledged)
        compared = ", ".join(f"{name} / that: **{one / rate:.2f}**" for name, one in ours.items())
        return (
            f"- {CONNECTOR}, until its acks are sent: {rate:,.0f} messages/s; {compared}\n"
            f"- messages left unacknowledged after its acks: {left}"
        )


@contextmanager
def _jvm_connector(url: str, count: int, jars: Sequence[Path], say: Say) -> Iterator[JvmConnector]:
    command = [sys.executable, "-m", "bench.contestants.jvm_connector", "--url", url, "--count", str(count)]
    command += ["--jars", ",".join(map(str, jars))]
    say(f"  warming up: {CONNECTOR} in a session of its own")
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            peer = JvmConnector(process, errors)
            peer.line(3 * _READ_DEADLINE_S)
            yield peer
            assert process.stdin is not None
            process.stdin.close()
            process.wait(_READ_DEADLINE_S)
        finally:
            process.kill()


def _streamed(spark: SparkSession, url: str, count: int, say: Say, **options: str) -> Job:
    """As a streaming query, by the connector's measure: what Spark says that the batches took."""

    def read(_: int) -> dict[str, float]:
        stream = spark.readStream.format("keylane").options(url=url, stream=STREAM, **options).load()
        cpu = used_cpu_seconds(spark)
        with TemporaryDirectory(prefix="keylane-bench-") as directory:
            writer = stream.writeStream.format("noop").option("checkpointLocation", directory)
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination(_READ_DEADLINE_S)
            batches = [one for one in query.recentProgress if one.numInputRows]
            query.stop()
        rows = sum(one.numInputRows for one in batches)
        if rows != count:
            raise SystemExit(f"the streaming query read {rows:,} rows of {count:,}")
        seconds = sum(one.durationMs["triggerExecution"] for one in batches) / 1000
        return {"count": rows, "seconds": seconds, "cpu_seconds": used_cpu_seconds(spark) - cpu}

    say("  warming up: our streaming query")
    read(0)
    return read


def _check(job: Job, why: str, say: Say) -> None:
    say(f"  warming up: {why}")
    job(0)
    if os.cpu_count() != SLOTS:
        say(f"  this machine has {os.cpu_count()} cores, the readers use {SLOTS}")
