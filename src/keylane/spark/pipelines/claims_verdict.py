"""Runs the steps of a replay on Spark and makes a report of what came out: what is counted, kept and shown.

The log is read once, into Parquet. Its records are then spread over the tasks by key and replayed by the rules of
`core/world.py` (`claims_replay`), into one table on disk; the tables for people are views of it: spans, gaps,
overlaps, pauses, rivals, and the world in the end. Times are the log's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from keylane.core.claim_facts import Verdict
from keylane.core.claim_records import CLAIMING_PARTITION, RELEASE_GROUP, Unreadable, split
from keylane.errors import InvalidInput, ReadIncomplete
from keylane.spark.pipelines.claims_log import Log, LogPosition, place_of, stops_of
from keylane.spark.pipelines.claims_replay import (
    ENDS,
    HELD,
    IN_FORCE,
    RECORDS_DDL,
    REPLAYED_DDL,
    LogExtent,
    LogPiece,
    LogReader,
    Record,
    Replayer,
    Survey,
    first_trouble,
    measure,
)
from keylane.spark.pipelines.spark_jobs import Say

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from keylane.spark.pipelines.claims import Settings


@dataclass(frozen=True, slots=True)
class Replayed:
    """A log, replayed. `since_ms`: the start of what is reported."""

    records: DataFrame
    rows: DataFrame
    survey: Survey
    since_ms: int


def judge(spark: SparkSession, log: Log, settings: Settings, aside: Path, say: Say) -> dict[str, Any]:
    """The parts of a report; all tables are in `aside/claims` afterwards, if they are to be kept."""
    found = _replay(spark, log, settings, aside, say)
    say("counting")
    totals = _Totals(found.rows)
    if not totals.sums and (settings.group is not None or settings.topic is not None):
        named = {"group": settings.group, "topic": settings.topic}
        told = " and ".join(f"{name} {text!r}" for name, text in named.items() if text is not None)
        raise InvalidInput(f"the coordination log says nothing of {told}: look at the names in `keylane marshal world`")
    spans = of_kind(found.rows, "span")
    may_cross = bool(totals.of("overlap") or totals.of("span", misplaced=True))
    crossed = overlaps(spans if may_cross else spans.where("false"))
    if settings.out is not None:
        say("writing the tables")
        for name, kind in TABLES.items():
            write_table(of_kind(found.rows, kind), aside / "claims" / name)
        write_table(crossed, aside / "claims" / "overlaps")
    crossings = crossed.count() if may_cross else 0
    misplaced = totals.of("count", "times", verdict=Verdict.MISPLACED.value)
    return {
        "partitions": [_told(one) for _, one in sorted(found.survey.extents.items())],
        "violations": {"overlaps": crossings, "misplaced": misplaced},
        "facts": _facts(found.survey, totals),
        "spans": {how: totals.of("span", ended=how) for how in ENDS},
        "evidence": _evidence(found, totals, crossed if crossings else None, settings.evidence),
    }


# ---- replaying ----------------------------------------------------------------------------------------


def _replay(spark: SparkSession, log: Log, settings: Settings, aside: Path, say: Say) -> Replayed:
    at = place_of(settings.at or "latest", "at")
    stops = stops_of(log, at)
    say(f"reading coordination log {log.name}: {sum(stops[one] - log.bounds[one].first for one in stops):,} records")
    records = read_log(spark, log.rows(spark, stops), aside / "records")
    survey = _survey(records, log, stops, at)
    since_ms = _since_ms(records, survey, settings, log)
    say("replaying it by key")
    replayer = Replayer(
        interval_s=settings.interval_s,
        partitions=log.partitions,
        placing=settings.placing,
        first_offset=log.first_offset,
        extents=survey.extents,
        before=survey.before,
        since_ms=since_ms,
        gap_ms=round(settings.longest_gap_s * 1000),
    )
    rows = replay(records, replayer, aside / "replayed", group=settings.group, topic=settings.topic)
    return Replayed(records, rows, survey, since_ms)


def _survey(records: DataFrame, log: Log, stops: dict[int, int], at: LogPosition) -> Survey:
    found = pieces(records, at.time_ms)
    trouble = first_trouble(found, stops, holes=log.has_holes)
    if trouble is not None:
        raise ReadIncomplete(
            f"coordination log {log.name!r}: records of partition {trouble[0]} near {trouble[1]} went away while it "
            "was read; run it again"
        )
    survey = measure(found, log.bounds, at.time_ms, holes=log.has_holes)
    if not survey.extents:
        raise InvalidInput(
            f"coordination log {log.name!r} holds no record up to the time in at: its first ones are younger"
        )
    return survey


def _since_ms(records: DataFrame, survey: Survey, settings: Settings, log: Log) -> int:
    """The start of what is reported. Refuses a range without a record."""
    start = place_of(settings.start, "from")
    since_ms = start.time_ms if start.time_ms is not None else survey.first_ms
    if start.offset is not None:
        if log.partitions > 1:
            raise InvalidInput(
                f"from is {start.offset}, and coordination log {log.name!r} has {log.partitions} partitions, each with "
                "offsets of its own: give a time"
            )
        row = records.where(F.col("offset") <= start.offset).agg(F.max("time_ms")).first()
        if row is not None and row[0] is not None:
            since_ms = row[0] if start.offset < survey.extents[0].stop else survey.now_ms + 1
    if since_ms > survey.now_ms:
        raise InvalidInput(
            f"coordination log {log.name!r} holds no record from {settings.start} to {settings.at or 'its end'}: give "
            "another range"
        )
    return since_ms


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

    def of(self, kind: str, column: str = "rows", **like: object) -> int:
        """The sum over the rows of a kind that are like this: `of("span", ended="held")`."""
        return sum(row[column] for row in self._rows(kind, **like))

    def longest_gap_ms(self) -> int:
        return max((row["longest"] for row in self._rows("gap")), default=0)

    def _rows(self, kind: str, **like: object) -> Iterator[dict[str, Any]]:
        return (row for row in self.sums if row["kind"] == kind and like.items() <= row.items())


def _facts(survey: Survey, totals: _Totals) -> dict[str, int]:
    states = {"fresh": "fresh", "unknown": "unknown", "stale": "stale", "free": None}
    return {
        "records": sum(one.records for one in survey.extents.values()),
        "unreadable": sum(one.unreadable for one in survey.extents.values()),
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


def _told(extent: LogExtent) -> dict[str, int]:
    names = ("log_partition", "first", "last", "records", "first_ms", "now_ms")
    return {name: getattr(extent, name) for name in names}


# ---- showing ------------------------------------------------------------------------------------------


def _evidence(
    found: Replayed, totals: _Totals, crossed: DataFrame | None, most: int
) -> dict[str, list[dict[str, Any]]]:
    evidence: dict[str, list[dict[str, Any]]] = {name: [] for name in ("overlaps", *TABLES)}
    evidence |= {"owners": [], "unreadable": []}
    if not most:
        return evidence
    if crossed is not None:
        evidence["overlaps"] = first_rows(crossed, most, "after.from_ms", *KEY)
    first = first_of_each_kind(found.rows, most)
    evidence |= {name: first[kind] for name, kind in TABLES.items()}
    if totals.of("span"):
        by_client = owners(found.rows, found.since_ms)
        evidence["owners"] = first_rows(by_client, most, F.col("held_ms").desc(), "group", "client")
    if any(one.unreadable for one in found.survey.extents.values()):
        evidence["unreadable"] = _unreadable(found, most)
    return evidence


def _unreadable(found: Replayed, most: int) -> list[dict[str, Any]]:
    broken = found.records.where("kind IS NULL").select("log_partition", "offset", "time_ms", "value", "subject")
    kept = F.lit(False)
    for number, extent in found.survey.extents.items():
        kept |= (F.col("log_partition") == number) & (F.col("offset") < extent.stop)
    return [
        {name: row[name] for name in ("log_partition", "offset", "time_ms")}
        | {"reason": _reason(bytes(row["value"]), row["subject"])}
        for row in first_rows(broken.where(kept), most, "log_partition", "offset")
    ]


def _reason(value: bytes, subject: str | None) -> str:
    fields = split(value, subject)
    assert isinstance(fields, Unreadable), value
    return fields.reason


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
