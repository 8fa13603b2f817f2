"""The rules of the audit, on tables: from records and messages to findings. Reads no server and keeps no rows itself.

Words, exactly:

- A *line* is what one instance wrote through one journal: (writer, member, instance). Its records have an order without
  a clock: (batch, row).
- A record is *final* if its outcome is done, dead or terminated. A message is handled if it has a final record.
- A message is *put aside* if a record of it says parked, delayed, retried or retried_dead: it is stored elsewhere, or
  was tried again beside its key's lane. It is not lost, and as such a record is not final, it says nothing about order.
  When a parked key is released, its messages get final records, in their order.
- Of two final records of a message the one that ended first is its first *effect*; each other one is a **duplicate**.
- A message is **out of order** if a later message of its key had its first effect before it. Within a line the order is
  (batch, row). Across lines it is `ended_ns`, and the difference must be more than the tolerance; a smaller one is
  **order unproven**, because the clocks of two machines cannot tell.
- A *tenure* is a line with a pin and a revision, on one key. Tenure B *succeeds* A if it is of another line and its
  first handler started later.
- **Two owners**: tenures A and B of one key, of different lines, and each started a handler (of a final record) more
  than the tolerance after the other had started its first.
- A final record is a **late effect** if its handler started before the first effect of a tenure that succeeds its own,
  and ended more than the tolerance after it.
- A message is **lost** if it has no final record, was not pending, and its record cannot be missing by accident: see
  below. Otherwise it is **unproven**.

All of it is windows and joins over keys or sequences: Spark sorts and spills, and no group is ever held in memory. What
is reported of a key comes from its own records only, so the rules need to look at `suspects` and at no other key.

The record of a message can be missing by accident: dropped, expired, or lost with a process that was killed before it
flushed. It cannot if one tenure held the message all the time, and its line has no hole meanwhile: a key's
messages are handled one after the other, so the record would lie there. A tenure had it all the time if it handled the
next message of the key, and either the previous one too, or anything of the partition before the message was stored.
(A lower sequence is no proof of an earlier time: whoever takes over gets old messages that were not acked.) Nor can the
record be missing by accident if the whole journal is known to be complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.window import Window

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession

FINAL = ("done", "dead", "terminated")
PUT_ASIDE = ("parked", "delayed", "retried", "retried_dead")

DUPLICATE, ORDER, ORDER_UNPROVEN = "duplicated", "out_of_order", "order_unproven"
OWNERS, LATE, LOST, UNPROVEN = "two_owners", "late_effect", "lost", "unproven"
VIOLATIONS = (LOST, DUPLICATE, ORDER, OWNERS, LATE)
KINDS = (*VIOLATIONS, UNPROVEN, ORDER_UNPROVEN)

RECORD_TYPE = (
    "STRUCT<line: BIGINT, pin: STRING, revision: BIGINT, source_sequence: BIGINT, sequence: BIGINT, delivered: INT, "
    "outcome: STRING, started_ns: BIGINT, ended_ns: BIGINT, batch: BIGINT, row: INT>"
)
RECORD_FIELDS = tuple(re.findall(r"(\w+):", RECORD_TYPE))
_FINDING = {
    "kind": "STRING",
    "key": "STRING",
    "partition": "INT",
    "sequence": "BIGINT",
    "why": "STRING",
    "record": RECORD_TYPE,
    "other": RECORD_TYPE,
}
_LINE = ("writer", "member", "instance")
_TENURE = ("key", "line", "pin", "revision")
_PLACE = ("source_sequence", "started_ns", "ended_ns", "batch", "row")


def record() -> Column:
    """The fields of a record as one column."""
    return F.struct(*RECORD_FIELDS)


def no_record() -> Column:
    return F.lit(None).cast(RECORD_TYPE)


# ---- lines: what is missing in the journal --------------------------------------------------------------


def batches(journal: DataFrame) -> DataFrame:
    """Every batch of every line once. `before` is the number of the batch before it; 0 before the first one."""
    return _numbered(journal.where("kind = 'head'"))


def _numbered(heads: DataFrame) -> DataFrame:
    once = (
        heads.repartition(*_LINE)  # everything after it goes by line: this is the only exchange
        .groupBy(*_LINE, "batch")
        .agg(
            F.max("dropped").alias("dropped"),
            F.max("records").alias("records"),
            F.min("sample").alias("sample"),
            F.min("journal_sequence").alias("kept"),
            (F.count(F.lit(1)) - 1).alias("copies"),
        )
    )
    numbers = Window.partitionBy(*_LINE).orderBy("batch")
    return once.withColumn("before", F.coalesce(F.lag("batch").over(numbers), F.lit(0)))


def lines(journal: DataFrame) -> DataFrame:
    """One row for each line, and how much of it is missing.

    What is no whole batch has no line: one more row, without names, has the `copies` of nothing that there are.
    """
    return (
        _numbered(journal.where("kind <> 'record'"))
        .groupBy(*_LINE)
        .agg(
            F.count(F.lit(1)).alias("batches"),
            F.sum(F.col("batch") - F.col("before") - 1).alias("missing"),
            F.sum("dropped").alias("dropped"),
            F.sum("copies").alias("copies"),
            F.sum("records").alias("records"),
            F.min("sample").alias("sample"),
        )
        .withColumn("line", F.xxhash64(*_LINE))
    )


def holes(journal: DataFrame) -> DataFrame:
    """`line` and `batch`: records of the line are missing before this batch."""
    before = batches(journal).where("batch - before > 1 OR dropped > 0")
    return before.select(F.xxhash64(*_LINE).alias("line"), "batch")


def records(journal: DataFrame, *, copies: bool) -> DataFrame:
    """The records, each once. `copies`: some batches were stored twice."""
    found = journal.where("kind = 'record'").withColumn("line", F.xxhash64(*_LINE))
    if not copies:
        return found
    again = journal.where("kind = 'head'").select(*_LINE, "batch", "journal_sequence")
    kept = batches(journal).where("copies > 0").select(*_LINE, "batch", "kept")
    passed = again.join(kept, [*_LINE, "batch"]).where("journal_sequence <> kept").select("journal_sequence")
    return found.join(F.broadcast(passed), "journal_sequence", "left_anti")


def finals(of: DataFrame) -> DataFrame:
    return of.where(F.col("outcome").isin(*FINAL)).select("key", "partition", *RECORD_FIELDS)


# ---- suspects: where to look at all ---------------------------------------------------------------------


def suspects(final: DataFrame, counted: Observation) -> DataFrame:
    """The keys that may have findings, as `key_hash`: sometimes too many, never too few.

    A key is beyond suspicion if every line wrote down its messages in the order of their sequences, each once, and no
    tenure has a message or a moment in common with the one before it: everything ended before the next one started
    anything, so nobody was overtaken, late, or second. That holds for two keys if it holds for both taken as one, so a
    hash stands for the key, and one exchange of a few numbers per record tells. Counts the `finals`.
    """
    in_line = Window.partitionBy("key_hash", "line").orderBy("source_sequence")
    batch, row = (F.lag(name).over(in_line) for name in ("batch", "row"))
    in_order = (F.lag("source_sequence").over(in_line) < F.col("source_sequence")) & (
        (batch < F.col("batch")) | ((batch == F.col("batch")) & (row < F.col("row")))
    )
    fine = F.coalesce(in_order, F.lit(True)) & (F.col("started_ns") <= F.col("ended_ns"))
    spans = (
        final.select(key_hash(), "line", F.xxhash64("pin", "revision").alias("tenure"), *_PLACE)
        .withColumn("fine", fine)
        .groupBy("key_hash", "line", "tenure")
        .agg(
            F.count(F.lit(1)).alias("finals"),
            F.bool_and("fine").alias("fine"),
            F.min("source_sequence").alias("first"),
            F.max("source_sequence").alias("last"),
            F.min("started_ns").alias("begun_ns"),
            F.max("ended_ns").alias("ended_ns"),
        )
        .observe(counted, F.coalesce(F.sum("finals"), F.lit(0)).alias("finals"))
    )
    in_turn = Window.partitionBy("key_hash").orderBy("first")
    apart = (F.lag("last").over(in_turn) < F.col("first")) & (F.lag("ended_ns").over(in_turn) < F.col("begun_ns"))
    told = spans.withColumn("apart", F.coalesce(apart, F.lit(True))).where("NOT (fine AND apart)")
    return told.select("key_hash").distinct()


def of_suspects(final: DataFrame, found: DataFrame) -> DataFrame:
    return final.withColumn("key_hash", key_hash()).join(found, "key_hash", "left_semi").drop("key_hash")


def key_hash() -> Column:
    return F.xxhash64("key").alias("key_hash")


# ---- effects: duplicates and order ----------------------------------------------------------------------


def effects(final: DataFrame, rank: str = "source_sequence") -> DataFrame:
    """Final records with their `turn` (1 is the first effect of the message) and the one `previous` to it.

    `place` falls as `rank` rises. All windows here and in `order` go that way, so that one sort serves them.
    """
    turns = Window.partitionBy("key", "place").orderBy("ended_ns", "line", "batch", "row")
    return (
        final.withColumn("place", -F.col(rank))
        .withColumn("turn", F.row_number().over(turns))
        .withColumn("previous", F.lag(record()).over(turns))
    )


def order(found: DataFrame, tolerance_ns: int) -> DataFrame:
    """Adds `overtaken` and `overtaken_maybe`: the record of a later message that had its effect before this one."""
    later = [*(F.col(name) for name in ("place", "ended_ns", "line", "batch", "row"))]
    in_key = Window.partitionBy("key").orderBy(*later).rowsBetween(Window.unboundedPreceding, -1)
    in_line = Window.partitionBy("key", "line").orderBy(*later).rowsBetween(Window.unboundedPreceding, -1)
    first = F.col("turn") == 1
    by_time = F.when(first, F.struct("ended_ns", F.col("line").alias("of"), record().alias("record")))
    by_note = F.when(first, F.struct("batch", "row", record().alias("record")))
    looked = found.withColumn("by_time", F.min(by_time).over(in_key)).withColumn(
        "by_note", F.min(by_note).over(in_line)
    )
    noted_before = (F.col("by_note.batch") < F.col("batch")) | (
        (F.col("by_note.batch") == F.col("batch")) & (F.col("by_note.row") < F.col("row"))
    )
    ahead_ns = F.when(F.col("by_time.of") != F.col("line"), F.col("ended_ns") - F.col("by_time.ended_ns"))
    return looked.withColumn(
        "overtaken",
        F.when(first & noted_before, F.col("by_note.record")).when(
            first & (ahead_ns > tolerance_ns), F.col("by_time.record")
        ),
    ).withColumn("overtaken_maybe", F.when(first & (ahead_ns > 0), F.col("by_time.record")))


def order_findings(ordered: DataFrame) -> DataFrame:
    """Duplicates, and what is out of order."""
    again, before = F.col("turn") > 1, F.col("previous")
    why_again = (
        F.when(F.col("sequence") != before["sequence"], F.lit("the server copied it into the queue twice"))
        .when(F.col("line") != before["line"], F.lit("another instance had handled it"))
        .when(F.col("delivered") > before["delivered"], F.lit("delivered again: the ack had not counted"))
        .otherwise(F.lit("handled twice at one delivery"))
    )
    overtaken, maybe = F.col("overtaken"), F.col("overtaken_maybe")
    kind = (
        F.when(again, F.lit(DUPLICATE))
        .when(overtaken.isNotNull(), F.lit(ORDER))
        .when(maybe.isNotNull(), F.lit(ORDER_UNPROVEN))
    )
    why = (
        F.when(again, why_again)
        .when(overtaken["line"] == F.col("line"), F.lit("the same instance handled a later message before it"))
        .when(overtaken.isNotNull(), F.lit("another instance handled a later message before it"))
        .otherwise(F.lit("another instance handled a later message, at nearly the same time by its clock"))
    )
    return findings(ordered, kind, why, record(), F.coalesce(F.when(again, before), overtaken, maybe))


def findings(effects: DataFrame, kind: Column, why: Column, shown: Column, other: Column) -> DataFrame:
    """The effects that are findings, as rows of evidence."""
    return (
        effects.withColumn("kind", kind)
        .where("kind IS NOT NULL")
        .select(
            "kind",
            "key",
            "partition",
            F.col("source_sequence").alias("sequence"),
            why.alias("why"),
            shown.alias("record"),
            other.alias("other"),
        )
    )


# ---- tenures: two owners, late effects ------------------------------------------------------------------


def tenures(final: DataFrame) -> DataFrame:
    """Who worked on a key, on what ground, from when to when; only of keys whose tenures overlap."""
    started = F.struct("started_ns", "ended_ns", record().alias("record"))
    ended = F.struct("ended_ns", record().alias("record"))
    each = final.groupBy(*_TENURE).agg(
        F.min("partition").alias("partition"),
        F.min(started).alias("begun"),
        F.max(started).alias("last_begun"),
        F.min(ended).alias("ended"),
        F.max("ended_ns").alias("last_ended_ns"),
    )
    before = Window.partitionBy("key").orderBy("begun").rowsBetween(Window.unboundedPreceding, -1)
    overlap = each.withColumn("until_ns", F.max("last_ended_ns").over(before)).where("until_ns > begun.started_ns")
    return each.join(overlap.select("key").distinct(), "key", "left_semi")


def successions(of: DataFrame) -> DataFrame:
    """Pairs of tenures `a` and `b` of different lines on one key; b began after a."""
    a, b = of.alias("a"), of.alias("b")
    later = (F.col("b.begun.started_ns") > F.col("a.begun.started_ns")) | (
        (F.col("b.begun.started_ns") == F.col("a.begun.started_ns")) & (F.col("b.line") > F.col("a.line"))
    )
    same = (F.col("a.key") == F.col("b.key")) & (F.col("a.line") != F.col("b.line"))
    return a.join(b, same & later).select(
        *(F.struct(*(F.col(f"{side}.{name}") for name in of.columns)).alias(side) for side in ("a", "b"))
    )


def owner_findings(pairs: DataFrame, tolerance_ns: int) -> DataFrame:
    both = (F.col("a.last_begun.started_ns") - F.col("b.begun.started_ns") > tolerance_ns) & (
        F.col("b.last_begun.started_ns") - F.col("a.begun.started_ns") > tolerance_ns
    )
    return pairs.where(both).select(
        F.lit(OWNERS).alias("kind"),
        F.col("a.key").alias("key"),
        F.col("a.partition").alias("partition"),
        F.col("a.last_begun.record.source_sequence").alias("sequence"),
        F.lit("it went on to start messages of the key after another instance had begun").alias("why"),
        F.col("a.last_begun.record").alias("record"),
        F.col("b.begun.record").alias("other"),
    )


def late_findings(final: DataFrame, pairs: DataFrame, tolerance_ns: int) -> DataFrame:
    succeeded = (
        pairs.groupBy(*(F.col(f"a.{name}").alias(name) for name in _TENURE))
        .agg(F.min("b.ended").alias("successor"), F.max("a.last_ended_ns").alias("last_ended_ns"))
        .where(F.col("last_ended_ns") - F.col("successor.ended_ns") > tolerance_ns)
        .drop("last_ended_ns")
    )
    late = (F.col("started_ns") < F.col("successor.ended_ns")) & (
        F.col("ended_ns") - F.col("successor.ended_ns") > tolerance_ns
    )
    return (
        final.join(succeeded, list(_TENURE))
        .where(late)
        .select(
            F.lit(LATE).alias("kind"),
            "key",
            "partition",
            F.col("source_sequence").alias("sequence"),
            F.lit("it ended after another instance had taken over and handled a message of the key").alias("why"),
            record().alias("record"),
            F.col("successor.record").alias("other"),
        )
    )


# ---- all of it ------------------------------------------------------------------------------------------


def together(parts: list[DataFrame]) -> DataFrame:
    return reduce(lambda one, other: one.unionByName(other), [part.select(*_FINDING) for part in parts])


def no_findings(spark: SparkSession) -> DataFrame:
    nothing = spark.range(1).where(F.lit(False))  # Spark sees at once that there is nothing to do
    return nothing.select(*(F.lit(None).cast(kind).alias(name) for name, kind in _FINDING.items()))


def named(findings: DataFrame, lines: DataFrame) -> DataFrame:
    """Findings with the names of the instances instead of their lines."""
    found = findings
    for side in ("record", "other"):
        names = F.broadcast(lines.select(F.col("line").alias("of_line"), *_LINE))
        fields = [F.col(f"{side}.{name}").alias(name) for name in RECORD_FIELDS if name != "line"]
        told = F.when(F.col(side).isNotNull(), F.struct(*_LINE, *fields))
        found = (
            found.join(names, F.col(f"{side}.line") == F.col("of_line"), "left")
            .withColumn(side, told)
            .drop("of_line", *_LINE)
        )
    return found


# ---- messages without a final record -------------------------------------------------------------------------


_TENURE_OF_LINE = ("line", "pin", "revision")


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known about a journal."""

    complete: bool
    """Every instance closed its journal, according to the settings, and the journal has no hole."""
    holes: DataFrame
    """Before which batches records are missing (`audit_rules.holes`)."""
    tolerance_ns: int
    """How far the clocks of a member and of the server may be apart."""


