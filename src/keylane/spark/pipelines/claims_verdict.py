"""The verdict on a replayed coordination log: what Spark counts, keeps and shows of the rows of `claims_replay`.

The tables for people are views of these rows: spans, gaps, overlaps, pauses, rivals, and the world in the end. Times
are the log's.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from keylane.core.claim_facts import Verdict
from keylane.core.claim_history import ENDS, HELD, IN_FORCE
from keylane.core.claim_records import CLAIMING_PARTITION
from keylane.errors import InvalidInput
from keylane.spark.pipelines.claims_replay import HISTORY_DDL, ReplayedLog, replay, run_apart
from keylane.spark.pipelines.spark_jobs import Say

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from keylane.spark.pipelines.claims import Settings


def judge(spark: SparkSession, settings: Settings, aside: Path, say: Say) -> dict[str, Any]:
    """The parts of a report; all tables are in `aside/claims` afterwards, if they are to be kept."""
    path = aside / "replayed.parquet"
    log = run_apart(lambda: replay(settings, path, say))
    rows = spark.read.schema(HISTORY_DDL).parquet(str(path))
    say("counting")
    totals = _Totals(rows)
    if not totals.says_something and (settings.group is not None or settings.topic is not None):
        named = {"group": settings.group, "topic": settings.topic}
        told = " and ".join(f"{name} {text!r}" for name, text in named.items() if text is not None)
        raise InvalidInput(f"the coordination log says nothing of {told}: look at the names in `keylane marshal world`")
    spans = of_kind(rows, "span")
    may_cross = bool(totals.of("overlap") or totals.of("span", misplaced=True))
    crossed = overlaps(spans if may_cross else spans.where("false"))
    if settings.out is not None:
        say("writing the tables")
        for name, kind in TABLES.items():
            write_table(of_kind(rows, kind), aside / "claims" / name)
        write_table(crossed, aside / "claims" / "overlaps")
    crossings = crossed.count() if may_cross else 0
    misplaced = totals.of("count", "times", verdict=Verdict.MISPLACED.value)
    return {
        "log": log.name,
        "partitions": log.partitions,
        "violations": {"overlaps": crossings, "misplaced": misplaced},
        "facts": _facts(log, totals),
        "spans": {how: totals.of("span", ended=how) for how in ENDS},
        "evidence": _evidence(rows, log, totals, crossed if crossings else None, settings.evidence),
    }


# ---- counting -----------------------------------------------------------------------------------------


class _Totals:
    """The rows of a replay, summed by what they are."""

    def __init__(self, replayed: DataFrame) -> None:
        sums = replayed.groupBy("kind", "ended", "freshness", "record", "verdict", "misplaced").agg(
            F.count(F.lit(1)).alias("rows"),
            F.sum("times").alias("times"),
            F.sum("heartbeats").alias("heartbeats"),
            F.max("gap_ms").alias("longest"),
            F.count(F.when(F.col("to_ms").isNull(), 1)).alias("open"),
        )
        self.sums = [row.asDict() for row in sums.collect()]

    @property
    def says_something(self) -> bool:
        return any(row["kind"] != "unreadable" for row in self.sums)

    def of(self, kind: str, column: str = "rows", **like: object) -> int:
        """The sum over the rows of a kind that are like this: `of("span", ended="held")`."""
        return sum(row[column] for row in self._rows(kind, **like))

    def longest_gap_ms(self) -> int:
        return max((row["longest"] for row in self._rows("gap")), default=0)

    def _rows(self, kind: str, **like: object) -> Iterator[dict[str, Any]]:
        return (row for row in self.sums if row["kind"] == kind and like.items() <= row.items())


def _facts(log: ReplayedLog, totals: _Totals) -> dict[str, int]:
    states = {"fresh": "fresh", "unknown": "unknown", "stale": "stale", "free": None}
    return {
        "records": log.records,
        "unreadable": log.unreadable,
        "keys": totals.of("claim"),
        **{f"keys_{name}": totals.of("claim", freshness=state) for name, state in states.items()},
        **{
            f"claims_{one.value}": totals.of("count", "times", record=CLAIMING_PARTITION, verdict=one.value)
            for one in (Verdict.WON, Verdict.LOST, Verdict.PAUSED, Verdict.UNSURE)
        },
        "gaps": totals.of("gap"),
        "gaps_open": totals.of("gap", "open"),
        "longest_gap_ms": totals.longest_gap_ms(),
        "pauses": totals.of("pause"),
        "pauses_in_force": totals.of("pause", ended=IN_FORCE),
        "rivals": totals.of("rival"),
        "rival_heartbeats": totals.of("rival", "heartbeats"),
    }


# ---- showing ------------------------------------------------------------------------------------------


def _evidence(
    rows: DataFrame, log: ReplayedLog, totals: _Totals, crossed: DataFrame | None, most: int
) -> dict[str, list[dict[str, Any]]]:
    evidence: dict[str, list[dict[str, Any]]] = {name: [] for name in ("overlaps", *TABLES)}
    evidence |= {"owners": [], "unreadable": []}
    if not most:
        return evidence
    if crossed is not None:
        evidence["overlaps"] = first_rows(crossed, most, "after.from_ms", *KEY)
    first = first_of_each_kind(rows, most)
    evidence |= {name: first[kind] for name, kind in TABLES.items()}
    if totals.of("span"):
        by_client = owners(rows, log.since_ms)
        evidence["owners"] = first_rows(by_client, most, F.col("held_ms").desc(), "group", "client")
    evidence["unreadable"] = [
        {"log_partition": row["log_partition"], "offset": row["from_offset"], "time_ms": row["from_ms"]}
        | {"reason": row["verdict"]}
        for row in first["unreadable"]
    ]
    return evidence


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
    "unreadable": ("log_partition", "from_offset", "from_ms", "verdict"),
}  # fmt: skip
"""The columns of the table of each kind of row."""

TABLES = {"spans": "span", "gaps": "gap", "pauses": "pause", "rivals": "rival", "world": "claim"}
"""The tables that are kept, and the kind of their rows. `overlaps` is the sixth."""


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
    """The first rows of each kind, in the order in which they are shown."""
    in_order = Window.partitionBy("kind").orderBy("rank", *KEY, "log_partition", "from_offset")
    ranked = replayed.where(F.col("kind").isin(*COLUMNS)).withColumn("place", F.row_number().over(in_order))
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in COLUMNS}
    for row in sorted(ranked.where(F.col("place") <= most).collect(), key=itemgetter("kind", "place")):
        found[row["kind"]].append({name: row[name] for name in COLUMNS[row["kind"]]})
    return found


def first_rows(frame: DataFrame, most: int, *order: Column | str) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in frame.orderBy(*order).limit(most).collect()]


def write_table(frame: DataFrame, path: Path) -> None:
    """A table that is kept, with times as times."""
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
