"""Service levels: how long handlers took, how long messages waited, what came again, who lags; by window of time.

Handler times and redeliveries come from the journal; waiting times and lag need the stream's timestamps as well. Each
is counted for everything, for each member and for each partition, in every window, and held against thresholds.

Percentiles are approximate, by Spark's sketch with an accuracy of 10,000: of a million values the one that is given has
a rank at most 100 away from the true one; below ten thousand values it is exact. Memory per group is constant.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from keylane.core.journal_record import sample_limit
from keylane.errors import InvalidInput
from keylane.groups import ElasticConfig, StaticConfig
from keylane.spark.pipelines.interface import GroupSettings, PipelineReport
from keylane.spark.pipelines.journal_frame import journal_frame
from keylane.spark.pipelines.spark_jobs import Say, plainly, progress, say_nothing
from keylane.spark.pipelines.stream_range import (
    StreamRange,
    address_options,
    bounds,
    find_messages,
    group_of,
    journal_bounds,
    load_group,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

LIMITS = {
    "handler_p50_ms": "handler p50 {:.1f} ms",
    "handler_p95_ms": "handler p95 {:.1f} ms",
    "handler_p99_ms": "handler p99 {:.1f} ms",
    "wait_p50_ms": "wait p50 {:.1f} ms",
    "wait_p95_ms": "wait p95 {:.1f} ms",
    "wait_p99_ms": "wait p99 {:.1f} ms",
    "redelivered_ratio": "redelivered {:.2%}",
    "lag_messages": "lag {:,.0f} messages",
}
"""What is measured in each window, what a threshold may be set for, and its text."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The highest value of each measure that is still good."""

    limits: Mapping[str, float]
    min_tries: int = 1
    """A window with fewer tries is not judged by its times and ratios: a few values make no percentile."""


