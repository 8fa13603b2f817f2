"""A batch write whose tasks fail or die once each, half way, in a process of its own: `local[2]` retries no task.

Arguments: a directory, the server's url, the stream.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

import keylane.spark
from tests.peers.spark import spark_session

ROWS = 6000


def main(directory: Path, url: str, stream: str) -> None:
    marks = directory / "failed"
    marks.mkdir()

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # noqa: PLC0415 - in the worker

        task = TaskContext.get()
        assert task is not None
        for number, batch in enumerate(batches):
            mark = marks / str(task.partitionId())
            if number == 3 and not mark.exists():
                mark.touch()
                if task.partitionId() % 2:
                    os._exit(7)
                raise RuntimeError("once")
            yield batch

    settings = {"spark.master": "local[2,3]", "spark.sql.execution.arrow.maxRecordsPerBatch": "400"}
    with spark_session(directory, settings=settings) as spark:
        keylane.spark.register(spark)
        numbers = spark.range(ROWS, numPartitions=2).selectExpr(
            f"concat('{stream}.', spark_partition_id(), '.', id % 5) AS subject", "cast(id AS string) AS data"
        )
        broken = numbers.mapInArrow(fail_once, numbers.schema)
        broken.write.format("keylane").option("url", url).option("stream", stream).mode("append").save()
    sys.stdout.write(f"failed once: {sorted(one.name for one in marks.iterdir())}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
