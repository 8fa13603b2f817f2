"""Row `strict`: groups that keep the order of every key, beside the Go reference with one message in flight.

Every contestant checks the order on every message. Streams are filled, and the queues of elastic groups are full,
before a run begins; the clock runs from its first message to its last ack.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench import group_ground
from bench.contest import Figures, Say, cpu_seconds, run_command, table
from bench.group_ground import Load, Place, Storage
from keylane.server import NatsServer
from tests.peers.go import program
from tests.peers.presence import PeerMissing

OURS = "keylane"
PROCESSES = "keylane, three processes"
GO_1 = "Go pcgroups, 1 in flight"
GO_1000 = "Go pcgroups, 1000 in flight"
METRICS = "keylane, with metrics"
FEED = "keylane feed, unordered, same filters"
FEED_PLAIN = "keylane feed, unordered, no filter"


Peer = Literal["keylane", "keylane processes", "feed", "feed without filter", "fleet", "go", "go consume"]


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contestant of one table."""

    name: str
    peer: Peer
    load: Load
    max_ack_pending: int = 1000
    sleep_s: float = 0.0
    concurrency: int = 64
    join: tuple[tuple[str, str], ...] = ()
    """More of what `fleet.join` is given."""
    metrics: bool = False
    """Of keylane: with the hooks that count for Prometheus."""
    assigned_first: bool = False
    """Of a fleet: the clock runs when every partition has its owner."""

    @property
    def is_go(self) -> bool:
        return self.peer in ("go", "go consume")

    def command(self, place: Place, go: Path | None) -> Sequence[str]:
        if self.peer == "go consume":
            return [
                str(go), "consume", "--url", place.url, "--stream", place.stream, "--consumer", place.group,
                "--count", str(self.load.count), "--pull-max", "1000",
            ]  # fmt: skip
        if self.peer == "fleet":
            given = {
                "url": place.url, "stream": place.stream, "fleet": place.group, "filter": self.load.partitioning.filter,
                "partitions": self.load.partitions, "workers": self.load.members, "count": self.load.count,
                "join": {"max_ack_pending": self.max_ack_pending, **dict(self.join)},
                "assigned_first": self.assigned_first,
            }  # fmt: skip
            return [sys.executable, "-m", "bench.contestants.keylane_fleet", json.dumps(given)]
        if self.peer in ("feed", "feed without filter"):
            return [
                sys.executable, "-m", "bench.contestants.keylane_feed", "--url", place.url,
                "--stream", place.stream, "--consumer", place.group, "--count", str(self.load.count),
            ]  # fmt: skip
        where = ["--url", place.url, "--stream", place.stream, "--group", place.group]
        how = ["--max-ack-pending", str(self.max_ack_pending)]
        if self.peer == "go":
            return [
                str(go), "group", *where, *how, "--members", ",".join(place.shares), "--kind", self.load.kind,
                "--count", str(self.load.count), "--sleep", f"{self.sleep_s}s",
            ]  # fmt: skip
        members = ",".join(f"{name}={count}" for name, count in place.shares.items())
        return [
            sys.executable, "-m", "bench.contestants.keylane_group", *where, *how, "--members", members,
            "--sleep", str(self.sleep_s), "--concurrency", str(self.concurrency),
            *(["--processes"] if self.peer == "keylane processes" else []),
            *(["--metrics"] if self.metrics else []),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Aim:
    """How many times as fast as a peer we want to be."""

    ours: str
    theirs: str
    times: float


@dataclass(frozen=True, slots=True)
class Setting:
    """One table."""

    name: str
    title: str
    entrants: tuple[Entrant, ...]
    aims: tuple[Aim, ...] = ()


@dataclass(slots=True)
class Ordered(Figures):
    """Figures, and how many messages came out of order in all rounds."""

    count: int = 0
    out_of_order: int | None = None
    """None: this contestant does not look."""

    def as_json(self) -> dict[str, object]:
        return {**Figures.as_json(self), "count": self.count, "out_of_order": self.out_of_order}


def settings(scale: float) -> list[Setting]:
    return [
        _static(scale),
        _elastic("memory", scale),
        _elastic("file", scale),
        _slow_handler(scale),
        _many_keys(scale),
    ]


def _static(scale: float) -> Setting:
    def load(count: int) -> Load:
        return Load("static", "memory", keys=64, count=_scaled(count, scale), members=1)

    return Setting(
        "static",
        "static group, one member, no-op handler, 64 keys in 10 partitions, memory storage",
        (
            Entrant(OURS, "keylane", load(200_000)),
            Entrant(FEED, "feed", load(200_000)),
            Entrant(FEED_PLAIN, "feed without filter", load(200_000)),
            Entrant(GO_1, "go", load(20_000), max_ack_pending=1),
            Entrant(GO_1000, "go", load(200_000)),
        ),
        (Aim(OURS, GO_1, 15.0), Aim(OURS, FEED, 0.9)),
    )


def _elastic(storage: Storage, scale: float) -> Setting:
    many, few = (200_000, 20_000) if storage == "memory" else (20_000, 10_000)

    def load(count: int) -> Load:
        return Load("elastic", storage, keys=64, count=_scaled(count, scale), members=3)

    return Setting(
        f"elastic, {storage}",
        f"elastic group, three members, no-op handler, 64 keys in 10 partitions, {storage} storage, already sourced",
        (
            Entrant(OURS, "keylane", load(many)),
            Entrant(PROCESSES, "keylane processes", load(many)),
            Entrant(GO_1, "go", load(few), max_ack_pending=1),
            Entrant(GO_1000, "go", load(many)),
        ),
        # The Go members share one process, so ours do too; three processes are how members run in earnest.
        tuple(Aim(ours, theirs, times) for ours in (OURS, PROCESSES) for theirs, times in ((GO_1, 4.0), (GO_1000, 1.0)))
        if storage == "memory"
        else (),
    )


def _slow_handler(scale: float) -> Setting:
    def load(count: int) -> Load:
        return Load("static", "memory", keys=256, count=_scaled(count, scale), members=1)

    return Setting(
        "5 ms",
        "static group, one member, handler of 5 ms, 256 keys in 10 partitions, concurrency 256, memory storage",
        (
            Entrant(OURS, "keylane", load(40_000), sleep_s=0.005, concurrency=256),
            Entrant(GO_1, "go", load(400), max_ack_pending=1, sleep_s=0.005),
        ),
        (Aim(OURS, GO_1, 60.0),),
    )


def _many_keys(scale: float) -> Setting:
    return Setting(
        "keys",
        "elastic group, three members, no-op handler, more and more keys in 10 partitions, memory storage",
        tuple(
            Entrant(
                f"{OURS}, {keys:,} keys",
                "keylane processes",
                Load("elastic", "memory", keys=keys, count=_scaled(200_000, scale), members=3),
            )
            for keys in (10, 1_000, 100_000)
        ),
    )


def _scaled(count: int, scale: float) -> int:
    return max(min(count, 400), int(count * scale))


# ---- running ------------------------------------------------------------------------------------------


def run(rounds: int, scale: float, say: Say) -> tuple[dict[str, object], str]:
    """The figures as JSON and as Markdown."""
    rows, text = run_settings(settings(scale), rounds, say)
    return {"row": "strict", "rounds": rounds, "settings": rows}, text


def run_metrics(rounds: int, scale: float, say: Say) -> tuple[dict[str, object], str]:
    """What the hooks of metrics cost: the static setting with and without them."""
    load = Load("static", "memory", keys=64, count=_scaled(200_000, scale), members=1)
    setting = Setting(
        "metrics",
        "static group, one member, no-op handler, 64 keys in 10 partitions, memory storage, with and without metrics",
        (Entrant(OURS, "keylane", load), Entrant(METRICS, "keylane", load, metrics=True)),
        (Aim(METRICS, OURS, 0.97),),
    )
    rows, text = run_settings([setting], rounds, say)
    return {"row": "strict", "rounds": rounds, "settings": rows}, text


def run_settings(chosen: Sequence[Setting], rounds: int, say: Say) -> tuple[list[dict[str, object]], str]:
    """One table for each setting."""
    go = _go(say)
    rows: list[dict[str, object]] = []
    text: list[str] = []
    for setting in chosen:
        say(setting.title)
        figures = _contest(setting, go, rounds, say)
        compared = {
            f"{aim.ours} / {aim.theirs}": (figures[aim.ours].rate / figures[aim.theirs].rate, aim.times)
            for aim in setting.aims
            if aim.theirs in figures and aim.ours in figures
        }
        rows.append(
            {
                "setting": setting.name,
                "title": setting.title,
                "contestants": {name: one.as_json() for name, one in figures.items()},
                "ratios": {name: round(ratio, 2) for name, (ratio, _) in compared.items()},
                "aims": {name: times for name, (_, times) in compared.items()},
            }
        )
        text.append(_table(setting, figures, compared))
    return rows, "\n\n".join(text)


def _go(say: Say) -> Path | None:
    try:
        return program("bench-peer", say)
    except PeerMissing as missing:
        say(f"left out: Go pcgroups ({missing})")
        return None


def _contest(setting: Setting, go: Path | None, rounds: int, say: Say) -> dict[str, Ordered]:
    """All entrants once per round, each in a group of its own; the order is turned by one each round."""
    entrants = [one for one in setting.entrants if not one.is_go or go is not None]
    figures = {one.name: Ordered(count=one.load.count) for one in entrants}
    with NatsServer.start() as server:
        asyncio.run(group_ground.fill(server.url, {one.load for one in entrants}))
        for number in range(rounds):
            shift = number % len(entrants)
            for one in [*entrants[shift:], *entrants[:shift]]:
                _once(one, server, go, figures[one.name])
                rate = figures[one.name].rates[-1]
                say(f"  round {number + 1}/{rounds}  {one.name:<38} {rate:>10,.0f} msg/s")
    return figures


def _once(one: Entrant, server: NatsServer, go: Path | None, mine: Ordered) -> None:
    place = asyncio.run(_prepare(one, server.url))
    before = cpu_seconds(server.pid)
    result = run_command(one.command(place, go))
    used = cpu_seconds(server.pid) - before
    asyncio.run(group_ground.clear_fleet(place) if one.peer == "fleet" else group_ground.clear(place))
    count = int(result["count"])
    mine.rates.append(count / result["seconds"])
    mine.client_cpu_us.append(result["cpu_seconds"] / count * 1e6)
    mine.server_cpu_us.append(used / count * 1e6)
    if "out_of_order" in result and one.peer != "go consume":
        mine.out_of_order = (mine.out_of_order or 0) + int(result["out_of_order"])


async def _prepare(one: Entrant, url: str) -> Place:
    if one.peer == "fleet":
        return await group_ground.fleet(url, one.load)
    if one.peer in ("feed", "feed without filter", "go consume"):
        return await group_ground.consumer(
            url, one.load, filtered=one.peer == "feed", max_ack_pending=one.max_ack_pending
        )
    return await group_ground.group(url, one.load, dialect="go-0.1" if one.peer == "go" else "present")


def _table(setting: Setting, figures: dict[str, Ordered], compared: dict[str, tuple[float, float]]) -> str:
    lines = [table(setting.title, dict(figures), {})]
    lines.extend(f"- {name}: **{ratio:.2f}** (aim {times:g})" for name, (ratio, times) in compared.items())
    checked = {name: one.out_of_order for name, one in figures.items() if one.out_of_order is not None}
    broken = [f"{name}: **{count}**" for name, count in checked.items() if count]
    lines.append(f"- out of order: {', '.join(broken) or 'none'} ({len(checked)} of {len(figures)} look)")
    return "\n".join(lines)
