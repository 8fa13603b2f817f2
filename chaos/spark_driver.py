"""The driver that a Spark fault run kills: one streaming query, from a stream to Parquet files or to another stream.

Its one argument is a `Query` as JSON. It ends by itself only when it is told to take what is there (`available_now`).
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.peers.spark import delta_session, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

SECONDS_TO_FINISH = 600
OUT = "SEEN"
READ_BY_SPARK = "read by Spark:"

Into = Literal["parquet", "lake", "stream", "batch"]
"""Files of Spark's own sink, a Delta table (lake), another stream, or files of one read without streaming."""


@dataclass(frozen=True, slots=True)
class Query:
    """What the query does and where it keeps what it has done."""

    url: str
    stream: str
    directory: str
    max_rows: int
    available_now: bool
    into: Into
    after: int = 0
    """A lake's streaming run begins behind it, and a backfill writes what is up to it at the same time."""

    @property
    def checkpoint(self) -> Path:
        return self.files / "_keylane" / "checkpoint" if self.into == "lake" else Path(self.directory) / "checkpoint"

    @property
    def files(self) -> Path:
        return Path(self.directory) / "files"

    def as_argument(self) -> str:
        return json.dumps(asdict(self))


def main(argument: str) -> None:
    query = Query(**json.loads(argument))
    settings = delta_session() if query.into == "lake" else {}
    with spark_session(Path(query.directory) / "spark", settings=settings) as spark:
        if query.into == "lake":
            _fill_lake(query, spark)
            return
        if query.into == "batch":
            _read_at_once(query, spark)
            return
        writer = _into(query, _rows(query, spark)).option("checkpointLocation", str(query.checkpoint))
        if query.available_now:
            writer = writer.trigger(availableNow=True)
        writer.start().awaitTermination(SECONDS_TO_FINISH)


def _fill_lake(query: Query, spark: SparkSession) -> None:
    """A streaming run and a backfill at the same time. When both are done, says how many rows Spark then reads."""
    from keylane.spark.address import Address  # noqa: PLC0415 - the session's Java must be set first
    from keylane.spark.pipelines import lake  # noqa: PLC0415

    common = lake.Settings(
        stream=query.stream, table=str(query.files), address=Address(url=query.url), max_rows=query.max_rows
    )
    streaming = replace(
        common,
        start=str(query.after + 1),
        interval_s=0.0,
        compact=True,
        compact_every=3,
        available_now=query.available_now,
    )
    backfill = threading.Thread(
        target=lambda: print(lake.run(spark, replace(common, end=str(query.after)), print).as_text(), flush=True)
    )
    backfill.start()
    print(lake.run(spark, streaming, print).as_text(), flush=True)
    backfill.join(SECONDS_TO_FINISH)
    rows = spark.read.format("delta").load(str(query.files))
    print(READ_BY_SPARK, *rows.selectExpr("count(*)", "count(DISTINCT sequence)").collect()[0], flush=True)


def _read_at_once(query: Query, spark: SparkSession) -> None:
    from keylane.spark import register  # noqa: PLC0415 - the session's Java must be set first

    register(spark)
    rows = spark.read.format("keylane").option("url", query.url).option("stream", query.stream).load()
    rows.write.parquet(str(query.files))


def _rows(query: Query, spark: SparkSession) -> DataFrame:
    from keylane.spark import register  # noqa: PLC0415 - the session's Java must be set first

    register(spark)
    return (
        spark.readStream.format("keylane")
        .option("url", query.url)
        .option("stream", query.stream)
        .option("maxOffsetsPerTrigger", str(query.max_rows))
        .load()
    )


def _into(query: Query, rows: DataFrame) -> DataStreamWriter:
    if query.into == "parquet":
        return rows.writeStream.format("parquet").option("path", str(query.files))
    changed = rows.selectExpr(
        "concat('out.', key) AS subject", "concat('seen ', cast(data AS STRING)) AS data", "sequence"
    )
    return (
        changed.writeStream.format("keylane")
        .option("url", query.url)
        .option("stream", OUT)
        .option("queryName", "chaos-copy")
    )


if __name__ == "__main__":
    main(sys.argv[1])
