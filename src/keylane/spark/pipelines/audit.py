"""The audit: reports every violation of what a group promises, from its stream and its journal, with evidence.

`audit_tables` reads the server into tables, `audit_rules` has the definitions. This runs both: once over a range, or
again and again as the stream grows. A run that follows the stream judges what it has read so far by the same rules, so
it says what a batch over the same range would say.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.window import Window

from keylane.core.journal_record import sample_limit
from keylane.errors import InvalidInput
from keylane.groups import ElasticConfig
from keylane.spark.pipelines import audit_rules as rules
from keylane.spark.pipelines import audit_tables
from keylane.spark.pipelines.audit_rules import Proof, losses, unhandled
from keylane.spark.pipelines.audit_tables import JOURNAL_DDL, MESSAGES_DDL, PENDING_DDL, AuditSource, PendingWork
from keylane.spark.pipelines.interface import FindingsReport, JournalSettings
from keylane.spark.pipelines.journal_frame import journal_state
from keylane.spark.pipelines.spark_jobs import Say, no_guessed_broadcasts, plainly, say_nothing
from keylane.spark.pipelines.stream_range import StreamRange, check_span, find_range, group_of
from keylane.spark.pipelines.work_directory import building, put_in_place, working

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession


FINDINGS = "findings"
_ABOUT = "about.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(JournalSettings):
    """What to audit. It is one batch, unless `available_now` or `follow` is set: these keep their tables and their
    checkpoint in `work`."""

    available_now: bool = False
    """Go on from the last run in `work`, up to now, and judge all of it."""
    follow: bool = False
    """Do that again and again, until stopped."""
    interval_s: float = 60.0
    """From one verdict to the next when following."""

    def __post_init__(self) -> None:
        if self.available_now and self.follow:
            raise InvalidInput("available_now and follow are both given: one ends by itself, the other does not")
        if self.streaming and self.work is None:
            raise InvalidInput("work is missing: a run that goes on from the last one needs a directory to keep it in")
        check_span("interval_s", self.interval_s, 86_400)
        JournalSettings.__post_init__(self)

    @property
    def streaming(self) -> bool:
        return self.available_now or self.follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(FindingsReport):
    """What an audit found."""

    PIPELINE = "audit"
    VERDICTS = ("clean", "violations")
    FIELDS = (
        "stream", "group", "first", "last", "violations", "unproven", "causes", "facts", "evidence", "findings",
        "stopped",
    )  # fmt: skip
    NAMES: ClassVar = {
        "lost": "lost",
        "duplicated": "handled twice",
        "out_of_order": "out of order",
        "two_owners": "two owners at once",
        "late_effect": "late effects",
        "unproven": "without a record",
        "order_unproven": "order not provable",
    }

    violations: dict[str, int]
    """How many of each kind: messages; of two owners, pairs of tenures on a key."""
    stopped: bool = False

    @property
    def proven(self) -> dict[str, int]:
        return self.violations

    def as_text(self) -> str:
        facts = self.facts
        rows: list[tuple[str, str]] = [
            ("messages", f"{facts['messages']:,} ({self.first:,} to {self.last:,})"),
            ("handled", f"{facts['handled']:,}"),
            ("pending", f"{facts['pending']:,}"),
            *self.counts(),
            (
                "journal",
                f"{facts['records']:,} records in {facts['batches']:,} batches of {facts['instances']:,} instances",
            ),
        ]
        rows += [
            (words, f"{facts[name]:,}")
            for name, words in (
                ("records_dropped", "  dropped records"),
                ("batches_missing", "  missing batches"),
                ("batches_broken", "  broken batches"),
                ("batches_copied", "  copied batches"),
                ("outside_the_sample", "outside the sample"),
                ("not_in_the_stream", "not in the stream"),
            )
            if facts[name]
        ]
        head = self.headline(f"{self.stream}/{self.group}", "no violation")
        shown = self.evidence_lines({"record": ": ", "other": "; other: "})
        return "\n".join([head, "", *(f"{name:<22} {value}" for name, value in rows), *shown])


def run(
    spark: SparkSession, settings: Settings, say: Say = say_nothing, *, stop: threading.Event | None = None
) -> Report:
    """Audit a group. Setting `stop` ends a run that follows the stream, after the verdict it is at.

    `InvalidInput`: there is nothing to audit in this range. `NotFound`: no such stream, or it has no journal.
    `JournalTooNew`: members of a newer keylane wrote it.

        report = run(spark, Settings(stream="ORDERS", group="billing", start="-1h"))
        print(report.as_text())
    """
    with working(settings.work, "audit") as directory, plainly(), no_guessed_broadcasts(spark):
        return _Run(spark, settings, directory, say).go(stop or threading.Event())


class _Run:
    def __init__(self, spark: SparkSession, settings: Settings, directory: Path, say: Say) -> None:
        self.spark = spark
        self.settings = settings
        self.directory = directory
        self.say = say
        self.began_s = time.monotonic()
        self.config = group_of(settings.address, settings.stream, settings.group)

    def go(self, stop: threading.Event) -> Report:
        journal_state(self.settings.address, self.settings.stream)
        if not self.settings.streaming:
            return self._once()
        part = self._part_to_follow()
        while True:
            report = self._cycle(part)
            self.say(report.as_text().splitlines()[0])
            if self.settings.available_now:
                return report
            if stop.wait(self.settings.interval_s):
                return replace(report, stopped=True)

    # ---- once -------------------------------------------------------------------------------------------

    def _once(self) -> Report:
        settings = self.settings
        part = find_range(settings.options)
        self._check_not_empty(part)
        with building(self.directory) as aside:
            where = self._where(aside)
            self.say(f"reading the messages {part.after + 1:,} to {part.upto:,} of {settings.stream}")
            audit_tables.write_messages(self.spark, where, part)
            pending = audit_tables.pending_of(self.spark, where)
            last = self._journal_end()
            self.say(f"reading the journal, {last:,} batches")
            audit_tables.write_journal(self.spark, where, part, last)
            return self._judge(where, pending, must_have=True)

    def _check_not_empty(self, part: StreamRange) -> None:
        if part.is_empty:
            raise InvalidInput(
                f"there is nothing to audit: stream {self.settings.stream!r} holds no message from "
                f"{self.settings.start} to {self.settings.end or 'its end'} (after {part.after}, up to {part.upto})"
            )

    # ---- again and again --------------------------------------------------------------------------------

    def _part_to_follow(self) -> StreamRange:
        """The range that the first run in this directory was given; later runs must mean the same."""
        settings = self.settings
        asked = {"stream": settings.stream, "group": settings.group, "start": settings.start, "end": settings.end}
        about = self.directory / _ABOUT
        if about.exists():
            known = json.loads(about.read_text(encoding="utf-8"))
            for name, value in asked.items():
                if known["asked"][name] != value:
                    raise InvalidInput(
                        f"{name} is {value!r}, and the audit in {str(self.directory)!r} is about "
                        f"{known['asked'][name]!r}: go on with that, or give another work directory"
                    )
            return StreamRange(settings.stream, known["created"], known["after"], known["upto"])
        found = find_range(settings.options)
        if settings.end is not None:
            self._check_not_empty(found)
        upto = found.upto if settings.end is not None else 0
        new = about.with_name(f".new-{_ABOUT}")
        told = {"asked": asked, "created": found.created, "after": found.after, "upto": upto}
        new.write_text(json.dumps(told), encoding="utf-8")
        new.rename(about)
        return StreamRange(settings.stream, found.created, found.after, upto)

    def _cycle(self, part: StreamRange) -> Report:
        self.began_s = time.monotonic()
        where = self._where(self.directory)
        first, last = part.after + 1, part.upto or None
        audit_tables.append_messages(self.spark, where, {"startingOffsets": str(first)}, last)
        pending = audit_tables.pending_of(self.spark, where)
        time.sleep(self.settings.settle_s)
        audit_tables.append_journal(self.spark, where, first, last)
        return self._judge(where, pending, must_have=False)

    # ---- both -------------------------------------------------------------------------------------------

    def _where(self, directory: Path) -> AuditSource:
        settings = self.settings
        for table in ("messages", "journal"):
            (directory / table).mkdir(parents=True, exist_ok=True)
        return audit_tables.AuditSource(settings.address, settings.stream, settings.group, self.config, directory)

    def _journal_end(self) -> int:
        time.sleep(self.settings.settle_s)
        last = journal_state(self.settings.address, self.settings.stream).last
        if not last:
            raise InvalidInput(f"the journal of stream {self.settings.stream!r} is empty: there is nothing to audit")
        return last

    def _judge(self, where: AuditSource, pending: PendingWork, *, must_have: bool) -> Report:
        settings = self.settings
        with building(self.directory) as aside:
            found = judge(self.spark, where, pending, settings, aside, must_have=must_have, say=self.say)
            kept_at: Path | None = None
            if settings.work is not None:
                kept_at = self.directory / FINDINGS
                put_in_place(aside / FINDINGS, kept_at)
        return replace(
            found, seconds=time.monotonic() - self.began_s, findings=str(kept_at) if kept_at is not None else None
        )


# ---- from tables to a verdict -----------------------------------------------------------------------------------

_INSTANCE = pa.schema(
    [("line", pa.int64()), ("writer", pa.string()), ("member", pa.string()), ("instance", pa.string())]
)


@dataclass(frozen=True, slots=True)
class JournalLines:
    """The lines of a journal."""

    found: Sequence[Row]
    broken: int
    """Messages that are not whole batches."""

    @classmethod
    def of(cls, journal: DataFrame) -> JournalLines:
        rows = rules.lines(journal).collect()
        nameless = [row for row in rows if row["writer"] is None]
        return cls([row for row in rows if row not in nameless], sum(row["copies"] + 1 for row in nameless))

    def __len__(self) -> int:
        return len(self.found)

    def total(self, name: str) -> int:
        """The sum of `batches`, `missing`, `dropped`, `copies` or `records`."""
        return sum(row[name] for row in self.found)

    @property
    def sample(self) -> float:
        """The least part of the keys that an instance wrote about."""
        return min((row["sample"] for row in self.found), default=1.0)

    @property
    def whole(self) -> bool:
        """Nothing is missing, as far as the batches in the journal show."""
        return not (self.total("missing") or self.total("dropped") or self.broken)

    def names(self, spark: SparkSession) -> DataFrame:
        """Which instance a line is."""
        return spark.createDataFrame(
            pa.Table.from_pylist(
                [{name: row[name] for name in _INSTANCE.names} for row in self.found], schema=_INSTANCE
            )
        )


def judge(
    spark: SparkSession,
    where: AuditSource,
    pending: PendingWork,
    settings: Settings,
    building: Path,
    *,
    must_have: bool,
    say: Say,
) -> Report:
    """Run the rules; all findings are in `building/findings` afterwards."""
    journal = spark.read.schema(JOURNAL_DDL).parquet(where.path("journal"))
    lines = JournalLines.of(journal)
    if must_have and not len(lines):
        raise InvalidInput(
            f"the journal of stream {settings.stream!r} has nothing of group {settings.group!r}: let its members write "
            "one, with join(…, journal=…)"
        )
    messages = spark.read.schema(MESSAGES_DDL).parquet(where.path("messages"))
    wanted = F.col("key_crc") < sample_limit(lines.sample)
    counted = _counted(messages, wanted)
    if must_have and not counted["messages"]:
        raise InvalidInput(
            f"there is nothing to audit: no message of stream {settings.stream!r} in this range is one that group "
            f"{settings.group!r} is to handle"
        )
    of = rules.records(journal, copies=bool(lines.total("copies")))
    of = of.where(F.col("source_sequence") <= (counted["last"] or 0))
    final = rules.finals(of)

    say("looking for messages without a record")
    missed = Observation()
    left = _with_pending(spark, unhandled(messages.where(wanted), of), final, where, pending).observe(
        missed,
        F.count(F.when(F.col("pending"), 1)).alias("pending"),
        F.count(F.when(~F.col("pending"), 1)).alias("gone"),
    )
    left = kept(spark, left, building / "left")
    counted |= missed.get

    say("comparing the order of every key")
    tolerance_ns = round(settings.tolerance_s * 1e9)
    parts, finals = _of_keys(spark, final, tolerance_ns, building)
    if counted["gone"]:
        proof = Proof(settings.complete and lines.whole, rules.holes(journal), tolerance_ns)
        parts.append(losses(left.where("NOT pending").drop("pending"), of, proof))
    totals, causes, evidence = write_findings(
        spark, parts, lines.names(spark), building / "findings", kinds=rules.KINDS, most=settings.evidence
    )
    if rules.OWNERS in totals:
        totals[rules.OWNERS] = sum(causes[rules.OWNERS].values())
    handled = finals - sum(causes.get(rules.DUPLICATE, {}).values())
    return Report(
        stream=settings.stream,
        group=settings.group,
        seconds=0.0,
        first=counted["first"] or 0,
        last=counted["last"] or 0,
        violations={kind: totals.get(kind, 0) for kind in rules.VIOLATIONS},
        unproven={kind: totals.get(kind, 0) for kind in rules.KINDS if kind not in rules.VIOLATIONS},
        causes=causes,
        facts=_facts(lines, counted, finals, handled),
        evidence=evidence,
    )


def kept(spark: SparkSession, frame: DataFrame, path: Path) -> DataFrame:
    """A table that is used several times: computed once."""
    frame.write.parquet(str(path))
    return spark.read.schema(frame.schema).parquet(str(path))


def _counted(messages: DataFrame, wanted: Column) -> dict[str, Any]:
    found = messages.agg(
        F.min("sequence").alias("first"),
        F.max("sequence").alias("last"),
        F.count(F.lit(1)).alias("messages"),
        F.count(F.when(wanted, 1)).alias("in_sample"),
    ).first()
    assert found is not None
    return found.asDict()


def _with_pending(
    spark: SparkSession, left: DataFrame, final: DataFrame, where: AuditSource, pending: PendingWork
) -> DataFrame:
    """Messages without a final record; `pending` if the group still had to handle them."""
    if isinstance(where.config, ElasticConfig):
        queued = spark.read.schema(PENDING_DDL).parquet(where.path("pending")).distinct()
        known = left.join(queued.withColumn("queued", F.lit(True)), "sequence", "left")
        waits = F.coalesce("queued", F.lit(False))
        if pending.lag:
            highest = queued.union(final.select("source_sequence")).agg(F.max("sequence")).first()
            assert highest is not None
            waits = waits | (F.col("sequence") > (highest[0] or 0))
        return known.withColumn("pending", waits).drop("queued")
    floors = list((pending.floors or {}).items())
    table = pa.table({"of": pa.array([of for of, _ in floors], pa.int32()), "floor": [floor for _, floor in floors]})
    known = left.join(F.broadcast(spark.createDataFrame(table)), F.col("partition") == F.col("of"), "left")
    return known.withColumn("pending", F.col("sequence") > F.coalesce("floor", F.lit(0))).drop("of", "floor")


def _of_keys(spark: SparkSession, final: DataFrame, tolerance_ns: int, building: Path) -> tuple[list[DataFrame], int]:
    """What the rules say of the order and the owners of keys; and how many final records there are."""
    counted, found = Observation(), Observation()
    suspects = rules.suspects(final, counted).observe(found, F.count(F.lit(1)).alias("keys"))
    keys = kept(spark, suspects, building / "suspects")
    if not found.get["keys"]:
        return [], counted.get["finals"]
    looked_at = kept(spark, rules.of_suspects(final, keys), building / "looked_at")
    pairs = rules.successions(kept(spark, rules.tenures(looked_at), building / "tenures"))
    return [
        rules.order_findings(rules.order(rules.effects(looked_at), tolerance_ns)),
        rules.owner_findings(pairs, tolerance_ns),
        rules.late_findings(looked_at, pairs, tolerance_ns),
    ], counted.get["finals"]


def _facts(lines: JournalLines, counted: dict[str, Any], finals: int, handled: int) -> dict[str, int | float]:
    messages, in_sample = counted["messages"], counted["in_sample"]
    return {
        "messages": messages,
        "outside_the_sample": messages - in_sample,
        "handled": handled,
        "final_records": finals,
        "pending": counted["pending"],
        "not_in_the_stream": handled - (in_sample - counted["pending"] - counted["gone"]),
        "instances": len(lines),
        "batches": lines.total("batches"),
        "records": lines.total("records"),
        "records_dropped": lines.total("dropped"),
        "batches_missing": lines.total("missing"),
        "batches_broken": lines.broken,
        "batches_copied": lines.total("copies"),
        "sample": lines.sample,
    }


# ---- findings -------------------------------------------------------------------------------------------

Totals = dict[str, int]
Causes = dict[str, dict[str, int]]
Evidence = dict[str, list[dict[str, Any]]]


def write_findings(
    spark: SparkSession, parts: list[DataFrame], lines: DataFrame, path: Path, *, kinds: Sequence[str], most: int
) -> tuple[Totals, Causes, Evidence]:
    """Write what was found. Of each kind: how many messages, the reasons and how often, and the first rows."""
    found = rules.together(parts or [rules.no_findings(spark)])
    findings = kept(spark, rules.named(found, lines), path)
    if not parts:
        return {}, {}, {}
    totals: Totals = {}
    causes: Causes = {}
    each = findings.rollup("kind", "why").agg(
        F.count(F.lit(1)).alias("times"), F.count_distinct("sequence").alias("messages")
    )
    for row in sorted(each.where("kind IS NOT NULL").collect(), key=lambda row: (-row["times"], row["why"] or "")):
        if row["why"] is None:
            totals[row["kind"]] = row["messages"]
        else:
            causes.setdefault(row["kind"], {})[row["why"]] = row["times"]
    return (
        totals,
        {kind: causes[kind] for kind in sorted(causes)},
        _first_rows(findings, [kind for kind in kinds if kind in totals], most),
    )


def _first_rows(findings: DataFrame, kinds: Sequence[str], most: int) -> Evidence:
    if not most or not kinds:
        return {kind: [] for kind in kinds}
    in_kind = Window.partitionBy("kind").orderBy("sequence", "record.ended_ns", "other.ended_ns")
    first = findings.withColumn("turn", F.row_number().over(in_kind)).where(F.col("turn") <= most)
    shown: Evidence = {}
    for row in sorted(first.collect(), key=lambda row: (kinds.index(row["kind"]), row["turn"])):
        told = row.asDict(recursive=True)
        del told["turn"]
        shown.setdefault(row["kind"], []).append(told)
    return shown
