"""Parity: two groups of one stream, compared by what they wrote down: before one takes the place of the other.

The one is what there is, the other what is to take its place. Of a message each has a first effect (its first final
record, as in `audit_rules`) or none.

- **missing**: the one handled it, the other did not, it was not pending there, and its record cannot be missing by
  accident (`audit_rules.losses`); else **missing, unproven**.
- **extra**: the other handled it, the one did not; the same holds the other way round, so **extra, unproven** too.
- **other outcome**: both handled it, with different outcomes (done, dead, terminated).
- **other order**: both handled it, and a message of its key that came after it with the one came before it with the
  other. Within one instance the order is that of its records, across instances that of the clocks, beyond a tolerance.

The rules work on tables and read no server; `compare` fills the tables of two groups, as the audit does for one, runs
the rules and counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.window import Window

from keylane.core.names import check_group_name
from keylane.errors import InvalidInput
from keylane.groups import ElasticConfig
from keylane.spark.address import Address
from keylane.spark.pipelines import audit_rules as rules
from keylane.spark.pipelines import audit_tables as tables
from keylane.spark.pipelines.audit import JournalLines, kept, write_findings
from keylane.spark.pipelines.audit_rules import Proof, losses
from keylane.spark.pipelines.interface import FindingsReport, JournalSettings
from keylane.spark.pipelines.journal_frame import journal_state
from keylane.spark.pipelines.spark_jobs import Say, no_guessed_broadcasts, plainly, say_nothing
from keylane.spark.pipelines.stream_range import StreamRange, find_range, group_of
from keylane.spark.pipelines.work_directory import building, put_in_place, working

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


MISSING, EXTRA, OUTCOME, ORDER = "missing", "extra", "other_outcome", "other_order"
MISSING_UNPROVEN, EXTRA_UNPROVEN = "missing_unproven", "extra_unproven"
DIFFERENCES = (MISSING, EXTRA, OUTCOME, ORDER)
KINDS = (*DIFFERENCES, MISSING_UNPROVEN, EXTRA_UNPROVEN, rules.ORDER_UNPROVEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(JournalSettings):
    """Which two groups to compare, over which messages: `group` is what there is."""

    other_group: str
    """What is compared with it."""
    other_server: str | None = None
    """The other group's server, if it is another one: its stream must have the same sequences, as a mirror has."""

    def __post_init__(self) -> None:
        check_group_name(self.other_group)
        if self.group == self.other_group and self.other_server is None:
            raise InvalidInput(f"group and other_group are both {self.group!r}: give two groups, or other_server")
        _ = self.other_address  # refuses a login in its url
        JournalSettings.__post_init__(self)

    @property
    def other_address(self) -> Address:
        return replace(self.address, url=self.other_server) if self.other_server is not None else self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(FindingsReport):
    """How two groups differ."""

    PIPELINE = "parity"
    VERDICTS = ("same", "different")
    FIELDS = (
        "stream", "group", "other_group", "first", "last", "differences", "unproven", "causes", "facts", "evidence",
        "findings",
    )  # fmt: skip
    NAMES: ClassVar = {
        MISSING: "missing there",
        EXTRA: "only there",
        OUTCOME: "other outcome",
        ORDER: "other order",
        MISSING_UNPROVEN: "missing there, not provable",
        EXTRA_UNPROVEN: "only there, not provable",
        rules.ORDER_UNPROVEN: "other order, not provable",
    }

    other_group: str
    differences: dict[str, int]

    @property
    def proven(self) -> dict[str, int]:
        return self.differences

    def as_text(self) -> str:
        here, there, facts = self.group, self.other_group, self.facts
        rows = [
            ("messages", f"{self.first:,} to {self.last:,}"),
            (f"handled by {here}", f"{facts['handled_here']:,} ({facts['pending_here']:,} of the other's still to do)"),
            (
                f"handled by {there}",
                f"{facts['handled_there']:,} ({facts['pending_there']:,} of the other's still to do)",
            ),
            *self.counts(),
        ]
        head = self.headline(f"{self.stream}: {here} here, {there} there", "no difference")
        shown = self.evidence_lines({"record": ": here ", "other": "; there "})
        return "\n".join([head, "", *(f"{name:<32} {value}" for name, value in rows), *shown])


