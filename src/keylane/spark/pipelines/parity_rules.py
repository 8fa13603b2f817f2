"""The rules of parity, on tables: two groups of one stream, message by message. Reads no server.

The one is what there is, the other what is to take its place. Of a message each has a first effect (its first final
record, as in `audit_rules`) or none.

- **missing**: the one handled it, the other did not, it was not pending there, and its record cannot be missing by
  accident (`audit_losses`); else **missing, unproven**.
- **extra**: the other handled it, the one did not; the same holds the other way round, so **extra, unproven** too.
- **other outcome**: both handled it, with different outcomes (done, dead, terminated).
- **other order**: both handled it, and a message of its key that came after it with the one came before it with the
  other. Within one instance the order is that of its records, across instances that of the clocks, beyond a tolerance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.window import Window

from keylane.spark.pipelines import audit_rules as rules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MISSING, EXTRA, OUTCOME, ORDER = "missing", "extra", "other_outcome", "other_order"
MISSING_UNPROVEN, EXTRA_UNPROVEN = "missing_unproven", "extra_unproven"
DIFFERENCES = (MISSING, EXTRA, OUTCOME, ORDER)
KINDS = (*DIFFERENCES, MISSING_UNPROVEN, EXTRA_UNPROVEN, rules.ORDER_UNPROVEN)


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
