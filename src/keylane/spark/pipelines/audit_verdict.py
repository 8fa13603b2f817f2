"""From an audit's tables to its verdict: which rules are run, and what is counted and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from keylane.core.journal_record import sample_limit
from keylane.errors import InvalidInput
from keylane.groups import ElasticConfig
from keylane.spark.pipelines import audit_rules as rules
from keylane.spark.pipelines.audit_losses import Proof, losses, unhandled
from keylane.spark.pipelines.audit_tables import JOURNAL_DDL, MESSAGES_DDL, PENDING_DDL, Pending, Where
from keylane.spark.pipelines.running import Say

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from keylane.spark.pipelines.audit import Settings


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


@dataclass(frozen=True, slots=True)
class Ground:
    """The tables of an audit, and what they say in sum."""

    messages: DataFrame
    journal: DataFrame
    lined: DataFrame
    range: Row
    sums: Row
    limit: int
    """Keys whose CRC is below it are in the sample."""


def judge(
    spark: SparkSession,
    where: Where,
    pending: Pending,
    settings: Settings,
    building: Path,
    *,
    must_have: bool,
    say: Say,
) -> Found:
    """Run the rules; all findings are in `building/findings` afterwards."""
    ground = _ground(spark, where, settings, building, must_have=must_have)
    wanted = ground.messages.where(F.col("key_crc") < ground.limit)
    of = rules.records(ground.journal, copies=bool(ground.sums["copies"]))
    of = of.where(F.col("source_sequence") <= (ground.range["last"] or 0))
    final = rules.finals(of)

    say("looking for messages without a record")
    left = _kept(spark, _left(spark, unhandled(wanted, final), final, where, pending), building / "left")
    counted = left.agg(
        F.count(F.when(F.col("pending"), 1)).alias("pending"), F.count(F.when(~F.col("pending"), 1)).alias("gone")
    ).first()
    assert counted is not None

    say("comparing the order of every key")
    tolerance_ns = round(settings.tolerance_s * 1e9)
    seen = Observation("effects")
    effects = rules.effects(final).observe(
        seen, F.count(F.lit(1)).alias("finals"), F.count(F.when(F.col("turn") == 1, 1)).alias("handled")
    )
    parts = [rules.order_findings(rules.order(effects, tolerance_ns))]
    tenures = _kept(spark, rules.tenures(final), building / "tenures")
    if not tenures.isEmpty():
        pairs = rules.successions(tenures)
        parts += [rules.owner_findings(pairs, tolerance_ns), rules.late_findings(final, pairs, tolerance_ns)]
    if counted["gone"]:
        whole = not (ground.sums["missing"] or ground.sums["dropped"] or ground.sums["broken"])
        proof = Proof(settings.complete and whole, rules.holes(ground.journal), tolerance_ns)
        parts.append(losses(left.where("NOT pending").drop("pending"), of, proof))
    path = str(building / "findings")
    rules.named(rules.together(parts), ground.lined).write.parquet(path)
    facts = _facts(ground, counted, seen.get)
    return _told(spark.read.parquet(path), settings.evidence, ground, facts)


def _ground(spark: SparkSession, where: Where, settings: Settings, building: Path, *, must_have: bool) -> Ground:
    messages = spark.read.schema(MESSAGES_DDL).parquet(where.path("messages"))
    journal = spark.read.schema(JOURNAL_DDL).parquet(where.path("journal"))
    lined = _kept(spark, rules.lines(journal), building / "lines")
    names = ("batches", "missing", "dropped", "copies", "records")
    sums = (
        lined.agg(
            F.count(F.lit(1)).alias("lines"), F.min("sample").alias("sample"), *(F.sum(one).alias(one) for one in names)
        )
        .crossJoin(journal.where("kind = 'broken'").agg(F.count(F.lit(1)).alias("broken")))
        .first()
    )
    assert sums is not None
    limit = sample_limit(sums["sample"] if sums["sample"] is not None else 1.0)
    found = messages.agg(
        F.min("sequence").alias("first"),
        F.max("sequence").alias("last"),
        F.count(F.lit(1)).alias("messages"),
        F.count(F.when(F.col("key_crc") < limit, 1)).alias("in_sample"),
    ).first()
    assert found is not None
    if must_have and not found["messages"]:
        raise InvalidInput(
            f"there is nothing to audit: no message of stream {settings.stream!r} in this range is one that group "
            f"{settings.group!r} is to handle"
        )
    if must_have and not sums["lines"]:
        raise InvalidInput(
            f"the journal of stream {settings.stream!r} has nothing of group {settings.group!r}: let its members write "
            "one, with join(…, journal=…)"
        )
    return Ground(messages, journal, lined, found, sums, limit)


def _kept(spark: SparkSession, frame: DataFrame, path: Path) -> DataFrame:
    """A table that is used several times: computed once."""
    frame.write.parquet(str(path))
    return spark.read.parquet(str(path))


def _left(spark: SparkSession, left: DataFrame, final: DataFrame, where: Where, pending: Pending) -> DataFrame:
    """Messages without a final record; `pending` if the group still had to handle them."""
    if isinstance(where.config, ElasticConfig):
        queued = spark.read.schema(PENDING_DDL).parquet(where.path("pending")).distinct()
        known = left.join(queued.withColumn("queued", F.lit(True)), "sequence", "left")
        waits = F.coalesce("queued", F.lit(False))
        if pending.lag:
            highest = queued.select("sequence").union(final.select("source_sequence")).agg(F.max("sequence")).first()
            assert highest is not None
            waits = waits | (F.col("sequence") > (highest[0] or 0))
        return known.withColumn("pending", waits).drop("queued")
    floors = spark.createDataFrame(list((pending.floors or {}).items()), "of INT, floor BIGINT")
    known = left.join(F.broadcast(floors), F.col("partition") == F.col("of"), "left")
    return known.withColumn("pending", F.col("sequence") > F.coalesce("floor", F.lit(0))).drop("of", "floor")


def _facts(ground: Ground, counted: Row, seen: dict[str, Any]) -> dict[str, int | float]:
    sums, messages, in_sample = ground.sums, ground.range["messages"], ground.range["in_sample"]
    return {
        "messages": messages,
        "outside_the_sample": messages - in_sample,
        "handled": seen["handled"],
        "final_records": seen["finals"],
        "pending": counted["pending"],
        "not_in_the_stream": seen["handled"] - (in_sample - counted["pending"] - counted["gone"]),
        "instances": sums["lines"],
        "batches": sums["batches"] or 0,
        "records": sums["records"] or 0,
        "records_dropped": sums["dropped"] or 0,
        "batches_missing": sums["missing"] or 0,
        "batches_broken": sums["broken"],
        "batches_copied": sums["copies"] or 0,
        "sample": sums["sample"] if sums["sample"] is not None else 1.0,
    }


def _told(findings: DataFrame, most: int, ground: Ground, facts: dict[str, int | float]) -> Found:
    totals, causes, evidence = counted_findings(findings, rules.KINDS, most)
    if rules.OWNERS in totals:
        totals[rules.OWNERS] = sum(causes[rules.OWNERS].values())
    return Found(
        first=ground.range["first"] or 0,
        last=ground.range["last"] or 0,
        violations={kind: totals.get(kind, 0) for kind in rules.VIOLATIONS},
        unproven={kind: totals.get(kind, 0) for kind in rules.KINDS if kind not in rules.VIOLATIONS},
        causes=causes,
        facts=facts,
        evidence=evidence,
    )


def counted_findings(
    findings: DataFrame, kinds: Sequence[str], most: int
) -> tuple[dict[str, int], dict[str, dict[str, int]], dict[str, list[dict[str, Any]]]]:
    """Of each kind: how many messages, the reasons and how often, and the first rows."""
    reasons = findings.groupBy("kind", "why").agg(F.count(F.lit(1)).alias("times")).collect()
    if not reasons:
        return {}, {}, {}
    each = findings.groupBy("kind").agg(F.count_distinct("sequence").alias("messages")).collect()
    totals = {row["kind"]: row["messages"] for row in each}
    causes: dict[str, dict[str, int]] = {}
    for row in sorted(reasons, key=lambda row: (row["kind"], -row["times"], row["why"])):
        causes.setdefault(row["kind"], {})[row["why"]] = row["times"]
    return totals, causes, {kind: _rows(findings, kind, most) for kind in kinds if kind in totals}


def _rows(findings: DataFrame, kind: str, most: int) -> list[dict[str, Any]]:
    chosen = findings.where(F.col("kind") == kind).orderBy("sequence", "record.ended_ns", "other.ended_ns").limit(most)
    return [row.asDict(recursive=True) for row in chosen.collect()]
