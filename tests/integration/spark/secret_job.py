"""A Spark job in a process of its own that logs in at several servers, and shows all that Spark shows of it.

It does not call `keylane.spark.register`: where keylane is installed, Spark finds the source by itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from tests.peers.spark import spark_session


def main(directory: Path, reads: list[dict[str, str]]) -> None:
    """Each read is the options of one; what it gave is printed."""
    events = directory / "events"
    events.mkdir()
    settings = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": str(events)}
    found = []
    with spark_session(directory / "spark", settings=settings) as spark:
        for number, options in enumerate(reads):
            frame = spark.read.format("keylane").options(**options).load()
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                frame.explain(extended=True)
            (directory / f"plan{number}.txt").write_text(shown.getvalue() + repr(frame))
            counted = frame.count()
            following = spark.readStream.format("keylane").options(**options).load()
            writer = following.writeStream.format("parquet").option("path", str(directory / f"rows{number}"))
            writer = writer.option("checkpointLocation", str(directory / f"checkpoint{number}"))
            query = writer.trigger(availableNow=True).start()
            assert query.awaitTermination(150)
            found.append([counted, spark.read.parquet(str(directory / f"rows{number}")).count()])
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
