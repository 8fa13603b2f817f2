"""The JVM's nats-spark-connector in a Spark session of its own: one read of the stream for every line on stdin.

The session stays, as ours does, so that only reads are measured. After the reads that are not counted it prints
"ready"; each further line that it prints is one read as JSON. The connector comes as jars: none is in this repository.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import keylane
from bench.spark_ground import STREAM, used_cpu_seconds
from keylane.jetstream import consumers
from tests.peers.spark import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

DEADLINE_S = 110.0
"""Of one read."""
FETCH = 50_000
"""Messages that one task fetches at most: of 10,000 to 100,000 the fastest here."""
SETTINGS = {"spark.driver.memory": "4g", "spark.sql.inMemoryColumnarStorage.compressed": "false"}
"""It caches every batch: room for that, and no time spent on making it small."""
_WARM_UPS = 4
"""It gets faster with every read at first: all of it is compiled while it runs."""
_POLL_S = 0.05
_SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Ground:
    spark: SparkSession
    url: str
    count: int
    directory: Path


def read(ground: Ground) -> dict[str, float]:
    """Every row into Spark's sink that does nothing. The clock is Spark's own: the batches that brought rows."""
    durable = f"connector-{secrets.token_hex(4)}"
    asyncio.run(_create(ground.url, durable))
    cpu = used_cpu_seconds(ground.spark)
    query = _start(ground, durable)
    try:
        _await(query, lambda: _rows(query) >= ground.count, f"{ground.count:,} rows")
        cpu, rows_seen = used_cpu_seconds(ground.spark) - cpu, time.perf_counter()
        with_rows = [one for one in query.recentProgress if one.numInputRows]
        seconds = sum(one.durationMs["triggerExecution"] for one in with_rows) / 1000
        last = max(one.batchId for one in with_rows)
        _await(query, lambda: any(one.batchId > last for one in query.recentProgress), "its acks")
        acks_seconds, count = time.perf_counter() - rows_seen, _rows(query)
    finally:
        query.stop()
    ground.spark.catalog.clearCache()  # its last batch stays there, and the next query would ask for its consumer
    unacknowledged = asyncio.run(_rest(ground.url, durable))
    if count != ground.count:
        raise SystemExit(f"the connector read {count:,} rows of {ground.count:,}")
    return {
        "count": count,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "acks_seconds": acks_seconds,
        "unacknowledged": unacknowledged,
    }


def _start(ground: Ground, durable: str) -> StreamingQuery:
    host, _, port = ground.url.removeprefix("nats://").partition(":")
    credentials = ground.directory / "none.creds"  # it insists on a file; a server without accounts never asks for it
    credentials.touch()
    options = {
        "nats.host": host,
        "nats.port": port,
        "nats.credential.file": str(credentials),
        "nats.pull.subscription.stream.name": STREAM,
        "nats.pull.subscription.durable.name": durable,
        "nats.pull.consumer.create": "false",
        "nats.pull.batch.size": str(_fetch(ground.count)),
        "nats.pull.wait.time": "30",
    }
    stream = ground.spark.readStream.format("nats").options(**options).load()
    return stream.writeStream.format("noop").option("checkpointLocation", str(ground.directory / durable)).start()


def _fetch(count: int) -> int:
    """A divisor of the count: a task that does not get all that it asks for waits until its time is over."""
    return next(size for size in range(min(FETCH, count), 0, -1) if count % size == 0)


def _rows(query: StreamingQuery) -> int:
    return sum(one.numInputRows for one in query.recentProgress)


def _await(query: StreamingQuery, done: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + DEADLINE_S
    while not done():
        if not query.isActive:
            raise SystemExit(f"the connector's query ended before {what}: {query.exception()}")
        if time.monotonic() > until:
            raise SystemExit(f"the connector's query had not brought {what} after {DEADLINE_S:.0f} s")
        time.sleep(_POLL_S)


# ---- its consumer: it acknowledges, so all of the stream has to be allowed in flight ------------------------


async def _create(url: str, durable: str) -> None:
    """In memory: the server then has less to do for it."""
    async with await keylane.connect(url) as connection:
        config = consumers.ConsumerConfig(
            durable_name=durable, max_ack_pending=10_000_000, ack_wait_s=300, mem_storage=True
        )
        await consumers.create(connection, STREAM, config)


async def _rest(url: str, durable: str) -> int:
    """How many acks the server still waits for when that number stands still; the consumer is deleted then."""
    until = time.monotonic() + DEADLINE_S
    before = -1
    async with await keylane.connect(url) as connection:
        while time.monotonic() < until:
            now = int((await connection.api.request(f"CONSUMER.INFO.{STREAM}.{durable}"))["num_ack_pending"])
            if now == before:
                await consumers.delete(connection, STREAM, durable)
                return now
            before = now
            await asyncio.sleep(_SETTLE_S)
    raise SystemExit(f"the acks of {durable} did not come to rest in {DEADLINE_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--jars", required=True, help="separated by commas")
    options = parser.parse_args()
    settings = SETTINGS | {"spark.jars": options.jars}
    with (
        TemporaryDirectory(prefix="keylane-bench-") as directory,
        spark_session(Path(directory), settings=settings) as spark,
    ):
        ground = Ground(spark, options.url, options.count, Path(directory))
        for _ in range(_WARM_UPS):
            read(ground)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(read(ground)), flush=True)


if __name__ == "__main__":
    main()
