"""Ground for benchmarks of Spark: a filled stream in ten partitions, a session, and what its processes use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from nats.js.api import SubjectTransform

import keylane
import keylane.spark
from bench.contest import cpu_seconds
from keylane.core.partitions import Partitioning
from keylane.jetstream import Outgoing, publish_many, streams
from keylane.server import NatsServer
from tests.peers.spark import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STREAM = "ORDERS"
PARTITIONS = 10
KEYS = 640
PAYLOAD = bytes(128)
SLOTS = 2
"""Tasks that run at once, and processes of a reader outside Spark."""
PARTITIONING = Partitioning("orders.*", (1,), PARTITIONS)
_CHUNK = 200_000


@dataclass(frozen=True, slots=True)
class Part:
    """One partition of the stream: its filter and its newest message."""

    subject_filter: str
    last: int


async def prepare(url: str) -> None:
    async with await keylane.connect(url) as connection:
        await streams.create(
            connection,
            streams.StreamConfig(
                name=STREAM,
                subjects=["orders.*"],
                storage=streams.StorageType.FILE,
                allow_direct=True,
                subject_transform=SubjectTransform(src=PARTITIONING.filter, dest=PARTITIONING.destination),
            ),
        )


async def fill(url: str, count: int) -> list[Part]:
    """Publish until the stream holds `count` messages; returns its partitions."""
    async with await keylane.connect(url) as connection:
        stored = (await streams.state(connection, STREAM)).last_sequence
        while stored < count:
            upto = min(count, stored + _CHUNK)
            results = await publish_many(
                connection, (Outgoing(f"orders.{number % KEYS}", PAYLOAD) for number in range(stored, upto))
            )
            failed = [one for one in results if isinstance(one, Exception)]
            if failed:
                raise SystemExit(f"filling the stream failed {len(failed)} times, first: {failed[0]}")
            stored = upto
        parts = []
        for number in range(PARTITIONS):
            request = {"last_by_subj": f"{number}.>"}
            answer = await connection.api.request(f"STREAM.MSG.GET.{STREAM}", request)
            parts.append(Part(f"{number}.>", int(answer["message"]["seq"])))
        return parts


@contextmanager
def filled_stream(count: int) -> Iterator[tuple[NatsServer, list[Part]]]:
    with NatsServer.start() as server:
        asyncio.run(prepare(server.url))
        yield server, asyncio.run(fill(server.url, count))


@contextmanager
def session() -> Iterator[SparkSession]:
    """`local[2]` with `format("keylane")`; its workers can import this package."""
    repository = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([repository, *filter(None, [os.environ.get("PYTHONPATH")])])
    with TemporaryDirectory(prefix="keylane-bench-") as directory, spark_session(Path(directory)) as spark:
        keylane.spark.register(spark)
        yield spark


def read_whole(spark: SparkSession, url: str, **options: str) -> None:
    """Every row into Spark's sink that does nothing."""
    stream = spark.read.format("keylane").options(url=url, stream=STREAM, **options)
    stream.load().write.format("noop").mode("overwrite").save()


# ---- the processes of a session -----------------------------------------------------------------------


def driver_jvm(spark: SparkSession) -> int:
    return int(spark.sparkContext._gateway.proc.pid)  # type: ignore[union-attr]  # there is one: we started it


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def used_cpu_seconds(spark: SparkSession) -> float:
    """Of the JVM, of its Python workers, and of this process, which is the driver's Python."""
    total = cpu_seconds(os.getpid())
    for pid in family(driver_jvm(spark)):
        try:
            total += cpu_seconds(pid)
        except FileNotFoundError:
            continue
    return total


def largest_worker_megabytes(spark: SparkSession) -> float:
    """The peak of the largest Python worker since the last `forget_peaks`."""
    return max((_peak_kilobytes(pid) for pid in workers(spark)), default=0) / 1024


def forget_peaks(spark: SparkSession) -> None:
    for pid in workers(spark):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def workers(spark: SparkSession) -> list[int]:
    """Those that run tasks: Spark's planning has Python processes of its own, which come and go."""
    return [pid for pid in family(driver_jvm(spark))[1:] if "pyspark.worker" in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _peak_kilobytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0
