"""From the records of a coordination log to tables: spans, gaps, overlaps, pauses, rivals, and the world in the end.

The log is read once, into Parquet. Its records are then spread over the tasks by key and replayed by the rules of
`core/world.py` (`claims_replay`), into one table on disk; the tables for people are views of it. Times are the log's.
"""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from keylane.core.claim_records import RELEASE_GROUP
from keylane.spark.pipelines.claims_records import RECORDS_DDL, LogPiece, LogReader
from keylane.spark.pipelines.claims_replay import HELD, REPLAYED_DDL, Record, Replayer

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

KEY = ("group", "topic", "partition")
_OWNER = ("client", "instance")
_SPAN = ("log_partition", *_OWNER, "from_offset", "from_ms", "to_offset", "to_ms", "ended", "misplaced")

COLUMNS: dict[str, tuple[str, ...]] = {
    "span": (*KEY, *_SPAN, "token", "began"),
    "gap": (*KEY, "log_partition", "client", "next_client", "ended", "from_ms", "to_ms", "gap_ms", "paused_ms"),
    "pause": ("group", "log_partition", *_OWNER, "from_offset", "from_ms", "to_ms", "expiry_ms", "ended"),
    "rival": (
        *KEY, "log_partition", *_OWNER, "heartbeats", "from_offset", "from_ms", "to_offset", "to_ms", "owner_client",
        "owner_instance",
    ),
    "claim": (
        *KEY, "log_partition", *_OWNER, "token", "freshness", "from_ms", "heartbeat_offset", "heartbeat_ms",
        "fresh_until_ms", "holds_until_ms", "next_offset", "taken_offset", "taken_to", "taken_token",
        "released_client", "released_instance", "released_offset", "released_ms", "released_next", "now_ms",
    ),
}  # fmt: skip
"""The columns of the table of each kind of row."""

TABLES = {"spans": "span", "gaps": "gap", "pauses": "pause", "rivals": "rival", "world": "claim"}
"""The tables that are kept, and the kind of their rows. `overlaps` is the sixth."""


def read_log(spark: SparkSession, rows: DataFrame, path: Path) -> DataFrame:
    """The records with what they are about, on disk."""
    rows.mapInArrow(LogReader(), RECORDS_DDL).write.parquet(str(path))
    return spark.read.schema(RECORDS_DDL).parquet(str(path))


def pieces(records: DataFrame, until_ms: int | None) -> list[LogPiece]:
    """What each task has read, and how much of that is not younger than a time."""
    kept = F.lit(True) if until_ms is None else F.col("seen_ms") <= until_ms
    found = records.groupBy("log_partition", "piece").agg(
        F.min("offset"),
        F.max("offset"),
        F.count(F.lit(1)),
        F.max("seen_ms"),
        F.min_by("time_ms", "offset"),
        F.count(F.when(kept, 1)),
        F.max(F.when(kept, F.col("offset"))),
        F.max(F.when(kept, F.col("seen_ms"))),
        F.count(F.when(kept & F.col("kind").isNull(), 1)),
    )
    return [LogPiece(row[0], *row[2:]) for row in found.collect()]


def replay(records: DataFrame, replayer: Replayer, path: Path, *, group: str | None, topic: str | None) -> DataFrame:
    """What the rules make of the records, key by key, in as many tasks as Spark shuffles into."""
    spark = records.sparkSession
    tasks = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    wanted = records.where("kind IS NOT NULL")
    if group is not None:
        wanted = wanted.where(F.col("group") == group)
    is_pause = F.col("kind") == RELEASE_GROUP
    of_keys = wanted.where(~is_pause)
    if topic is not None:
        of_keys = of_keys.where(F.col("topic") == topic)
    home = F.pmod(F.xxhash64("log_partition", *KEY), F.lit(tasks)).cast("int")
    everywhere = F.explode(F.sequence(F.lit(0), F.lit(tasks - 1)))
    spread = of_keys.withColumn("task", home).unionAll(wanted.where(is_pause).withColumn("task", everywhere))
    ordered = (
        spread.select(*Record._fields)
        .repartitionById(tasks, "task")
        .sortWithinPartitions("log_partition", "offset")
    )  # fmt: skip
    ordered.mapInArrow(replayer, REPLAYED_DDL).write.parquet(str(path))
    return spark.read.schema(REPLAYED_DDL).parquet(str(path))


