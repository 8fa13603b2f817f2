"""Skew: how the load of a stream is spread, and a plan that spreads it over the members with few moves.

Load is counted per key and partition: messages and bytes from the stream, handler time from the journal where there is
one. The plan is `core.weighted_plan.weighted`; it is written as the file that `keylane elastic apply-plan` applies.
Changes nothing by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from keylane.core.plans import Move, Plan
from keylane.core.weighted_plan import WeightedPlan, weighted
from keylane.errors import GroupError, InvalidInput, NotFound
from keylane.groups import ElasticConfig, StaticConfig
from keylane.groups.admin import write_plan_file
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
    from pyspark.sql import DataFrame, SparkSession

By = Literal["messages", "bytes", "time"]
_SHOWN_MOVES = 10


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """What something costs."""

    messages: int = 0
    bytes: int = 0
    time_s: float | None = None
    """None where there is no journal."""

    def by(self, measure: By) -> float:
        return {"messages": self.messages, "bytes": self.bytes, "time": self.time_s or 0.0}[measure]


@dataclass(frozen=True, slots=True)
class HotKey:
    key: str
    partition: int
    load: MeasuredLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(PipelineReport):
    """What was measured and what could be done about it."""

    stream: str
    group: str
    part: StreamRange
    by: By
    elastic: bool
    now: Plan
    partitions: dict[int, MeasuredLoad]
    hot_keys: tuple[HotKey, ...]
    keys: int
    proposal: WeightedPlan
    journal: str
    """What the journal holds, or why it holds nothing."""
    plan_file: str | None = None
    chart_file: str | None = None

    @property
    def verdict(self) -> bool:
        """Whether no member carries more than the cap now."""
        return self.proposal.imbalance_before <= self.proposal.max_imbalance

    @property
    def total(self) -> float:
        return sum(load.by(self.by) for load in self.partitions.values())

    def loads_of(self, plan: Plan) -> dict[str, float]:
        """What each member carries with a plan."""
        return {
            member: sum(self.partitions.get(one, MeasuredLoad()).by(self.by) for one in owned)
            for member, owned in plan.shares
        }

    @property
    def bound(self) -> str:
        """Why the cap cannot be met, if it cannot."""
        proposal = self.proposal
        if proposal.is_within_cap:
            return ""
        mean = self.total / len(self.now.members)
        hottest = max(self.partitions, key=lambda one: self.partitions[one].by(self.by))
        share = self.partitions[hottest].by(self.by) / mean
        alone = self.hot_keys[0].load.by(self.by) / mean
        if proposal.floor <= proposal.max_imbalance:
            return f"no plan below {proposal.imbalance_after:.2f} was found; none can be below {proposal.floor:.2f}"
        words = f"no plan can be below {proposal.floor:.2f}"
        if share < proposal.floor - 0.005:
            return f"{words}: the heaviest partitions do not divide evenly among {len(self.now.members)} members"
        words += f": partition {hottest} alone carries {share:.2f} times the mean"
        if alone <= proposal.max_imbalance:
            return f"{words}, its keys less ({alone:.2f} the hottest): more partitions would help"
        return (
            f"{words}, and key {self.hot_keys[0].key!r} {alone:.2f} times: a key stays with one member, so only a "
            "finer key or a quicker handler helps"
        )

    def as_json(self) -> dict[str, Any]:
        proposal = self.proposal
        return {
            "pipeline": "skew",
            "stream": self.stream,
            "group": self.group,
            "from": self.part.after + 1,
            "to": self.part.upto,
            "by": self.by,
            "verdict": "even" if self.verdict else "skewed",
            "messages": sum(load.messages for load in self.partitions.values()),
            "bytes": sum(load.bytes for load in self.partitions.values()),
            "journal": self.journal,
            "keys": self.keys,
            "hot_keys": [
                {"key": one.key, "partition": one.partition, **_load_object(one.load), "share": self._share(one.load)}
                for one in self.hot_keys
            ],
            "partitions": [
                {"partition": number, "owner": self.now.owner_of(number), **_load_object(load)}
                for number, load in sorted(self.partitions.items())
            ],
            "imbalance": round(proposal.imbalance_before, 4),
            "max_imbalance": proposal.max_imbalance,
            "plan": {
                "imbalance": round(proposal.imbalance_after, 4),
                "floor": round(proposal.floor, 4),
                "within_cap": proposal.is_within_cap,
                "moves": len(proposal.moves),
                "moved": [{"partition": one.partition, "from": one.source, "to": one.target} for one in proposal.moves],
                "member_mappings": [
                    {"member": member, "partitions": partitions} for member, partitions in proposal.plan.mappings()
                ],
                "file": self.plan_file,
            },
            "bound": self.bound or None,
            "members": [
                {"member": member, "now": carried, "then": self.loads_of(proposal.plan).get(member, 0)}
                for member, carried in self.loads_of(self.now).items()
            ],
            "chart": self.chart_file,
            "seconds": round(self.seconds, 3),
        }

    def as_text(self) -> str:
        proposal = self.proposal
        messages = sum(load.messages for load in self.partitions.values())
        size = sum(load.bytes for load in self.partitions.values())
        lines = [
            f"{self.part}: {messages:,} messages, {size / 1e6:,.1f} MB, {self.keys:,} keys; load counted by {self.by}",
            f"journal: {self.journal}",
            "",
            "hot keys",
            *(
                f"  {one.key:<24} partition {one.partition:<4} {amount(one.load.by(self.by), self.by):>14}"
                f"  {self._share(one.load):6.1%}"
                for one in self.hot_keys
            ),
            "",
            f"{'members':<18}{'now':>24}{'with the plan':>28}",
        ]
        then = self.loads_of(proposal.plan)
        mean = self.total / max(1, len(self.now.members))
        for member, carried in self.loads_of(self.now).items():
            owned, gets = len(self.now.partitions_of(member)), len(proposal.plan.partitions_of(member))
            lines.append(
                f"  {member:<16}{amount(carried, self.by):>12} ({_ratio(carried, mean)}, {owned:>3}p)"
                f"{amount(then.get(member, 0.0), self.by):>15} ({_ratio(then.get(member, 0.0), mean)}, {gets:>3}p)"
            )
        lines += ["", f"imbalance now   {proposal.imbalance_before:.2f} (heaviest member / mean; wanted: at most "
                      f"{proposal.max_imbalance:.2f})"]  # fmt: skip
        lines += self._plan_lines()
        return "\n".join(lines)

    def _plan_lines(self) -> list[str]:
        proposal = self.proposal
        if not proposal.moves:
            lines = ["plan            none is needed" if self.verdict else "plan            none would be better"]
        else:
            lines = [
                f"with the plan   {proposal.imbalance_after:.2f}, for {moves_told(len(proposal.moves))}: "
                + _moves_line(proposal.moves)
            ]
        if self.bound:
            lines.append(f"bound           {self.bound}")
        if self.plan_file:
            lines.append(f"apply it        keylane elastic apply-plan {self.plan_file}")
        elif proposal.moves and not self.elastic:
            lines.append("a static group's owners never change: the plan shows what an elastic group could do")
        if self.chart_file:
            lines.append(f"chart           {self.chart_file}")
        return lines

    def _share(self, load: MeasuredLoad) -> float:
        return round(load.by(self.by) / self.total, 6) if self.total else 0.0


# ---- words --------------------------------------------------------------------------------------------


def _load_object(load: MeasuredLoad) -> dict[str, Any]:
    time_s = None if load.time_s is None else round(load.time_s, 6)
    return {"messages": load.messages, "bytes": load.bytes, "time_s": time_s}


def amount(value: float, by: By) -> str:
    return {"messages": f"{value:,.0f}", "bytes": f"{value / 1e6:,.2f} MB", "time": f"{value:,.2f} s"}[by]


def _ratio(value: float, mean: float) -> str:
    return f"{value / mean if mean else 0.0:.2f}x"


def _moves_line(moves: tuple[Move, ...]) -> str:
    told = [f"{one.partition} {one.source or 'nobody'}→{one.target or 'nobody'}" for one in moves[:_SHOWN_MOVES]]
    more = f" and {len(moves) - _SHOWN_MOVES} more" if len(moves) > _SHOWN_MOVES else ""
    return ", ".join(told) + more


def moves_told(count: int) -> str:
    return "1 move" if count == 1 else f"{count} moves"


DEFAULT_CAP = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(GroupSettings):
    """Whose load, over which part of the stream."""

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
        GroupSettings.__post_init__(self)
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
        per_key = _per_key(spark, {**base, "group": settings.group}, config, part)
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
        config.partitions,
        {number: load.by(settings.by) for number, load in partitions.items() if number < config.partitions},
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
    spark: SparkSession, base: Mapping[str, str], config: StaticConfig | ElasticConfig, part: StreamRange
) -> DataFrame:
    """Messages and bytes of each key of the group."""
    rows = load_group(spark, base, config, part)
    return rows.groupBy("partition", "key").agg(
        F.count(F.lit(1)).alias("messages"), F.sum(F.octet_length("data")).alias("bytes")
    )


def _handler_times(spark: SparkSession, settings: Settings, part: StreamRange) -> DataFrame | None:
    """How long handlers worked for each key; None without a journal."""
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


def _collected(
    per_key: DataFrame, settings: Settings
) -> tuple[int, dict[int, MeasuredLoad], tuple[HotKey, ...], float | None]:
    """The number of keys, the partitions and the hottest keys: a few rows, however many keys there are. And the
    journal's sample, None where it has no record.
    """
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
        row[0]: MeasuredLoad(int(row[1]), int(row[2] or 0), float(row[3] or 0.0) if timed else None)
        for row in by_partition
    }
    hot = tuple(
        HotKey(row[0], row[1], MeasuredLoad(int(row[2]), int(row[3] or 0), float(row[4] or 0.0) if timed else None))
        for row in hottest
    )
    samples = [row[5] for row in by_partition if row[5] is not None]
    return sum(int(row[4]) for row in by_partition), partitions, hot, min(samples, default=None)
