"""A read, a streaming copy and a pipeline in one Spark: `python -m tests.integration.spark.newest_job URL DIRECTORY`.

Prints what it found as JSON. Which Spark it is, PYTHONPATH decides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.peers.spark import spark_session

SECONDS = 150


def main(url: str, directory: Path) -> None:
    with spark_session(directory) as spark:
        import keylane.spark  # noqa: PLC0415 - the session's Java must be set first
        from keylane.spark.address import Address  # noqa: PLC0415
        from keylane.spark.pipelines import lake  # noqa: PLC0415

        keylane.spark.register(spark)
        options = {"url": url, "stream": "FROM"}
        read = spark.read.format("keylane").options(**options).load()
        to = {"url": url, "stream": "TO", "subject": "to.all", "checkpointLocation": str(directory / "checkpoint")}
        rows = spark.readStream.format("keylane").options(**options, maxOffsetsPerTrigger="40").load()
        copy = rows.select("data").writeStream.format("keylane").options(**to).trigger(availableNow=True).start()
        ended = copy.awaitTermination(SECONDS)
        table = lake.Settings(
            stream="FROM",
            table=str(directory / "table"),
            address=Address(url=url),
            available_now=True,
            format="parquet",
        )
        found = {
            "spark": spark.version,
            "read": [int(bytes(row["data"])) for row in read.orderBy("sequence").collect()],
            "copied": ended,
            "pipeline": lake.run(spark, table).as_json()["rows"],
        }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