def run(spark: SparkSession, settings: Settings, say: Say = say_nothing) -> Report:
    """Compare two groups. `InvalidInput`: nothing is there to compare. `NotFound`: no such stream, or no journal.

    report = run(spark, Settings(stream="ORDERS", group="billing", other_group="billing-new"))
    """
    began_s = time.monotonic()
    with (
        working(settings.work, "parity") as directory,
        plainly(),
        no_guessed_broadcasts(spark),
        building(directory) as aside,
    ):
        part = find_range(settings.options)
        if part.is_empty:
            raise InvalidInput(
                f"there is nothing to compare: stream {settings.stream!r} holds no message from {settings.start} to "
                f"{settings.end or 'its end'}"
            )
        found = compare(spark, settings, part, aside, say)
        kept_at: Path | None = None
        if settings.work is not None:
            kept_at = directory / "findings"
            put_in_place(aside / "findings", kept_at)
    return replace(found, seconds=time.monotonic() - began_s, findings=str(kept_at) if kept_at is not None else None)


# ---- the rules, on tables ----------------------------------------------------------------------------------------


def first_effects(final: DataFrame) -> DataFrame:
    """Each handled message once: `sequence`, `key`, `partition` and its first effect as `record`."""
    earliest = F.min(F.struct("ended_ns", "line", "batch", "row", "key", "partition", rules.record().alias("record")))
    found = final.groupBy(F.col("source_sequence").alias("sequence")).agg(earliest.alias("first"))
    return found.select("sequence", "first.key", "first.partition", "first.record")


def paired(one: DataFrame, other: DataFrame) -> DataFrame:
    """Every message that either handled, with both effects beside each other."""
    theirs = other.select(
        "sequence", F.col("key").alias("key_there"), F.col("partition").alias("there"), F.col("record").alias("other")
    )
    return one.join(theirs, "sequence", "full_outer").select(
        "sequence",
        F.coalesce("key", "key_there").alias("key"),
        F.coalesce("partition", "there").alias("partition"),
        "record",
        "other",
    )


def without(pairs: DataFrame, side: str) -> DataFrame:
    """Messages that this side (`record` or `other`) has no effect of, as `losses` wants them."""
    stored = F.lit(None).cast("TIMESTAMP").alias("stored")
    return pairs.where(F.col(side).isNull()).select("sequence", "key", "partition", stored)


def outcome_findings(pairs: DataFrame) -> DataFrame:
    differs = F.col("record.outcome") != F.col("other.outcome")
    why = F.concat_ws(" ", F.col("record.outcome"), F.lit("here,"), F.col("other.outcome"), F.lit("there"))
    return pairs.where(differs).select(
        F.lit(OUTCOME).alias("kind"), "key", "partition", "sequence", why.alias("why"), "record", "other"
    )


def order_findings(pairs: DataFrame, tolerance_ns: int) -> DataFrame:
    """Messages of both that come in another order with the other."""
    by_effect = Window.partitionBy("key").orderBy("record.ended_ns", "record.line", "record.batch", "record.row")
    both = (
        pairs.where("record IS NOT NULL AND other IS NOT NULL")
        .withColumn("rank", F.row_number().over(by_effect))
        .select("key", "partition", "rank", "record", *(F.col(f"other.{name}") for name in rules.RECORD_FIELDS))
    )
    ordered = rules.order(rules.effects(both, "rank"), tolerance_ns)
    overtaken, maybe = F.col("overtaken"), F.col("overtaken_maybe")
    kind = F.when(overtaken.isNotNull(), F.lit(ORDER)).when(maybe.isNotNull(), F.lit(rules.ORDER_UNPROVEN))
    why = F.lit("there, a message came before it that came after it here")
    return rules.findings(ordered, kind, why, F.col("record"), F.coalesce(overtaken, maybe))


