"""Claims: a coordination log replayed: who owned what when, overlaps and gaps, pauses.

`claims_log` knows where the log is, `claims_replay` replays it by the rules of `core/claim_history.py`, and
`claims_verdict` queries the rows of that with Spark.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane.core.claim_history import FOREVER_MS
from keylane.core.claim_records import Placing, check_id, check_placing
from keylane.core.names import check_stream_name
from keylane.core.world import World
from keylane.errors import InvalidInput
from keylane.spark.pipelines.claims_log import open_log, place_of
from keylane.spark.pipelines.interface import PipelineReport, PipelineSettings
from keylane.spark.pipelines.spark_jobs import Say, plainly, say_nothing
from keylane.spark.pipelines.stream_range import check_evidence
from keylane.spark.pipelines.work_directory import building, check_work, put_in_place, working

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES = "claims"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(PipelineSettings):
    """Which log, and what to report."""

    log: str | None = None
    """Its name; None is `marshal`, on Kafka `__marshal`."""
    kafka: str | None = None
    """The log is in Kafka, at these brokers: `host:port,host:port`."""
    kafka_config: str | None = None
    """A file of Kafka client properties: security, login, brokers."""
    interval_s: float = 10.0
    """The heartbeat interval: that of everybody on the log."""
    placing: Placing = "topic_partition"
    """As for everybody on the log."""
    group: str | None = None
    """Report this group only."""
    topic: str | None = None
    """Report this topic only."""
    start: str = "earliest"
    """Report what was owned from there on: an offset, a time, or how long ago. The log is replayed from its beginning
    all the same: earlier records say who owned what then."""
    at: str | None = None
    """The world and its history as they were there, in the same words; None is all that the log has."""
    gap_s: float | None = None
    """Report when a partition had no owner for longer than this. None is one interval."""
    out: str | None = None
    """A directory that driver and executors see under one path. All tables stay in `<out>/claims`."""
    evidence: int = 20
    """Rows of each kind in the report; all are in `<out>/claims`."""

    def __post_init__(self) -> None:
        World(self.interval_s)
        check_placing(self.placing)
        if self.log is not None and not self.is_on_kafka:
            check_stream_name(self.log)
        for name, text in (("group", self.group), ("topic", self.topic)):
            if text is not None:
                check_id(text, name)
        if place_of(self.start, "from").offsets is not None:
            raise InvalidInput(f"from is {self.start!r}: give one offset, a time, or how long ago, such as -15m")
        if self.at is not None:
            place_of(self.at, "at")
        if self.gap_s is not None and (not math.isfinite(self.gap_s) or self.gap_s < 0):
            raise InvalidInput(f"gap_s is {self.gap_s!r}: give seconds, 0 or more")
        check_work(self.out, "out")
        check_evidence(self.evidence)

    @property
    def is_on_kafka(self) -> bool:
        return self.kafka is not None or self.kafka_config is not None

    @property
    def longest_gap_s(self) -> float:
        return self.interval_s if self.gap_s is None else self.gap_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(PipelineReport):
    """What a coordination log says."""

    PIPELINE = "claims"
    VERDICTS = ("clean", "violations")
    FIELDS = ("log", "partitions", "gap_s", "violations", "facts", "spans", "evidence", "tables")

    log: str
    partitions: list[dict[str, int]]
    """Of the log: its partitions, the first record and the last one, how many, and their times in milliseconds."""
    gap_s: float
    violations: dict[str, int]
    """Overlaps, and records that are where another hash puts them."""
    facts: dict[str, int]
    spans: dict[str, int]
    """How many ended how."""
    evidence: dict[str, list[dict[str, Any]]]
    tables: str | None = None
    """Where all tables are, as Parquet."""

    @property
    def verdict(self) -> bool:
        """At no place in the log had a partition two owners, and everybody looks for it in the same place."""
        return not any(self.violations.values())

    def as_json(self) -> dict[str, Any]:
        return told(PipelineReport.as_json(self))

    def as_text(self) -> str:
        return as_text(self)


def look(settings: Settings) -> None:
    """See that the log is there, that it can be one, and that there is something to read: before Spark starts."""
    from keylane.spark.pipelines.claims_replay import run_apart  # noqa: PLC0415 - needs pyarrow, which is optional

    async def stops() -> None:
        async with open_log(settings) as part:
            part.stops(place_of(settings.at or "latest", "at"))

    run_apart(stops)


def run(spark: SparkSession, settings: Settings, say: Say = say_nothing) -> Report:
    """Replay a log. `InvalidInput`: it is empty, or this part of it is. `CoordinationLogError`: there is no such log.

    report = run(spark, Settings(address=Address(url="nats://127.0.0.1:4222"), interval_s=10, at="-1h"))
    print(report.as_text())
    """
    from keylane.spark.pipelines.claims_verdict import judge  # noqa: PLC0415 - needs pyspark, which is optional and slow

    began_s = time.monotonic()
    with working(settings.out, "claims") as directory, plainly(), building(directory) as aside:
        found = judge(spark, settings, aside, say)
        kept: Path | None = None
        if settings.out is not None:
            kept = directory / TABLES
            put_in_place(aside / TABLES, kept)
    return Report(
        gap_s=settings.longest_gap_s,
        seconds=time.monotonic() - began_s,
        tables=str(kept) if kept is not None else None,
        **found,
    )


# ---- the report in words and as JSON -------------------------------------------------------------------------


_LENGTHS = ("gap_ms", "paused_ms", "held_ms", "longest_gap_ms")


def told(row: dict[str, Any]) -> dict[str, Any]:
    """A row for programs: times as ISO 8601, lengths in seconds."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found[name] = told(value)
        elif isinstance(value, list):
            found[name] = [told(one) for one in value]
        elif name in _LENGTHS:
            found[name.replace("_ms", "_s")] = value / 1000
        elif name.endswith("_ms"):
            found[name.replace("_ms", "_time")] = None if value is None else _iso(value)
        else:
            found[name] = value
    return found


