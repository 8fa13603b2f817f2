"""Row `spark-pushdown`: a batch read of 1 % of a stream, by sequence and by time, with and without pushed filters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.contest import cpu_seconds
from bench.spark_ground import STREAM, filled_stream, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 1_000_000
SHARE = 0.01
_SETTING = "spark.sql.python.filterPushdown.enabled"
_EVERYTHING = "whole stream"


def run(rounds: int, scale: float, say: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """The reads take turns. What they cost the server is its CPU time, which a busy machine changes least."""
    count = max(10_000, round(MESSAGES * scale))
    with filled_stream(count) as (server, _), session() as spark:
        first, last = round(count * 0.5), round(count * (0.5 + SHARE))
        whole = spark.read.format("keylane").options(url=server.url, stream=STREAM, splitBy="sequence").load()
        times = whole.where(f"sequence in ({first + 1}, {last})").selectExpr("min(timestamp)", "max(timestamp)").first()
        assert times is not None
        filters = {
            _EVERYTHING: "true",
            "1 % by sequence": f"sequence > {first} AND sequence <= {last}",
            "1 % by time": f"timestamp >= TIMESTAMP '{times[0]}' AND timestamp <= TIMESTAMP '{times[1]}'",
        }
        found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for number in range(rounds + 1):
            for name, where in filters.items():
                for pushed in (True, False):
                    measured = _read(spark, server.url, server.pid, where, pushed=pushed)
                    if number:  # the first turn starts Spark's workers
                        found.setdefault((name, pushed), []).append(measured)
            say(f"turn {number} of {rounds}")
    rows: list[dict[str, Any]] = [
        {
            "read": name,
            "pushed": pushed,
            "seconds": round(statistics.median(wall for wall, _ in measured), 2),
            "server_cpu_ms": round(1000 * statistics.median(cpu for _, cpu in measured), 1),
        }
        for (name, pushed), measured in found.items()
    ]
    base = next(row["server_cpu_ms"] for row in rows if row["read"] == _EVERYTHING and row["pushed"])
    for row in rows:
        row["of_whole"] = round(row["server_cpu_ms"] / base, 3)
    return {"row": "spark-pushdown", "messages": count, "reads": rows}, _text(count, rows)


def _read(spark: SparkSession, url: str, server_pid: int, where: str, *, pushed: bool) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of the server."""
    spark.conf.set(_SETTING, str(pushed).lower())
    used, begun = cpu_seconds(server_pid), time.perf_counter()
    frame = spark.read.format("keylane").options(url=url, stream=STREAM, splitBy="sequence").load().where(where)
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - begun, cpu_seconds(server_pid) - used


def _text(count: int, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{count:,} messages of 128 B on file",
        "",
        "| read | pushed down | seconds | server CPU ms | of the whole |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        pushed = "yes" if row["pushed"] else "no"
        lines.append(
            f"| {row['read']} | {pushed} | {row['seconds']} | {row['server_cpu_ms']} | {100 * row['of_whole']:.1f} % |"
        )
    return "\n".join(lines)
