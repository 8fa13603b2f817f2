"""Service levels: how long handlers took, how long messages waited, what came again, who lags; by window of time.

Handler times and redeliveries come from the journal; waiting times and lag need the stream's timestamps as well. Each
is counted for everything, for each member and for each partition, in every window, and held against thresholds.

Percentiles are approximate, by Spark's sketch with an accuracy of 10,000: of a million values the one that is given has
a rank at most 100 away from the true one; below ten thousand values it is exact. Memory per group is constant.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane.core.journal_record import sample_limit
from keylane.core.names import check_group_name, check_stream_name
from keylane.errors import InvalidInput
from keylane.groups import ElasticConfig, StaticConfig
from keylane.spark.address import Address
from keylane.spark.pipelines.running import (
    Say,
    StreamRange,
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
from keylane.spark.pipelines.slo_report import LIMITS, Breach, Cell, Report, Thresholds, read_thresholds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

ACCURACY = 10_000
_MOST_WINDOWS = 2_000
_SHOWN_BREACHES = 20
_FINAL = ("done", "dead", "terminated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Whose service levels, over which messages."""

    stream: str
    group: str
    address: Address = field(default_factory=Address)
    start: str = "earliest"
    end: str = "latest"
    window_s: float = 60.0
    thresholds: str | None = None
    """A TOML file with what must hold; without one nothing is judged."""
    chart: str | None = None

    def __post_init__(self) -> None:
        check_stream_name(self.stream)
        check_group_name(self.group)
        if not 0.1 <= self.window_s <= 86_400:
            raise InvalidInput(f"window_s is {self.window_s:g}: give 0.1 to 86400 seconds")
        bounds(self.start, self.end)


def run(spark: SparkSession, settings: Settings, say: Say = say_nothing) -> Report:
    """Measure the messages of a range, judge them, and draw the chart where one is asked for."""
    began_s = time.monotonic()
    thresholds = read_thresholds(Path(settings.thresholds)) if settings.thresholds else Thresholds({})
    config = group_of(settings.address, settings.stream, settings.group)
    base = address_options(settings.address) | {"stream": settings.stream}
    part = find_messages(base, settings.start, settings.end)
    with plainly(), progress(spark, say, "slo"):
        records = _records(spark, settings, part).persist()
        try:
            facts = _facts(records, settings)
            messages = _messages(spark, base, config, part, records, sample=facts.sample).persist()
            cells = _cells(records, messages, settings.window_s).persist()
            report = Report(
                stream=settings.stream,
                group=settings.group,
                part=part,
                window_s=settings.window_s,
                sample=facts.sample,
                tries=facts.tries,
                messages=messages.count(),
                unhandled=messages.where("finished_ns IS NULL").count(),
                totals=_totals(records, messages),
                cells=_collected(cells),
                thresholds=thresholds,
                breaches=_breaches(cells, thresholds),
                windows=facts.windows,
                seconds=time.monotonic() - began_s,
                chart_file=settings.chart,
            )
            messages.unpersist()
            cells.unpersist()
        finally:
            records.unpersist()
    if settings.chart is not None:
        from keylane.spark.pipelines.charts import draw_slo  # noqa: PLC0415 - needs matplotlib

        draw_slo(report, Path(settings.chart))
    return report


# ---- frames -------------------------------------------------------------------------------------------


def _records(spark: SparkSession, settings: Settings, part: StreamRange) -> DataFrame:
    """One row for each try at a message of the range."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    from keylane.spark.pipelines.journal_frame import journal_frame  # noqa: PLC0415 - needs pyarrow

    frame = journal_frame(
        spark, settings.address, settings.stream, settings.group, bounds=journal_bounds(settings.address, part)
    )
    return frame.where(F.col("source_sequence").between(part.after + 1, part.upto)).select(
        "member", "partition", "source_sequence", "delivered", "started_ns", "ended_ns", "outcome", "sample"
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    tries: int
    sample: float
    windows: int


def _facts(records: DataFrame, settings: Settings) -> _Facts:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    row = records.agg(F.count(F.lit(1)), F.min("sample"), F.min("started_ns"), F.max("ended_ns")).collect()[0]
    if not row[0]:
        raise InvalidInput(
            f"the journal of {settings.stream!r} has no record of group {settings.group!r} for messages from "
            f"{settings.start} to {settings.end}: give another range, or see that its members write a journal"
        )
    windows = int((row[3] - row[2]) / 1e9 / settings.window_s) + 1
    if windows > _MOST_WINDOWS:
        raise InvalidInput(
            f"window_s is {settings.window_s:g}, which makes {windows:,} windows of this range: give at least "
            f"{(row[3] - row[2]) / 1e9 / _MOST_WINDOWS:.0f} seconds, or a shorter range"
        )
    return _Facts(int(row[0]), float(row[1]), windows)


def _messages(
    spark: SparkSession,
    base: Mapping[str, str],
    config: StaticConfig | ElasticConfig,
    part: StreamRange,
    records: DataFrame,
    *,
    sample: float,
) -> DataFrame:
    """One row for each message of the group: published, first started, finished, by whom."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    published = load_group(spark, {**base, "includeData": "false"}, config, part).select(
        "partition",
        F.col("sequence").alias("source_sequence"),
        (F.unix_micros("timestamp") * 1000).alias("published_ns"),
        "key",
    )
    if sample < 1:
        published = published.where(F.crc32(F.encode("key", "UTF-8")) < sample_limit(sample))
    final = F.col("outcome").isin(*_FINAL)
    handled = records.groupBy("source_sequence").agg(
        F.min("started_ns").alias("started_ns"),
        F.min(F.when(final, F.col("ended_ns"))).alias("finished_ns"),
        F.max_by("member", "ended_ns").alias("handled_by"),
    )
    owners = spark.createDataFrame(
        [(number, config.plan.owner_of(number) or "nobody") for number in range(config.max_members)],
        "partition INT, owner STRING",
    )
    return (
        published.drop("key")
        .join(handled, "source_sequence", "left")
        .join(F.broadcast(owners), "partition", "left")
        .withColumn("member", F.coalesce("handled_by", "owner", F.lit("nobody")))
        .select("partition", "member", "published_ns", "started_ns", "finished_ns")
    )


