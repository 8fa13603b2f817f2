"""A program as a user would submit it: reads a stream in a batch and as a query, and writes down what it saw.

Arguments: the stream, the server's url, a directory for results, and a file to log in with or "-". It runs from a
directory without keylane, so it imports nothing of the tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark.sql import DataFrame, SparkSession

import keylane.spark


def whereabouts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Where a task runs and what it imports; it gets the rows of one split."""
    import os  # noqa: PLC0415 - the executor's
    import sys  # noqa: PLC0415

    import keylane  # noqa: PLC0415

    rows = sum(batch.num_rows for batch in batches)
    facts = {"directory": os.getcwd(), "python": sys.executable, "keylane": keylane.__file__}
    yield pa.RecordBatch.from_pylist([{**facts, "row_count": rows}])


def in_partitions(df: DataFrame) -> dict[int, list[int]]:
    """The sequences of each partition, in the order in which rows came."""
    found: dict[int, list[int]] = {}
    for row in df.select("partition", "sequence").collect():
        found.setdefault(row["partition"], []).append(row["sequence"])
    return found


def last_of_key(key: str, rows: pa.Table) -> pa.Table:
    return pa.table({"key": [key], "last": rows["sequence"][-1:].combine_chunks(), "size": [rows.num_rows]})


def main(stream: str, url: str, results: Path, seed_file: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    keylane.spark.register(spark)
    options: dict[str, Any] = {"url": url, "stream": stream}
    if seed_file != "-":
        options["nkeySeedFile"] = seed_file
    batch = spark.read.format("keylane").options(**options).load()
    tasks = batch.mapInArrow(whereabouts, "directory STRING, python STRING, keylane STRING, row_count BIGINT")
    lasts = keylane.spark.in_key_order(batch, last_of_key, "key STRING, last BIGINT, size BIGINT", shuffle=False)
    found: dict[str, Any] = {
        "batch": in_partitions(batch),
        "tasks": [row.asDict() for row in tasks.collect()],
        "lasts": {row["key"]: row["last"] for row in lasts.collect()},
    }
    live = spark.readStream.format("keylane").options(**options, maxOffsetsPerTrigger=70).load()
    query = (
        live.select("partition", "sequence")
        .writeStream.format("parquet")
        .option("path", str(results / "rows"))
        .option("checkpointLocation", str(results / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    written = spark.read.parquet(str(results / "rows"))
    found["stream"] = sorted(row["sequence"] for row in written.collect())
    found["batches"] = len({progress["batchId"] for progress in query.recentProgress if progress["numInputRows"]})
    (results / "found.json").write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
