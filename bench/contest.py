"""A contest: the same job for several contestants, in turns, on one server; medians and ratios come out.

Machines are noisy, so contestants alternate within a round and figures are compared within one run only.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Say = Callable[[str], None]
Job = Callable[[int], dict[str, float]]
"""Does its work in the round of this number and tells {"count", "seconds", "cpu_seconds"}."""

_TICKS = os.sysconf("SC_CLK_TCK")
_RUN_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """A name and the command that does the job; the command prints {"count", "seconds", "cpu_seconds"}."""

    name: str
    command: Callable[[int], Sequence[str]]
    """Called with the round's number, so that every run can have a consumer of its own."""


@dataclass(slots=True)
class Figures:
    """What one contestant reached."""

    rates: list[float] = field(default_factory=list)
    client_cpu_us: list[float] = field(default_factory=list)
    server_cpu_us: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """(fastest - slowest) / median."""
        return (max(self.rates) - min(self.rates)) / self.rate

    def as_json(self) -> dict[str, object]:
        return {
            "rate": round(self.rate),
            "rates": [round(rate) for rate in self.rates],
            "spread": round(self.spread, 3),
            "client_cpu_us": round(statistics.median(self.client_cpu_us), 2),
            "server_cpu_us": round(statistics.median(self.server_cpu_us), 2),
        }


def run_contest(contestants: Sequence[Contestant], server_pid: int, rounds: int, say: Say) -> dict[str, Figures]:
    """As `run_jobs`, for commands."""

    def job(one: Contestant) -> Job:
        return lambda number: run_command(one.command(number))

    return run_jobs({one.name: job(one) for one in contestants}, server_pid, rounds, say)


def run_jobs(jobs: Mapping[str, Job], server_pid: int, rounds: int, say: Say) -> dict[str, Figures]:
    """All jobs once per round; the order is turned by one each round."""
    figures = {name: Figures() for name in jobs}
    names = list(jobs)
    width = max(map(len, names))
    for number in range(rounds):
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            before = cpu_seconds(server_pid)
            result = jobs[name](number)
            used = cpu_seconds(server_pid) - before
            count = int(result["count"])
            mine = figures[name]
            mine.rates.append(count / result["seconds"])
            mine.client_cpu_us.append(result["cpu_seconds"] / count * 1e6)
            mine.server_cpu_us.append(used / count * 1e6)
            say(f"  round {number + 1}/{rounds}  {name:<{width}} {mine.rates[-1]:>10,.0f} msg/s")
    return figures


def ratios(figures: dict[str, Figures], ours: str) -> dict[str, float]:
    """Our median over each peer's."""
    return {
        f"{ours} / {name}": round(figures[ours].rate / peer.rate, 2) for name, peer in figures.items() if name != ours
    }


def python_contestant(name: str, module: str, arguments: Callable[[int], Sequence[str]]) -> Contestant:
    return Contestant(name, lambda number: [sys.executable, "-m", f"bench.contestants.{module}", *arguments(number)])


def table(title: str, figures: dict[str, Figures], compared: dict[str, float]) -> str:
    """The figures as Markdown, for a terminal and for bench/README.md alike."""
    lines = [
        f"### {title}",
        "",
        "| contestant | messages/s | spread | client CPU µs/msg | server CPU µs/msg |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, one in sorted(figures.items(), key=lambda pair: -pair[1].rate):
        lines.append(
            f"| {name} | {one.rate:,.0f} | {one.spread:.0%} | {statistics.median(one.client_cpu_us):.1f} "
            f"| {statistics.median(one.server_cpu_us):.1f} |"
        )
    lines.append("")
    lines.extend(f"- {name}: **{value:.2f}**" for name, value in compared.items())
    return "\n".join(lines)


def run_command(command: Sequence[str]) -> dict[str, float]:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{' '.join(command)} was not done after {_RUN_TIMEOUT_S:.0f} s") from error
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed ({ended.returncode}):\n{ended.stderr}")
    answer: dict[str, float] = json.loads(ended.stdout.strip().splitlines()[-1])
    return answer


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, from the kernel."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS
