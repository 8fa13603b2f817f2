"""A Spark driver in a process of its own, told on stdin what to do; for tests that kill and freeze drivers.

Commands are lines: `start`, `stop` and `end`. What it says are lines on stdout: `ready`, `started`, `ended: …`, `bye`.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.peers.spark import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def say(text: str) -> None:
    sys.stdout.write(text.replace("\n", " ") + "\n")
    sys.stdout.flush()


def start(spark: SparkSession, plan: dict[str, str], options: dict[str, str]) -> StreamingQuery:
    """The query that every driver of a test runs: sequences and partitions into Parquet."""
    read = spark.readStream.format("keylane").options(**options).load()
    write = read.select("sequence", "partition").writeStream.format("parquet").option("path", plan["output"])
    return write.option("checkpointLocation", plan["checkpoint"]).trigger(processingTime="100 milliseconds").start()


def commands() -> list[str]:
    """What came on stdin meanwhile, as lines."""
    ready, _, _ = select.select([sys.stdin], [], [], 0.1)
    if not ready:
        return []
    text = os.read(sys.stdin.fileno(), 4096).decode()
    return text.splitlines() if text else ["end"]


def main(directory: Path, plan: dict[str, str], options: dict[str, str]) -> None:
    from keylane.spark import register  # noqa: PLC0415 - after the path is set

    query: StreamingQuery | None = None
    with spark_session(directory, settings={"spark.log.level": "WARN"}) as spark:
        register(spark)
        say("ready")
        while True:
            if query is not None and not query.isActive:
                say(f"ended: {query.exception() or 'without an error'}")
                query = None
            for command in commands():
                if command == "start":
                    query = start(spark, plan, options)
                    say("started")
                elif command == "stop" and query is not None:
                    query.stop()
                elif command == "end":
                    say("bye")
                    return


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