def read_thresholds(path: Path) -> Thresholds:
    """A TOML file such as `handler_p99_ms = 250`, a line for each threshold."""
    try:
        wire = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"thresholds {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"thresholds {str(path)!r} are not TOML: {error}") from error
    known = ", ".join([*LIMITS, "min_tries"])
    limits: dict[str, float] = {}
    for name, value in wire.items():
        if name not in LIMITS and name != "min_tries":
            raise InvalidInput(f"thresholds {str(path)!r} have {name!r}, which is not a threshold: give {known}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise InvalidInput(f"thresholds {str(path)!r} have {name} = {value!r}: give a number, 0 or more")
        if name != "min_tries":
            limits[name] = float(value)
    if not limits:
        raise InvalidInput(f"thresholds {str(path)!r} set none: give {known}")
    return Thresholds(limits, max(1, int(wire.get("min_tries", 1))))


@dataclass(frozen=True, slots=True)
class Cell:
    """The figures of one window (None: of all) for everything, a member or a partition."""

    window: int | None
    scope: str
    name: str
    tries: int
    values: dict[str, float]

    @property
    def who(self) -> str:
        return "all" if self.scope == "all" else f"{self.scope} {self.name}"


@dataclass(frozen=True, slots=True)
class Breach:
    """A threshold, how many windows of members, partitions or all were above it, and the worst of them."""

    measure: str
    limit: float
    total: int
    worst: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(PipelineReport):
    stream: str
    group: str
    part: StreamRange
    window_s: float
    sample: float
    tries: int
    messages: int
    unhandled: int
    totals: tuple[Cell, ...]
    cells: tuple[Cell, ...]
    """Of everything and of members, window by window."""
    thresholds: Thresholds
    breaches: tuple[Breach, ...]
    windows: int
    chart_file: str | None = None

    @property
    def verdict(self) -> bool:
        """Whether every threshold was kept in every window."""
        return not any(breach.total for breach in self.breaches)

    def began(self, window: int) -> datetime:
        return datetime.fromtimestamp(window * self.window_s, UTC)

    def as_json(self) -> dict[str, Any]:
        return {
            "pipeline": "slo",
            "stream": self.stream,
            "group": self.group,
            "from": self.part.after + 1,
            "to": self.part.upto,
            "verdict": self._verdict_word(),
            "window_s": self.window_s,
            "windows": self.windows,
            "percentiles": {"method": "approximate", "rank_error": 0.0001},
            "sample": self.sample,
            "tries": self.tries,
            "messages": self.messages,
            "unhandled": self.unhandled,
            "totals": [self._cell(one) for one in self.totals],
            "breaches": [
                {
                    "measure": breach.measure,
                    "limit": breach.limit,
                    "windows": breach.total,
                    "worst": [self._cell(one) for one in breach.worst],
                }
                for breach in self.breaches
            ],
            "series": [self._cell(one) for one in self.cells],
            "chart": self.chart_file,
            "seconds": round(self.seconds, 3),
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
        when = {} if cell.window is None else {"window": self.began(cell.window).isoformat()}
        named = {"name": cell.name} if cell.scope != "all" else {}
        return {**when, "scope": cell.scope, **named, "tries": cell.tries, **cell.values}

    def _verdict_word(self) -> str:
        if not self.thresholds.limits:
            return "not judged"
        return "met" if self.verdict else "not met"

    def as_text(self) -> str:
        lines = [
            f"{self.part}: {self.messages:,} messages, {self.tries:,} tries, {self.unhandled:,} not finished yet",
            f"{self.windows:,} windows of {self.window_s:g} s; percentiles are approximate (rank within 0.01 %)",
        ]
        if self.sample < 1:
            lines.append(f"the journal is a sample of {self.sample:.1%} of the keys, and so are these figures")
        lines += ["", f"{'':<20}{'tries':>10}{'handler p50':>13}{'p95':>11}{'p99':>11}{'wait p50':>12}{'p95':>12}"
                      f"{'p99':>12}{'again':>8}"]  # fmt: skip
        lines += [_row(one) for one in self.totals]
        lines += ["", f"verdict: {self._verdict_word()}"]
        for breach in self.breaches:
            told = LIMITS[breach.measure].format(breach.limit)
            if not breach.total:
                lines.append(f"  kept    {told}")
                continue
            lines.append(f"  broken  {told}, {breach.total:,} times; the worst:")
            for one in breach.worst[:5]:
                assert one.window is not None
                value = LIMITS[breach.measure].format(one.values[breach.measure])
                lines.append(f"          {self.began(one.window):%Y-%m-%d %H:%M:%S}Z  {one.who:<16} {value}")
        if self.chart_file:
            lines.append(f"chart: {self.chart_file}")
        return "\n".join(lines)


def _row(cell: Cell) -> str:
    value = cell.values.get
    handler, wait = ([value(f"{what}_{one}_ms", 0.0) for one in ("p50", "p95", "p99")] for what in ("handler", "wait"))
    return (
        f"{cell.who:<20}{cell.tries:>10,}{_ms(handler[0]):>13}{_ms(handler[1]):>11}{_ms(handler[2]):>11}"
        f"{_ms(wait[0]):>12}{_ms(wait[1]):>12}{_ms(wait[2]):>12}{value('redelivered_ratio', 0.0):>8.1%}"
    )


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 10_000 else f"{value / 1000:,.1f} s"


ACCURACY = 10_000
_MOST_WINDOWS = 2_000
_SHOWN_BREACHES = 20
_FINAL = ("done", "dead", "terminated", "retried", "retried_dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(GroupSettings):
    """Whose service levels, over which messages."""

    end: str = "latest"
    window_s: float = 60.0
    thresholds: str | None = None
    """A TOML file with what must hold; without one nothing is judged."""
    chart: str | None = None

    def __post_init__(self) -> None:
        GroupSettings.__post_init__(self)
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
            tries, sample, windows = _facts(records, settings)
            messages = _messages(
                spark, {**base, "group": settings.group}, config, part, records, sample=sample
            ).persist()
            cells = _cells(records, messages, settings.window_s).persist()
            report = Report(
                stream=settings.stream,
                group=settings.group,
                part=part,
                window_s=settings.window_s,
                sample=sample,
                tries=tries,
                messages=messages.count(),
                unhandled=messages.where("finished_ns IS NULL").count(),
                totals=_totals(records, messages),
                cells=_collected(cells),
                thresholds=thresholds,
                breaches=_breaches(cells, thresholds),
                windows=windows,
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
    frame = journal_frame(
        spark, settings.address, settings.stream, settings.group, bounds=journal_bounds(settings.address, part)
    )
    return frame.where(F.col("source_sequence").between(part.after + 1, part.upto)).select(
        "member", "partition", "source_sequence", "delivered", "started_ns", "ended_ns", "outcome", "sample"
    )


def _facts(records: DataFrame, settings: Settings) -> tuple[int, float, int]:
    """The number of tries, the sample of the journal, the number of windows."""
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
    return int(row[0]), float(row[1]), windows


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
        [(number, config.plan.owner_of(number) or "nobody") for number in range(config.partitions)],
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
    scopes = F.array(
        F.struct(F.lit("all").alias("scope"), F.lit("").alias("name")),
        F.struct(F.lit("member").alias("scope"), F.col("member").alias("name")),
        F.struct(F.lit("partition").alias("scope"), F.col("partition").cast("string").alias("name")),
    )
    return frame.withColumn("of", F.explode(scopes)).withColumns({"scope": F.col("of.scope"), "name": F.col("of.name")})


def _handler(frame: DataFrame, *by: str) -> DataFrame:
    took_ms = (F.col("ended_ns") - F.col("started_ns")) / 1e6
    return frame.groupBy(*by, "scope", "name").agg(
        F.count(F.lit(1)).alias("tries"),
        *_percentiles(took_ms, "handler"),
        F.avg((F.col("delivered") > 1).cast("double")).alias("redelivered_ratio"),
    )


def _wait(frame: DataFrame, *by: str) -> DataFrame:
    # Two clocks: a member's that is behind the server's would make it negative.
    waited_ms = F.greatest(F.lit(0.0), (F.col("started_ns") - F.col("published_ns")) / 1e6)
    started = frame.where("started_ns IS NOT NULL")
    return started.groupBy(*by, "scope", "name").agg(*_percentiles(waited_ms, "wait"))


def _percentiles(value: Column, what: str) -> list[Column]:
    return [
        F.percentile_approx(value, share, ACCURACY).alias(f"{what}_{name}_ms")
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    ]


def _window(nanoseconds: str, window_s: float) -> Column:
    return F.floor(F.col(nanoseconds) / int(window_s * 1e9)).alias("window")


def _cells(records: DataFrame, messages: DataFrame, window_s: float) -> DataFrame:
    """One row for each window and each of everything, members and partitions."""
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