def absent(found: DataFrame, proven: str, unproven: str, shown: DataFrame) -> DataFrame:
    """The findings of `losses` in the words of parity; `shown` has the effect that the side that handled it had."""
    words = F.when(F.col("kind") == rules.LOST, F.lit(proven)).otherwise(F.lit(unproven))
    why = F.when(F.col("kind") == rules.LOST, F.lit("only one of the two handled it")).otherwise(F.col("why"))
    return (
        found.select(words.alias("kind"), "key", "partition", "sequence", why.alias("why"))
        .join(shown, "sequence")
        .select("kind", "key", "partition", "sequence", "why", "record", "other")
    )


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two groups, read into tables."""

    where: tables.AuditSource
    pending: tables.PendingWork
    records: DataFrame
    lines: JournalLines
    holes: DataFrame

    @property
    def effects(self) -> DataFrame:
        return first_effects(rules.finals(self.records))

    def still_to_do(self, spark: SparkSession, messages: DataFrame) -> DataFrame:
        """Those messages that this group had not handled yet when it was looked at."""
        if isinstance(self.where.config, ElasticConfig):
            queued = spark.read.schema(tables.PENDING_DDL).parquet(self.where.path("pending")).distinct()
            found = messages.join(queued, "sequence", "left_semi")
            if not self.pending.lag:
                return found
            highest = queued.union(self.records.select("source_sequence")).agg(F.max("sequence")).first()
            beyond = (highest[0] if highest is not None else None) or 0
            return found.unionByName(messages.where(F.col("sequence") > beyond)).distinct()
        # The other group may count partitions otherwise, so the least floor speaks for all.
        return messages.where(F.col("sequence") > min((self.pending.floors or {0: 0}).values()))


def compare(spark: SparkSession, settings: Settings, part: StreamRange, aside: Path, say: Say) -> Report:
    """The report; all findings are in `aside/findings` afterwards."""
    places = (
        _where(settings.address, settings.stream, settings.group, aside / "one"),
        _where(settings.other_address, settings.stream, settings.other_group, aside / "other"),
    )
    # Before the journals are read, so that nothing falls between.
    grounds = [(where, tables.pending_of(spark, where)) for where in places]
    time.sleep(settings.settle_s)
    one, other = (_read(spark, where, pending, part, say) for where, pending in grounds)
    if one.lines.sample != other.lines.sample:
        raise InvalidInput(
            f"the journals keep different samples of the keys: {one.lines.sample:g} of group {settings.group!r} and "
            f"{other.lines.sample:g} of {settings.other_group!r}; compare groups with the same"
        )
    say("comparing message by message")
    counted = Observation()
    both = paired(one.effects, other.effects).observe(
        counted, F.count("record").alias("handled_here"), F.count("other").alias("handled_there")
    )
    pairs = kept(spark, both, aside / "pairs")
    tolerance_ns = round(settings.tolerance_s * 1e9)
    parts = [outcome_findings(pairs), order_findings(pairs, tolerance_ns)]
    facts: dict[str, int | float] = counted.get
    for side, column, words, name in (
        (other, "other", (MISSING, MISSING_UNPROVEN), "pending_there"),
        (one, "record", (EXTRA, EXTRA_UNPROVEN), "pending_here"),
    ):
        lacking = without(pairs, column)
        waits = kept(spark, side.still_to_do(spark, lacking), aside / name)
        facts[name] = waits.count()
        gone = lacking.join(waits.select("sequence"), "sequence", "left_anti")
        proof = Proof(settings.complete and side.lines.whole, side.holes, tolerance_ns)
        found = losses(gone, side.records, proof)
        parts.append(absent(found, *words, pairs.select("sequence", "record", "other")))
    totals, causes, evidence = write_findings(
        spark,
        parts,
        one.lines.names(spark).unionByName(other.lines.names(spark)),
        aside / "findings",
        kinds=KINDS,
        most=settings.evidence,
    )
    return Report(
        stream=settings.stream,
        group=settings.group,
        other_group=settings.other_group,
        first=part.after + 1,
        last=part.upto,
        differences={kind: totals.get(kind, 0) for kind in DIFFERENCES},
        unproven={kind: totals.get(kind, 0) for kind in KINDS if kind not in DIFFERENCES},
        causes=causes,
        evidence=evidence,
        facts=facts,
        seconds=0.0,
    )


def _where(address: Address, stream: str, group: str, directory: Path) -> tables.AuditSource:
    journal_state(address, stream)
    directory.mkdir()
    return tables.AuditSource(address, stream, group, group_of(address, stream, group), directory)


def _read(
    spark: SparkSession, where: tables.AuditSource, pending: tables.PendingWork, part: StreamRange, say: Say
) -> Side:
    last = journal_state(where.address, where.stream).last
    say(f"reading the journal of {where.group}")
    if last:
        tables.write_journal(spark, where, part, last)
    else:
        Path(where.path("journal")).mkdir()
    journal = spark.read.schema(tables.JOURNAL_DDL).parquet(where.path("journal"))
    lines = JournalLines.of(journal)
    if not len(lines):
        raise InvalidInput(
            f"the journal of stream {where.stream!r} has nothing of group {where.group!r}: let its members write one, "
            "with join(…, journal=…)"
        )
    records = rules.records(journal, copies=bool(lines.total("copies")))
    return Side(where, pending, records, lines, rules.holes(journal))