def unhandled(messages: DataFrame, of: DataFrame) -> DataFrame:
    """The messages that are neither handled nor put aside, according to the records `of` them."""
    settled = of.where(F.col("outcome").isin(*FINAL, *PUT_ASIDE)).select(F.col("source_sequence").alias("sequence"))
    return messages.join(settled, "sequence", "left_anti")


def losses(left: DataFrame, of: DataFrame, proof: Proof) -> DataFrame:
    """What became of messages that have no final record and were not pending.

    `left` has their `sequence`, `key`, `partition`, and when they were `stored` (null: not known).
    """
    final = finals(of)
    held = _held(_between(left, final), final, proof.tolerance_ns)
    given_back = of.where("outcome = 'returned'").select(F.col("source_sequence").alias("sequence")).distinct()
    known = held.join(_broken(held, proof.holes), "sequence", "left").join(
        given_back.withColumn("given_back", F.lit(True)), "sequence", "left"
    )
    reason = (
        F.when(F.lit(proof.complete), F.lit(None).cast("STRING"))
        .when(F.col("given_back"), F.lit("it was given back, and what became of it then is not written"))
        .when(F.col("next").isNull(), F.lit("nothing of its key was handled after it: the record may have been lost"))
        .when(
            F.col("since").isNull(),
            F.lit("the partition changed hands: whoever had it before may have ended without writing"),
        )
        .when(F.col("broken"), F.lit("records of the instance that had it are missing in the journal"))
    )
    return (
        known.withColumn("reason", reason)
        .withColumn("kind", F.when(F.col("reason").isNull(), F.lit(LOST)).otherwise(F.lit(UNPROVEN)))
        .select(
            "kind",
            "key",
            "partition",
            "sequence",
            F.coalesce("reason", F.lit("it left the queue, and nobody handled it")).alias("why"),
            no_record().alias("record"),
            F.col("next").alias("other"),
        )
    )


