"""What slo tells: figures of windows, the thresholds they are held against, and which were broken. No Spark in it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane.errors import InvalidInput

if TYPE_CHECKING:
    from keylane.spark.pipelines.running import StreamRange

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
"""What is measured in each window, what a threshold may be set for, and how it is said."""


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
        raise InvalidInput(f"thresholds {str(path)!r} are no TOML: {error}") from error
    known = ", ".join([*LIMITS, "min_tries"])
    limits: dict[str, float] = {}
    for name, value in wire.items():
        if name not in LIMITS and name != "min_tries":
            raise InvalidInput(f"thresholds {str(path)!r} have {name!r}, which is none: give {known}")
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
class Report:
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
    seconds: float
    chart_file: str | None = None

    @property
    def verdict(self) -> bool:
        """Whether every threshold was kept in every window."""
        return not any(breach.total for breach in self.breaches)

    def began(self, window: int) -> datetime:
        return datetime.fromtimestamp(window * self.window_s, UTC)

    @property
    def exit_code(self) -> int:
        return 0 if self.verdict else 3

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