def of_kind(replayed: DataFrame, kind: str) -> DataFrame:
    return replayed.where(F.col("kind") == kind).select(*COLUMNS[kind])


def overlaps(spans: DataFrame) -> DataFrame:
    """Two owners of one key at once: `before`, whose time was not over, and `after`, who had it too.

    The rules let nobody in beside an owner. But where two hashes or two numbers of partitions are in use, a key is kept
    in two partitions of the log, and each may have an owner.
    """
    here = Window.partitionBy(*KEY, "log_partition").orderBy("from_offset")
    anywhere = Window.partitionBy(*KEY).orderBy("from_ms", "log_partition", "from_offset")
    one = F.struct("to_ms", *(name for name in _SPAN if name != "to_ms"))
    both = spans.select(
        *KEY,
        F.struct(*_SPAN).alias("after"),
        F.lag(one).over(here).alias("neighbour"),
        F.max(one).over(anywhere.rowsBetween(Window.unboundedPreceding, -1)).alias("longest"),
    )
    in_time = F.col("longest.to_ms") > F.col("after.from_ms")
    in_order = F.col("neighbour.to_offset").isNull() | (F.col("neighbour.to_offset") > F.col("after.from_offset"))
    in_order = F.col("neighbour").isNotNull() & in_order
    before = F.when(in_time, F.col("longest")).otherwise(F.col("neighbour"))
    found = both.where(in_time | in_order).withColumn("before", before)
    return found.select(*KEY, F.struct(*(f"before.{name}" for name in _SPAN)).alias("before"), "after")


def owners(replayed: DataFrame, since_ms: int) -> DataFrame:
    """What each client had: how many spans and partitions, how long in sum, and how much it has in the end."""
    end = F.least("to_ms", "now_ms")
    return (
        replayed.where("kind = 'span' AND NOT misplaced")
        .groupBy("group", "client")
        .agg(
            F.count(F.lit(1)).alias("spans"),
            F.count_distinct("topic", "partition").alias("partitions"),
            F.sum(F.when(F.col("ended") == HELD, 1).otherwise(0)).alias("held"),
            F.sum(F.greatest(end - F.greatest(F.col("from_ms"), F.lit(since_ms)), F.lit(0))).alias("held_ms"),
        )
    )


# ---- what is shown and kept ---------------------------------------------------------------------------


def first_of_each_kind(replayed: DataFrame, most: int) -> dict[str, list[dict[str, Any]]]:
    """The rows that somebody looks for first."""
    in_order = Window.partitionBy("kind").orderBy("rank", *KEY, "log_partition", "from_offset")
    ranked = replayed.where(F.col("kind").isin(*COLUMNS)).withColumn("place", F.row_number().over(in_order))
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in COLUMNS}
    for row in sorted(ranked.where(F.col("place") <= most).collect(), key=itemgetter("kind", "place")):
        found[row["kind"]].append({name: row[name] for name in COLUMNS[row["kind"]]})
    return found


def first_rows(frame: DataFrame, most: int, *order: Column | str) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in frame.orderBy(*order).limit(most).collect()]


def write_table(frame: DataFrame, path: Path) -> None:
    """A table for keeps, with times as times."""
    columns = (
        F.struct(*(_timed(f"{field.name}.{part}", part) for part in _SPAN)).alias(field.name)
        if field.dataType.typeName() == "struct"
        else _timed(field.name, field.name)
        for field in frame.schema.fields
    )
    frame.select(*columns).write.parquet(str(path))


def _timed(column: str, name: str) -> Column:
    if name in ("gap_ms", "paused_ms"):
        return (F.col(column) / 1000).alias(name.replace("_ms", "_seconds"))
    if name.endswith("_ms"):
        return F.timestamp_millis(F.col(column)).alias(name.replace("_ms", "_time"))
    return F.col(column).alias(name)