def _between(left: DataFrame, final: DataFrame) -> DataFrame:
    """Each message with `previous` and `next`: the first effects of its neighbours in the key, where they have one."""
    keys = left.select("key").distinct()
    handled = (
        final.join(keys, "key", "left_semi")
        .groupBy("key", F.col("source_sequence").alias("sequence"))
        .agg(F.min(F.struct("ended_ns", record().alias("record")))["record"].alias("handled"))
        .withColumn("partition", F.lit(None).cast("INT"))
        .withColumn("stored", F.lit(None).cast("TIMESTAMP"))
    )
    wanted = left.select("key", "sequence", F.lit(None).cast(RECORD_TYPE).alias("handled"), "partition", "stored")
    rows = (Window.unboundedPreceding, -1)
    earlier = Window.partitionBy("key").orderBy("sequence").rowsBetween(*rows)
    later = Window.partitionBy("key").orderBy(F.col("sequence").desc()).rowsBetween(*rows)
    return (
        handled.unionByName(wanted)
        .withColumn("previous", F.last("handled", ignorenulls=True).over(earlier))
        .withColumn("next", F.last("handled", ignorenulls=True).over(later))
        .where("handled IS NULL")
        .drop("handled")
    )


def _held(between: DataFrame, final: DataFrame, tolerance_ns: int) -> DataFrame:
    """Adds `since`: a batch from which on the tenure that handled `next` had the message; null if that is not known."""
    begun = final.groupBy("partition", *_TENURE_OF_LINE).agg(
        F.min("started_ns").alias("begun_ns"), F.min("batch").alias("first_batch")
    )
    same = [F.col(f"m.next.{name}") == F.col(f"t.{name}") for name in _TENURE_OF_LINE]
    joined = between.alias("m").join(
        begun.alias("t"), (F.col("m.partition") == F.col("t.partition")) & same[0] & same[1] & same[2], "left"
    )
    nearer = [F.col(f"m.previous.{name}") == F.col(f"m.next.{name}") for name in _TENURE_OF_LINE]
    waited_ns = F.unix_micros("m.stored") * 1000 - F.col("t.begun_ns")
    since = F.when(nearer[0] & nearer[1] & nearer[2], F.col("m.previous.batch")).when(
        waited_ns > tolerance_ns, F.col("t.first_batch")
    )
    return joined.select("m.*", since.alias("since"))


def _broken(held: DataFrame, holes: DataFrame) -> DataFrame:
    """Messages with a hole between `since` and the batch of `next`."""
    edges = held.select("sequence", F.col("next.line").alias("of"), "since", F.col("next.batch").alias("upto"))
    lies = (F.col("of") == F.col("line")) & (F.col("batch") > F.col("since")) & (F.col("batch") <= F.col("upto"))
    found = edges.join(holes, lies, "left_semi").select("sequence").distinct()
    return found.withColumn("broken", F.lit(True))