def as_text(report: Report) -> str:
    """The verdict in the first line; then what was counted, and the first rows of each table."""
    facts, evidence = report.facts, report.evidence
    lines = [_headline(report), ""]
    lines += [f"{name:<12} {value}" for name, value in _counted(report)]
    for title, rows in (
        ("overlaps", map(_overlap, evidence["overlaps"])),
        (f"nobody's for longer than {report.gap_s:g} s", map(_gap, evidence["gaps"])),
        ("pauses", map(_pause, evidence["pauses"])),
        ("heartbeats of others than the owner", map(_rival, evidence["rivals"])),
        ("unreadable", map(_unreadable, evidence["unreadable"])),
        ("who owned", _table(_OWNERS, map(_owner, evidence["owners"]))),
        ("who owns", _table(_WORLD, map(_claim, evidence["world"]))),
    ):
        shown = list(rows)
        lines += ["", f"{title}:", *(f"  {row}" for row in shown)] if shown else []
    left_out = facts["keys"] - len(evidence["world"])
    if left_out > 0:
        lines.append(f"  and {left_out:,} more partitions")
    if report.tables is not None:
        lines += ["", f"all tables: {report.tables}"]
    return "\n".join(lines)


def _headline(report: Report) -> str:
    overlaps, misplaced = report.violations["overlaps"], report.violations["misplaced"]
    found = [_many(overlaps, "overlap")] if overlaps else ["no overlap"]
    if misplaced:
        found.append(f"{_many(misplaced, 'record')} where another hash puts {'it' if misplaced == 1 else 'them'}")
    return f"{report.log}: {', '.join(found)}; {_many(report.facts['gaps'], 'gap')} longer than {report.gap_s:g} s"


def _counted(report: Report) -> Iterable[tuple[str, str]]:
    facts = report.facts
    unreadable = f", {facts['unreadable']:,} of them unreadable and skipped" if facts["unreadable"] else ""
    begin_ms = min(one["first_ms"] for one in report.partitions)
    end_ms = max(one["now_ms"] for one in report.partitions)
    if len(report.partitions) == 1:
        where = f"{report.partitions[0]['first']:,} to {report.partitions[0]['last']:,}"
    else:
        where = f"in {len(report.partitions)} partitions"
    yield "log", f"{_many(facts['records'], 'record')} ({where}){unreadable}"
    yield "time", f"{_iso(begin_ms)} to {_iso(end_ms)}"
    held = facts["keys_fresh"] + facts["keys_unknown"]
    yield (
        "partitions",
        f"{facts['keys']:,}: {held:,} owned, {facts['keys_stale']:,} run out, {facts['keys_free']:,} free",
    )
    yield "claims", ", ".join(f"{facts[f'claims_{how}']:,} {how}" for how in ("won", "lost", "paused", "unsure"))
    ends = ", ".join(f"{count:,} {how}" for how, count in report.spans.items() if count)
    yield "spans", f"{sum(report.spans.values()):,}" + (f": {ends}" if ends else "")
    longest = (
        f", the longest {_length(facts['longest_gap_ms'])}; {facts['gaps_open']:,} still are" if facts["gaps"] else ""
    )
    yield "gaps", f"{facts['gaps']:,}{longest}"
    yield "pauses", f"{facts['pauses']:,}" + (f", {facts['pauses_in_force']:,} in force" if facts["pauses"] else "")
    if facts["rivals"]:
        yield "rivals", f"{facts['rivals']:,}, with {_many(facts['rival_heartbeats'], 'heartbeat')}"


