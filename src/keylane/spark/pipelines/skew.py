"""Skew: where a stream's load lies, and a plan that spreads it over the members with few moves.

Load is counted per key and partition: messages and bytes from the stream, handler time from the journal where there is
one. The plan is `core.plans.weighted`; it is written as the file that `keylane elastic apply-plan` applies. Changes
nothing by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from keylane.core.names import check_group_name, check_stream_name
from keylane.core.plans import weighted
from keylane.errors import GroupError, InvalidInput, NotFound
from keylane.groups import ElasticConfig, StaticConfig
from keylane.groups.plan_file import write_plan_file
from keylane.spark.address import Address
from keylane.spark.pipelines.running import (
    Range,
    Say,
    address_options,
    bounds,
    find_messages,
    group_of,
    journal_bounds,
    load_group,
    plainly,
    progress,
    say_nothing,
)
from keylane.spark.pipelines.skew_report import By, HotKey, Load, Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_CAP = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Whose load, over which part of the stream."""

    stream: str
    group: str
    address: Address = field(default_factory=Address)
    start: str = "earliest"
    end: str = "latest"
    by: By = "messages"
    """What the plan spreads. `time` is what handlers needed, and needs a journal."""
    max_imbalance: float = DEFAULT_CAP
    """The heaviest member may carry this many times the mean."""
    top: int = 10
    """How many hot keys to show."""
    plan: str | None = None
    """Where to write the plan."""
    chart: str | None = None

    def __post_init__(self) -> None:
        check_stream_name(self.stream)
        check_group_name(self.group)
        if self.by not in get_args(By):
            raise InvalidInput(f"by is {self.by!r}: give {', '.join(get_args(By))}")
        if not 1 <= self.max_imbalance < 1000:
            raise InvalidInput(f"max_imbalance is {self.max_imbalance}: give 1.0 or more, such as {DEFAULT_CAP}")
        if not 1 <= self.top <= 1000:
            raise InvalidInput(f"top is {self.top}: give 1 to 1000")
        bounds(self.start, self.end)


def run(spark: SparkSession, settings: Settings, say: Say = say_nothing) -> Report:
    """Measure, plan, and write the plan and the chart where they are asked for."""
    began_s = time.monotonic()
    config = group_of(settings.address, settings.stream, settings.group)
    if not config.plan.members:
        raise GroupError(f"group {settings.group!r} has no members: there is nobody to spread the load over")
    base = address_options(settings.address) | {"stream": settings.stream}
    part = find_messages(base, settings.start, settings.end)
    with plainly(), progress(spark, say, "skew"):
        per_key = _per_key(spark, base, config, part)
        times = _handler_times(spark, settings, part)
        if times is not None:
            per_key = per_key.join(times, ["partition", "key"], "left")
        keys, partitions, hot, sample = _collected(per_key.persist(), settings)
    if not partitions:
        raise InvalidInput(
            f"no message of {part} belongs to group {settings.group!r}: none matches its filters; give another range"
        )
    proposal = weighted(
        config.plan,
        config.plan.members,
        config.max_members,
        {number: load.by(settings.by) for number, load in partitions.items() if number < config.max_members},
        max_imbalance=settings.max_imbalance,
    )
    elastic = isinstance(config, ElasticConfig)
    writes_plan = settings.plan is not None and elastic and bool(proposal.moves)
    report = Report(
        stream=settings.stream,
        group=settings.group,
        part=part,
        by=settings.by,
        elastic=elastic,
        now=config.plan,
        partitions=partitions,
        hot_keys=hot,
        keys=keys,
        proposal=proposal,
        journal=_journal_words(settings, sample, known=times is not None),
        seconds=time.monotonic() - began_s,
        plan_file=settings.plan if writes_plan else None,
        chart_file=settings.chart,
    )
    if writes_plan:
        assert settings.plan is not None
        write_plan_file(Path(settings.plan), settings.stream, settings.group, proposal.plan)
    if settings.chart is not None:
        from keylane.spark.pipelines.charts import draw_skew  # noqa: PLC0415 - needs matplotlib

        draw_skew(report, Path(settings.chart))
    return report


# ---- measuring ----------------------------------------------------------------------------------------


def _per_key(
    spark: SparkSession, base: Mapping[str, str], config: StaticConfig | ElasticConfig, part: Range
) -> DataFrame:
    """Messages and bytes of each key of the group."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    rows = load_group(spark, base, config, part)
    return rows.groupBy("partition", "key").agg(
        F.count(F.lit(1)).alias("messages"), F.sum(F.octet_length("data")).alias("bytes")
    )


def _handler_times(spark: SparkSession, settings: Settings, part: Range) -> DataFrame | None:
    """How long handlers worked for each key; None without a journal."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    from keylane.spark.pipelines.journal_frame import journal_frame  # noqa: PLC0415 - needs pyarrow

    try:
        records = journal_frame(
            spark, settings.address, settings.stream, settings.group, bounds=journal_bounds(settings.address, part)
        )
    except NotFound:
        if settings.by == "time":
            raise
        return None
    chosen = records.where(F.col("source_sequence").between(part.after + 1, part.upto))
    return chosen.groupBy("partition", "key").agg(
        (F.sum(F.col("ended_ns") - F.col("started_ns")) / 1e9).alias("time_s"), F.min("sample").alias("sample")
    )


def _journal_words(settings: Settings, sample: float | None, *, known: bool) -> str:
    if not known:
        return "there is none, so handler times are not known"
    if sample is None:
        if settings.by == "time":
            raise InvalidInput(
                f"the journal of {settings.stream!r} has no record of group {settings.group!r} in this range, so there "
                "is no handler time to spread: give another range, or by messages"
            )
        return "it has no record of this range, so handler times are not known"
    return (
        "handler times of every key" if sample >= 1 else f"handler times of {sample:.1%} of the keys, as it is sampled"
    )


def _collected(per_key: DataFrame, settings: Settings) -> tuple[int, dict[int, Load], tuple[HotKey, ...], float | None]:
    """The number of keys, the partitions and the hottest keys: a few rows, however many keys there are. And the
    journal's sample, None where it has no record.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    timed = "time_s" in per_key.columns
    loads = per_key if timed else per_key.withColumns(dict.fromkeys(("time_s", "sample"), F.lit(None).cast("double")))
    measure = {"messages": "messages", "bytes": "bytes", "time": "time_s"}[settings.by]
    try:
        sums = loads.groupBy("partition").agg(
            F.sum("messages"), F.sum("bytes"), F.sum("time_s"), F.count(F.lit(1)), F.min("sample")
        )
        by_partition = sums.collect()
        hottest = (
            loads.orderBy(F.col(measure).desc_nulls_last(), "key").limit(settings.top)
            .select("key", "partition", "messages", "bytes", "time_s").collect()
        )  # fmt: skip
    finally:
        per_key.unpersist()
    partitions = {
        row[0]: Load(int(row[1]), int(row[2] or 0), float(row[3] or 0.0) if timed else None) for row in by_partition
    }
    hot = tuple(
        HotKey(row[0], row[1], Load(int(row[2]), int(row[3] or 0), float(row[4] or 0.0) if timed else None))
        for row in hottest
    )
    samples = [row[5] for row in by_partition if row[5] is not None]
    return sum(int(row[4]) for row in by_partition), partitions, hot, min(samples, default=None)