def _scoped(frame: DataFrame) -> DataFrame:
    """Each row once for everything, once for its member and once for its partition."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    scopes = F.array(
        F.struct(F.lit("all").alias("scope"), F.lit("").alias("name")),
        F.struct(F.lit("member").alias("scope"), F.col("member").alias("name")),
        F.struct(F.lit("partition").alias("scope"), F.col("partition").cast("string").alias("name")),
    )
    return frame.withColumn("of", F.explode(scopes)).withColumns({"scope": F.col("of.scope"), "name": F.col("of.name")})


def _handler(frame: DataFrame, *by: str) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    took_ms = (F.col("ended_ns") - F.col("started_ns")) / 1e6
    return frame.groupBy(*by, "scope", "name").agg(
        F.count(F.lit(1)).alias("tries"),
        *_percentiles(took_ms, "handler"),
        F.avg((F.col("delivered") > 1).cast("double")).alias("redelivered_ratio"),
    )


def _wait(frame: DataFrame, *by: str) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    # Two clocks: a member's that is behind the server's would make it negative.
    waited_ms = F.greatest(F.lit(0.0), (F.col("started_ns") - F.col("published_ns")) / 1e6)
    started = frame.where("started_ns IS NOT NULL")
    return started.groupBy(*by, "scope", "name").agg(*_percentiles(waited_ms, "wait"))


def _percentiles(value: Column, what: str) -> list[Column]:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    return [
        F.percentile_approx(value, share, ACCURACY).alias(f"{what}_{name}_ms")
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    ]


def _window(nanoseconds: str, window_s: float) -> Column:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    return F.floor(F.col(nanoseconds) / int(window_s * 1e9)).alias("window")


def _cells(records: DataFrame, messages: DataFrame, window_s: float) -> DataFrame:
    """One row for each window and each of everything, members and partitions."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it
    from pyspark.sql.window import Window  # noqa: PLC0415

    on = ["window", "scope", "name"]
    handler = _handler(_scoped(records.withColumn("window", _window("ended_ns", window_s))), "window")
    scoped = _scoped(messages)
    wait = _wait(scoped.withColumn("window", _window("started_ns", window_s)), "window")
    came = scoped.select(_window("published_ns", window_s), "scope", "name", F.lit(1).alias("change"))
    went = scoped.where("finished_ns IS NOT NULL").withColumn("gone_ns", F.greatest("published_ns", "finished_ns"))
    changes = came.unionAll(went.select(_window("gone_ns", window_s), "scope", "name", F.lit(-1).alias("change")))
    so_far = Window.partitionBy("scope", "name").orderBy("window")
    lag = (
        changes.groupBy(*on)
        .agg(F.sum("change").alias("change"))
        .select(*on, F.sum("change").over(so_far).alias("lag_messages"))
    )
    return handler.join(wait, on, "full").join(lag, on, "full")


# ---- results ------------------------------------------------------------------------------------------


def _totals(records: DataFrame, messages: DataFrame) -> tuple[Cell, ...]:
    """Over all windows: everything and each member."""
    on = ["scope", "name"]
    frame = _handler(_scoped(records)).join(_wait(_scoped(messages)), on, "left").where("scope != 'partition'")
    return tuple(sorted(map(_cell, frame.collect()), key=lambda one: (one.scope, one.name)))


def _collected(cells: DataFrame) -> tuple[Cell, ...]:
    rows = cells.where("scope != 'partition'").orderBy("scope", "name", "window").collect()
    return tuple(map(_cell, rows))


def _cell(row: Any) -> Cell:
    told = row.asDict()
    return Cell(
        window=told.get("window"),
        scope=told["scope"],
        name=told["name"],
        tries=told["tries"] or 0,
        values={name: float(told[name]) for name in LIMITS if told.get(name) is not None},
    )


def _breaches(cells: DataFrame, thresholds: Thresholds) -> tuple[Breach, ...]:
    """Per threshold: how many windows broke it, and the worst of them."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as everybody writes it

    found = []
    for name, limit in thresholds.limits.items():
        counted = F.col(name) > limit
        if name != "lag_messages":
            counted &= F.col("tries") >= thresholds.min_tries
        broken = cells.where(counted)
        total = broken.count()
        worst = broken.orderBy(F.col(name).desc(), "window", "scope", "name").limit(_SHOWN_BREACHES).collect()
        found.append(Breach(name, limit, total, tuple(map(_cell, worst))))
    return tuple(found)