def _key(row: dict[str, Any]) -> str:
    return f"{row['group']} {row['topic']} {row['partition']}"


def _overlap(row: dict[str, Any]) -> str:
    return f"{_key(row)}: {_span(row['before'])}, and {_span(row['after'])}"


def _span(row: dict[str, Any]) -> str:
    ended = "is not ended" if row["to_offset"] is None else f"to record {row['to_offset']}, {_iso(row['to_ms'])}"
    place = f"partition {row['log_partition']} of the log{', where it does not belong' if row['misplaced'] else ''}"
    who = f"{row['client']} ({row['instance']})"
    return f"{who} from record {row['from_offset']}, {_iso(row['from_ms'])} {ended} (in {place})"


def _gap(row: dict[str, Any]) -> str:
    end = f"until {row['next_client']} had it at {_iso(row['to_ms'])}" if row["to_ms"] is not None else "to the end"
    paused = f"; the group was paused for {_length(row['paused_ms'])} of it" if row["paused_ms"] else ""
    begin = f"{row['client']} had it to {_iso(row['from_ms'])} ({row['ended']})"
    return f"{_key(row)}: {_length(row['gap_ms'])}, {begin}, {end}{paused}"


def _pause(row: dict[str, Any]) -> str:
    asked = "" if row["ended"] == "expired" else f", asked for until {_iso(row['expiry_ms'])}"
    ended = row["ended"].replace("_", " ")
    place = f"record {row['from_offset']} of partition {row['log_partition']}"
    until = "" if row["ended"] == "in_force" else f" to {_iso(row['to_ms'])}"
    return f"{row['group']}: {_iso(row['from_ms'])}{until} ({ended}{asked}), by {row['client']}, {place}"


def _rival(row: dict[str, Any]) -> str:
    first, last = row["from_offset"], row["to_offset"]
    where = f"record {first}" if first == last else f"records {first} to {last}"
    return (
        f"{_key(row)}: {_many(row['heartbeats'], 'heartbeat')} of {row['client']} ({row['instance']}), {where}, while "
        f"{row['owner_client']} ({row['owner_instance']}) had it"
    )


def _unreadable(row: dict[str, Any]) -> str:
    return f"record {row['offset']} of partition {row['log_partition']}: {row['reason']}"


_OWNERS = ("group", "client", "owns now", "spans", "partitions", "in sum")
_WORLD = ("group", "topic", "partition", "owner", "state", "since", "token", "next to read")


def _owner(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = (row["held"], row["spans"], row["partitions"])
    return row["group"], row["client"], *(f"{one:,}" for one in numbers), _length(row["held_ms"])


def _claim(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = ("-" if row[name] is None else f"{row[name]:,}" for name in ("token", "next_offset"))
    owner = "-" if row["client"] is None else f"{row['client']} ({row['instance']})"
    since = "-" if row["from_ms"] is None else _iso(row["from_ms"])
    return row["group"], row["topic"], str(row["partition"]), owner, row["freshness"] or "free", since, *numbers


def _table(names: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [names, *rows]
    if len(cells) == 1:
        return []
    widths = [max(len(row[place]) for row in cells) for place in range(len(names))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _length(ms: int) -> str:
    if ms < 60_000:
        return f"{ms / 1000:g} s"
    minutes, seconds = divmod(round(ms / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _iso(ms: int) -> str:
    time = datetime.fromtimestamp(min(ms, FOREVER_MS) / 1000, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
