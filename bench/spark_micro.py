"""What a streaming query costs beside its data: the smallest batch, and a query that waits.

Compared with a source that does nothing (`bare_source.py`), as most of a small batch is Spark's own logs and planning.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import keylane
from bench.contest import Say
from keylane.jetstream import Outgoing, publish_many, streams
from keylane.server import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SMALL = "SMALL"
BATCHES = 30
IDLE_S = 10.0
AIM_BATCH = 1.2
AIM_CALLS = 2.0
_FIRST_BATCHES = 3
"""Not counted: they start the query's process and the workers."""


@dataclass(frozen=True, slots=True)
class Micro:
    """Milliseconds of the smallest batch, and calls a second of an idle query."""

    ours_ms: float
    bare_ms: float
    idle_calls: float

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.bare_ms

    def as_json(self) -> dict[str, object]:
        return {
            "batch_ms": {"keylane": round(self.ours_ms, 1), "bare": round(self.bare_ms, 1)},
            "batch_ratio": round(self.ratio, 2),
            "batch_ratio_aim": AIM_BATCH,
            "idle_calls_per_second": round(self.idle_calls, 2),
            "idle_calls_aim": AIM_CALLS,
        }

    def as_text(self) -> str:
        return "\n".join(
            [
                "### The smallest micro-batch, and an idle query",
                "",
                f"- a batch of one row: **{self.ours_ms:.0f} ms**; of a source that does nothing: "
                f"{self.bare_ms:.0f} ms; ratio **{self.ratio:.2f}** (aim {AIM_BATCH:g})",
                f"- an idle query: **{self.idle_calls:.2f}** calls a second to the server (aim {AIM_CALLS:g})",
            ]
        )


def measure(spark: SparkSession, server: NatsServer, rounds: int, say: Say) -> Micro:
    from bench.bare_source import BareSource  # noqa: PLC0415 - needs pyspark, which other rows do not

    spark.dataSource.register(BareSource)
    asyncio.run(_prepare(server.url))
    small = spark.readStream.format("keylane").option("url", server.url).option("stream", SMALL)
    ours: list[float] = []
    bare: list[float] = []
    for number in range(rounds):
        bare += _batches(lambda: spark.readStream.format("bare").option("batches", str(BATCHES)).load())
        ours += _batches(lambda: small.option("maxOffsetsPerTrigger", "1").load())
        say(
            f"  round {number + 1}/{rounds}  a batch of one row: {statistics.median(ours):.0f} ms, "
            f"bare source {statistics.median(bare):.0f} ms"
        )
    idle = _idle_calls(spark, server)
    say(f"  idle query: {idle:.2f} calls/s")
    return Micro(statistics.median(ours), statistics.median(bare), idle)


async def _prepare(url: str) -> None:
    async with await keylane.connect(url) as connection:
        await streams.create(connection, streams.StreamConfig(name=SMALL, subjects=["small.*"], allow_direct=True))
        await publish_many(connection, [Outgoing("small.x", b"x")] * BATCHES)


def _batches(load: Callable[[], DataFrame]) -> list[float]:
    """How long each batch took, the first ones left out."""
    with TemporaryDirectory(prefix="keylane-bench-") as directory:
        query = (
            load().writeStream.format("noop").option("checkpointLocation", directory).trigger(availableNow=True).start()
        )
        query.awaitTermination(120)
        took = [one.durationMs["triggerExecution"] for one in query.recentProgress if one.numInputRows]
        query.stop()
    if len(took) < BATCHES - 1:
        raise SystemExit(f"the query made {len(took)} batches, not {BATCHES}")
    return [float(one) for one in took[_FIRST_BATCHES:]]


def _idle_calls(spark: SparkSession, server: NatsServer) -> float:
    """What the server receives while a query has nothing to do."""
    with TemporaryDirectory(prefix="keylane-bench-") as directory:
        source = spark.readStream.format("keylane").option("url", server.url).option("stream", SMALL)
        query = source.load().writeStream.format("noop").option("checkpointLocation", str(Path(directory))).start()
        query.processAllAvailable()
        before, begun = _received(server), time.monotonic()
        time.sleep(IDLE_S)
        calls = (_received(server) - before) / (time.monotonic() - begun)
        query.stop()
    return calls


def _received(server: NatsServer) -> int:
    return int(server.monitor("varz")["in_msgs"])
