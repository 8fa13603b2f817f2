"""Messages without a final record: lost beyond doubt, or unproven, and why.

The record of a message can be missing by accident: dropped, expired, or lost with a process that was killed before it
flushed. It cannot if one tenure had the message in its hands all the time, and its line has no hole meanwhile: a key's
messages are handled one after the other, so the record would lie there. A tenure had it all the time if it handled the
next message of the key, and either the previous one too, or anything of the partition before the message was stored.
(A lower sequence is no proof of an earlier time: whoever takes over gets old messages that were not acked.) Nor can the
record be missing by accident if the whole journal is known to be complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.window import Window

from keylane.spark.pipelines.audit_rules import LOST, RECORD_TYPE, UNPROVEN, finals, no_record, record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TENURE = ("line", "pin", "revision")


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known about a journal."""

    complete: bool
    """Every instance closed its journal, as whoever asked says, and the journal has no hole."""
    holes: DataFrame
    """Before which batches records are missing (`audit_rules.holes`)."""
    tolerance_ns: int
    """How far the clocks of a member and of the server may be apart."""


def unhandled(messages: DataFrame, final: DataFrame) -> DataFrame:
    done = final.select(F.col("source_sequence").alias("sequence"))
    return messages.join(done, "sequence", "left_anti")


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
    begun = final.groupBy("partition", *_TENURE).agg(
        F.min("started_ns").alias("begun_ns"), F.min("batch").alias("first_batch")
    )
    same = [F.col(f"m.next.{name}") == F.col(f"t.{name}") for name in _TENURE]
    joined = between.alias("m").join(
        begun.alias("t"), (F.col("m.partition") == F.col("t.partition")) & same[0] & same[1] & same[2], "left"
    )
    nearer = [F.col(f"m.previous.{name}") == F.col(f"m.next.{name}") for name in _TENURE]
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
