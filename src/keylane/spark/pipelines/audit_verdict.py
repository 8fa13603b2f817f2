"""From the tables of an audit to its verdict: what the journal holds, which rules run, what is counted and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.window import Window

from keylane.core.journal_record import sample_limit
from keylane.errors import InvalidInput
from keylane.groups import ElasticConfig
from keylane.spark.pipelines import audit_rules as rules
from keylane.spark.pipelines.audit_rules import Proof, losses, unhandled
from keylane.spark.pipelines.audit_tables import JOURNAL_DDL, MESSAGES_DDL, PENDING_DDL, AuditSource, PendingWork
from keylane.spark.pipelines.spark_jobs import Say

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

    from keylane.spark.pipelines.audit import Settings

_NAMES = pa.schema([("line", pa.int64()), ("writer", pa.string()), ("member", pa.string()), ("instance", pa.string())])


@dataclass(frozen=True, slots=True)
class JournalLines:
    """The lines of a journal."""

    found: Sequence[Row]
    broken: int
    """Messages that are no whole batch."""

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
            pa.Table.from_pylist([{name: row[name] for name in _NAMES.names} for row in self.found], schema=_NAMES)
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What the rules found in the tables."""

    first: int
    last: int
    violations: dict[str, int]
    unproven: dict[str, int]
    causes: dict[str, dict[str, int]]
    facts: dict[str, int | float]
    evidence: dict[str, list[dict[str, Any]]]


def judge(
    spark: SparkSession,
    where: AuditSource,
    pending: PendingWork,
    settings: Settings,
    building: Path,
    *,
    must_have: bool,
    say: Say,
) -> Found:
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
    left = _with_pending(spark, unhandled(messages.where(wanted), final), final, where, pending).observe(
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
    return Found(
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
