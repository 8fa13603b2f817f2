"""Runs the steps of a replay on Spark and makes a report of what came out: what is counted, kept and shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from keylane.core.claim_facts import Verdict
from keylane.core.claim_records import CLAIMING_PARTITION, Unreadable, split
from keylane.errors import InvalidInput, ReadIncomplete
from keylane.spark.pipelines import claims_tables as tables
from keylane.spark.pipelines.claims_log import Log, LogPosition, place_of, stops_of
from keylane.spark.pipelines.claims_records import LogExtent, Survey, first_trouble, measure
from keylane.spark.pipelines.claims_replay import ENDS, IN_FORCE, Replayer
from keylane.spark.pipelines.spark_jobs import Say

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keylane.spark.pipelines.claims import Settings

_FREE = "free"
_CLAIMS = (Verdict.WON, Verdict.LOST, Verdict.PAUSED, Verdict.UNSURE)


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
    totals = _totals(found.rows)
    if not totals.rows and (settings.group is not None or settings.topic is not None):
        named = {"group": settings.group, "topic": settings.topic}
        told = " and ".join(f"{name} {text!r}" for name, text in named.items() if text is not None)
        raise InvalidInput(f"the coordination log says nothing of {told}: look at the names in `keylane marshal world`")
    spans = tables.of_kind(found.rows, "span")
    may_cross = bool(totals.rows["overlap"] or totals.strays)
    crossed = tables.overlaps(spans if may_cross else spans.where("false"))
    if settings.out is not None:
        say("writing the tables")
        for name, kind in tables.TABLES.items():
            tables.write_table(tables.of_kind(found.rows, kind), aside / "claims" / name)
        tables.write_table(crossed, aside / "claims" / "overlaps")
    overlaps = crossed.count() if may_cross else 0
    misplaced = sum(times for (_, verdict), times in totals.verdicts.items() if verdict == Verdict.MISPLACED.value)
    return {
        "partitions": [_told(one) for _, one in sorted(found.survey.extents.items())],
        "violations": {"overlaps": overlaps, "misplaced": misplaced},
        "facts": _facts(found.survey, totals),
        "spans": {how: totals.ends[how] for how in ENDS},
        "evidence": _evidence(found, totals, crossed if overlaps else None, settings.evidence),
    }


# ---- replaying ----------------------------------------------------------------------------------------


def _replay(spark: SparkSession, log: Log, settings: Settings, aside: Path, say: Say) -> Replayed:
    at = place_of(settings.at or "latest", "at")
    stops = stops_of(log, at)
    say(f"reading coordination log {log.name}: {sum(stops[one] - log.bounds[one].first for one in stops):,} records")
    records = tables.read_log(spark, log.rows(spark, stops), aside / "records")
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
    rows = tables.replay(records, replayer, aside / "replayed", group=settings.group, topic=settings.topic)
    return Replayed(records, rows, survey, since_ms)


def _survey(records: DataFrame, log: Log, stops: dict[int, int], at: LogPosition) -> Survey:
    pieces = tables.pieces(records, at.time_ms)
    trouble = first_trouble(pieces, stops, holes=log.has_holes)
    if trouble is not None:
        raise ReadIncomplete(
            f"coordination log {log.name!r}: records of partition {trouble[0]} near {trouble[1]} went away while it "
            "was read; run it again"
        )
    survey = measure(pieces, log.bounds, at.time_ms, holes=log.has_holes)
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


@dataclass(frozen=True, slots=True)
class _Totals:
    rows: Counter[str]
    """By kind."""
    ends: Counter[str]
    states: Counter[str]
    verdicts: Counter[tuple[str, str]]
    in_force: int
    open_gaps: int
    longest_gap_ms: int
    rival_heartbeats: int
    strays: int
    """Spans that are where another hash puts them."""


def _totals(replayed: DataFrame) -> _Totals:
    by = ("kind", "ended", "freshness", "record", "verdict", "misplaced")
    sums = replayed.groupBy(*by).agg(
        F.count(F.lit(1)).alias("rows"),
        F.sum("times").alias("times"),
        F.sum("heartbeats").alias("heartbeats"),
        F.max("gap_ms").alias("longest"),
        F.count(F.when(F.col("to_ms").isNull(), 1)).alias("open"),
    )
    found = [row.asDict() for row in sums.collect()]
    kinds, ends, states, verdicts = Counter[str](), Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    for row in found:
        kinds[row["kind"]] += row["rows"]
        if row["kind"] == "span":
            ends[row["ended"]] += row["rows"]
        elif row["kind"] == "claim":
            states[row["freshness"] or _FREE] += row["rows"]
        elif row["kind"] == "count":
            verdicts[row["record"], row["verdict"]] += row["times"]
    gaps = [row for row in found if row["kind"] == "gap"]
    return _Totals(
        rows=kinds,
        ends=ends,
        states=states,
        verdicts=verdicts,
        in_force=sum(row["rows"] for row in found if row["kind"] == "pause" and row["ended"] == IN_FORCE),
        open_gaps=sum(row["open"] for row in gaps),
        longest_gap_ms=max((row["longest"] for row in gaps), default=0),
        rival_heartbeats=sum(row["heartbeats"] for row in found if row["kind"] == "rival"),
        strays=sum(row["rows"] for row in found if row["misplaced"]),
    )


def _facts(survey: Survey, totals: _Totals) -> dict[str, int]:
    return {
        "records": sum(one.records for one in survey.extents.values()),
        "unreadable": sum(one.unreadable for one in survey.extents.values()),
        "keys": totals.rows["claim"],
        **{f"keys_{state}": totals.states[state] for state in ("fresh", "unknown", "stale", _FREE)},
        **{f"claims_{one.value}": totals.verdicts[CLAIMING_PARTITION, one.value] for one in _CLAIMS},
        "gaps": totals.rows["gap"],
        "gaps_open": totals.open_gaps,
        "longest_gap_ms": totals.longest_gap_ms,
        "pauses": totals.rows["pause"],
        "pauses_in_force": totals.in_force,
        "rivals": totals.rows["rival"],
        "rival_heartbeats": totals.rival_heartbeats,
    }


def _told(extent: LogExtent) -> dict[str, int]:
    return {
        "log_partition": extent.log_partition,
        "first": extent.first,
        "last": extent.stop - 1,
        "records": extent.records,
        "first_ms": extent.first_ms,
        "now_ms": extent.now_ms,
    }


# ---- showing ------------------------------------------------------------------------------------------


def _evidence(
    found: Replayed, totals: _Totals, crossed: DataFrame | None, most: int
) -> dict[str, list[dict[str, Any]]]:
    evidence: dict[str, list[dict[str, Any]]] = {name: [] for name in ("overlaps", *tables.TABLES)}
    evidence |= {"owners": [], "unreadable": []}
    if not most:
        return evidence
    if crossed is not None:
        evidence["overlaps"] = tables.first_rows(crossed, most, "after.from_ms", *tables.KEY)
    first = tables.first_of_each_kind(found.rows, most)
    evidence |= {name: first[kind] for name, kind in tables.TABLES.items()}
    if totals.rows["span"]:
        owners = tables.owners(found.rows, found.since_ms)
        evidence["owners"] = tables.first_rows(owners, most, F.col("held_ms").desc(), "group", "client")
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
        for row in tables.first_rows(broken.where(kept), most, "log_partition", "offset")
    ]


def _reason(value: bytes, subject: str | None) -> str:
    fields = split(value, subject)
    assert isinstance(fields, Unreadable), value
    return fields.reason
