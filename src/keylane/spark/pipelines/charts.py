"""Charts of the pipelines, as PNG. Needs matplotlib (`keylane[charts]`); draws without a display.

Takes reports and knows nothing of Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane.errors import InvalidInput
from keylane.extras import extra_missing
from keylane.spark.pipelines.skew import By, MeasuredLoad, moves_told
from keylane.spark.pipelines.skew import Report as SkewReport
from keylane.spark.pipelines.slo import Cell
from keylane.spark.pipelines.slo import Report as SloReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _RED, _GREY, _LIGHT = "#2f6f9f", "#e08a2e", "#c23b3b", "#8a8f98", "#d9dde3"
_MEMBER_COLOURS = ("#2f6f9f", "#e08a2e", "#4b9b5f", "#8e5ea2", "#b0563f", "#3aa6a6", "#7a7a2e", "#d16ba5")
_MOST_BARS = 40
_UNITS: dict[By, tuple[str, float]] = {"messages": ("messages", 1.0), "bytes": ("MB", 1e6), "time": ("s", 1.0)}


def check_chart(path: str | None) -> None:
    """Refuse a chart that could not be drawn or written, before the work for it is done."""
    if path is None:
        return
    _figure_class()
    if not path.endswith(".png"):
        raise InvalidInput(f"chart is {path!r}: give a name that ends in .png")
    if not Path(path).absolute().parent.is_dir():
        raise InvalidInput(f"chart is {path!r}: there is no directory {str(Path(path).absolute().parent)!r}")


def draw_skew(report: SkewReport, path: Path) -> None:
    """Members now and with the plan on the left, partitions and their hottest keys on the right."""
    figure = _figure(11, max(3.6, 1.8 + 0.42 * len(report.now.members)))
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.35])
    _draw_members(left, report)
    _draw_partitions(right, report)
    figure.suptitle(
        f"{report.stream} / {report.group}: imbalance {report.proposal.imbalance_before:.2f} now, "
        f"{report.proposal.imbalance_after:.2f} with {moves_told(len(report.proposal.moves))}",
        x=0.01, ha="left", fontsize=12, fontweight="bold",
    )  # fmt: skip
    _save(figure, path)


def draw_slo(report: SloReport, path: Path) -> None:
    """Times, lag and redeliveries over the windows, with the thresholds."""
    figure = _figure(11, 8.2)
    axes = figure.subplots(3, 2, sharex=True)
    everything = [one for one in report.cells if one.scope == "all"]
    _draw_percentiles(axes[0][0], report, everything, "handler", "Handler time, everything")
    _draw_members_over_time(axes[0][1], report, "handler_p99_ms", title="Handler time p99 by member", unit="ms")
    _draw_percentiles(axes[1][0], report, everything, "wait", "Wait before handling, everything")
    _draw_members_over_time(axes[1][1], report, "wait_p99_ms", title="Wait p99 by member", unit="ms")
    _draw_members_over_time(axes[2][0], report, "lag_messages", title="Lag at the end of the window", unit="messages")
    _draw_members_over_time(axes[2][1], report, "redelivered_ratio", title="Redelivered tries", unit="%", scale=100.0)
    windows = [one.window for one in report.cells if one.window is not None]
    axes[2][0].set_xlim(report.began(min(windows)), report.began(max(windows) + 1))
    for one in axes[2]:
        one.set_xlabel("time (UTC)", fontsize=8)
    handles, labels = axes[0][1].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(8, max(1, len(labels))), frameon=False, fontsize=8
    )
    words = {True: "met", False: "not met"}[report.verdict] if report.thresholds.limits else "not judged"
    figure.suptitle(
        f"{report.stream} / {report.group}: {words}, {report.windows} windows of {report.window_s:g} s",
        x=0.01, ha="left", fontsize=12, fontweight="bold",
    )  # fmt: skip
    _save(figure, path)


# ---- skew ---------------------------------------------------------------------------------------------


def _draw_members(axes: Axes, report: SkewReport) -> None:
    unit, scale = _UNITS[report.by]
    now, then = report.loads_of(report.now), report.loads_of(report.proposal.plan)
    members = list(now)
    mean = report.total / len(members) / scale
    places = range(len(members))
    axes.barh([one - 0.2 for one in places], [now[one] / scale for one in members], 0.38, color=_LIGHT, label="now")
    axes.barh(
        [one + 0.2 for one in places],
        [then.get(one, 0.0) / scale for one in members],
        0.38,
        color=_BLUE,
        label="with the plan",
    )
    axes.axvline(mean, color=_GREY, linewidth=1, label="mean")
    cap = report.proposal.max_imbalance
    axes.axvline(mean * cap, color=_RED, linewidth=1, linestyle="--", label=f"{cap:g} times the mean")
    axes.set_yticks(list(places), members)
    axes.invert_yaxis()
    axes.set_xlabel(f"load ({unit})")
    axes.set_title("Load per member", loc="left", fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False, fontsize=8)
    _numbers(axes.xaxis)


def _draw_partitions(axes: Axes, report: SkewReport) -> None:
    """Each partition as a bar: its hottest keys at the bottom, the rest on top."""
    unit, scale = _UNITS[report.by]
    ranked = sorted(report.partitions, key=lambda one: -report.partitions[one].by(report.by))[:_MOST_BARS]
    totals = [report.partitions.get(one, MeasuredLoad()).by(report.by) / scale for one in ranked]
    hot = [sum(key.load.by(report.by) for key in report.hot_keys if key.partition == one) / scale for one in ranked]
    places = range(len(ranked))
    axes.bar(places, hot, color=_ORANGE, label=f"{len(report.hot_keys)} hottest keys")
    axes.bar(places, [a - b for a, b in zip(totals, hot, strict=True)], bottom=hot, color=_LIGHT, label="other keys")
    moved = {move.partition for move in report.proposal.moves}
    for place, partition in enumerate(ranked):
        if partition in moved:
            axes.plot(place, totals[place], marker="v", color=_BLUE, markersize=6, clip_on=False)
    if moved & set(ranked):
        axes.plot([], [], marker="v", color=_BLUE, linestyle="", markersize=6, label="moves with the plan")
    axes.set_xticks(list(places), [str(one) for one in ranked], fontsize=8 if len(ranked) <= 24 else 6)
    axes.set_xlabel("partition" + (f" ({_MOST_BARS} heaviest)" if len(report.partitions) > _MOST_BARS else ""))
    axes.set_ylabel(f"load ({unit})")
    axes.set_title("Load per partition", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    _numbers(axes.yaxis)


# ---- slo ----------------------------------------------------------------------------------------------


def _draw_percentiles(axes: Axes, report: SloReport, cells: Sequence[Cell], what: str, title: str) -> None:
    for name, colour in (("p50", _GREY), ("p95", _ORANGE), ("p99", _BLUE)):
        measure = f"{what}_{name}_ms"
        _line(axes, report, cells, measure, 1.0, color=colour, label=name)
        _limit(axes, report, measure, 1.0, colour)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel("ms")
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=3)
    _time_axis(axes)


def _draw_members_over_time(
    axes: Axes, report: SloReport, measure: str, *, title: str, unit: str, scale: float = 1.0
) -> None:
    members = sorted({one.name for one in report.cells if one.scope == "member"})
    shown = members[: len(_MEMBER_COLOURS)]
    for member in members[len(shown) :]:
        _line(axes, report, _of(report, member), measure, scale, color=_LIGHT)
    for member, colour in zip(shown, _MEMBER_COLOURS, strict=False):
        _line(axes, report, _of(report, member), measure, scale, color=colour, label=member)
    _limit(axes, report, measure, scale, _RED)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel(unit)
    _time_axis(axes)


def _of(report: SloReport, member: str) -> list[Cell]:
    return [one for one in report.cells if one.scope == "member" and one.name == member]


def _line(axes: Axes, report: SloReport, cells: Sequence[Cell], measure: str, scale: float, **style: Any) -> None:
    points = [
        (report.began(one.window), one.values[measure] * scale)
        for one in cells
        if one.window is not None and measure in one.values
    ]
    axes.plot(
        [when for when, _ in points],  # type: ignore[arg-type]  # it takes times
        [value for _, value in points],
        linewidth=1.6,
        marker="o" if len(points) < 40 else None,
        markersize=3,
        **style,
    )


def _limit(axes: Axes, report: SloReport, measure: str, scale: float, colour: str) -> None:
    limit = report.thresholds.limits.get(measure)
    if limit is None:
        return
    axes.axhline(limit * scale, color=colour, linewidth=1, linestyle="--")
    axes.annotate(
        f"limit {limit * scale:g}",
        (1, limit * scale),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        fontsize=7,
        color=colour,
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.6},
    )


def _time_axis(axes: Axes) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter  # noqa: PLC0415 - optional

    locator = AutoDateLocator(maxticks=7)  # type: ignore[no-untyped-call]  # it has no types
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]  # nor has this
    axes.set_ylim(bottom=0)
    _numbers(axes.yaxis)


# ---- the paper ----------------------------------------------------------------------------------------


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError:
        raise extra_missing("charts need matplotlib; give no chart, or install it", "charts") from None
    return Figure


def _figure(width: float, height: float) -> Figure:
    return _figure_class()(figsize=(width, height), dpi=110, layout="constrained")


def _numbers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415 - optional

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.grid(axis="both", color="#eef0f3", linewidth=0.8)
        axes.set_axisbelow(True)
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidInput(f"chart {str(path)!r} cannot be written: {error.strerror}") from error
