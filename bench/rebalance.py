"""Row `rebalance`: members come and go under load; keylane beside the Go reference, in the same run.

Times are from the change to the first message on each moved partition, and the longest silence on partitions that
stayed. The verdict is on everything that was sent. The run itself is `chaos.rebalance`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.contest import Say
from chaos import rebalance, timing
from chaos.members import Peer
from chaos.rebalance import Outcome, Storage
from keylane.groups.admin import PlanName
from tests.peers.go import program
from tests.peers.presence import PeerMissing

GO = "Go pcgroups 0.1"


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    peer: Peer
    plan: PlanName = "balanced"


OURS = Contestant("keylane", "keylane")
STICKY = Contestant("keylane, sticky plan", "keylane", "sticky")
REFERENCE = Contestant(GO, "go")


@dataclass(frozen=True, slots=True)
class Setting:
    """One table. `calm`: time enough between two changes for the reference to recover from each."""

    name: str
    storage: Storage
    rate: float
    every_s: float
    seconds: float

    @property
    def title(self) -> str:
        return (
            f"{self.name}: a change every {self.every_s:g} s for {self.seconds:g} s, {self.rate:,.0f} msg/s, "
            f"{self.storage} storage, 10 partitions"
        )


def settings(scale: float) -> list[Setting]:
    return [
        Setting("calm", "memory", 1000, 8.0, max(24.0, 64.0 * scale)),
        Setting("pressed", "memory", rebalance.RATES["memory"], 3.0, max(12.0, 60.0 * scale)),
        Setting("pressed", "file", rebalance.RATES["file"], 3.0, max(12.0, 60.0 * scale)),
    ]


@dataclass(slots=True)
class Figures:
    """What one contestant showed in all rounds."""

    outcomes: list[Outcome] = field(default_factory=list)

    def first_message(self, verb: str | None = None) -> dict[str, float | int | None]:
        return timing.summary(
            [wait.seconds for one in self.outcomes for wait in one.waits if verb in (None, wait.verb)]
        )

    def gap(self, *, untouched: bool) -> dict[str, float | int | None]:
        return timing.summary([gap.seconds for one in self.outcomes for gap in one.gaps if gap.untouched is untouched])

    def total(self, what: str) -> int:
        return sum(len(getattr(one.verdict, what)) for one in self.outcomes)

    @property
    def moves_per_change(self) -> float:
        changes = sum(len(one.changes) for one in self.outcomes)
        return sum(len(one.waits) for one in self.outcomes) / changes

    def as_json(self) -> dict[str, object]:
        return {
            "first_message_ms": {
                "all": self.first_message(),
                "add": self.first_message("add"),
                "drop": self.first_message("drop"),
            },
            "gap_ms": {
                "members_that_kept_everything": self.gap(untouched=True),
                "partitions_kept_by_the_others": self.gap(untouched=False),
                "publisher": round(max(one.publisher_gap_s for one in self.outcomes) * 1000, 1),
            },
            "moves_per_change": round(self.moves_per_change, 2),
            "sent": sum(one.verdict.sent for one in self.outcomes),
            "lost": self.total("lost"),
            "duplicated": self.total("duplicated"),
            "out_of_order": self.total("out_of_order"),
            "explained": [line for one in self.outcomes for line in one.explained],
        }


def run(rounds: int, scale: float, say: Say) -> tuple[dict[str, object], str]:
    """The figures as JSON and as Markdown."""
    has_go = _has_go(say)
    rows: list[dict[str, object]] = []
    text: list[str] = []
    for setting in settings(scale):
        say(setting.title)
        contestants = [OURS, *([STICKY] if setting.name == "calm" else []), *([REFERENCE] if has_go else [])]
        figures = {one.name: Figures() for one in contestants}
        for number in range(rounds):
            for one in contestants:
                outcome = _once(setting, one, seed=number + 1)
                figures[one.name].outcomes.append(outcome)
                say(f"  round {number + 1}/{rounds}  {one.name:<24} {outcome.verdict}")
        rows.append(
            {
                "setting": setting.name,
                "storage": setting.storage,
                "rate": setting.rate,
                "every_s": setting.every_s,
                "seconds": setting.seconds,
                "contestants": {name: one.as_json() for name, one in figures.items()},
            }
        )
        text.append(_table(setting, figures))
    return {"row": "rebalance", "rounds": rounds, "settings": rows}, "\n\n".join(text)


def _has_go(say: Say) -> bool:
    try:
        program("pcgroups-peer", say)
    except PeerMissing as missing:
        say(f"left out: {GO} ({missing})")
        return False
    return True


def _once(setting: Setting, one: Contestant, seed: int) -> Outcome:
    run_settings = rebalance.Settings(
        seconds=setting.seconds,
        seed=seed,
        rate=setting.rate,
        storage=setting.storage,
        peer=one.peer,
        plan=one.plan,
        every_s=setting.every_s,
    )
    return asyncio.run(rebalance.run(run_settings, lambda _: None))


def _table(setting: Setting, figures: dict[str, Figures]) -> str:
    lines = [
        f"### {setting.title}",
        "",
        "| contestant | first message on a moved partition, ms: p50 / p95 / max | after add p95 | after drop p95 "
        "| longest gap, ms: unchanged members / kept by changed ones | moves a change | sent "
        "| lost | twice | out of order |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, one in figures.items():
        first = one.first_message()
        gaps = (one.gap(untouched=True)["max"], one.gap(untouched=False)["max"])
        sent = sum(outcome.verdict.sent for outcome in one.outcomes)
        never = f", {first['never']} never" if first["never"] else ""
        lines.append(
            f"| {name} | {_row(first[key] for key in ('p50', 'p95', 'max'))}{never} "
            f"| {_shown(one.first_message('add')['p95'])} | {_shown(one.first_message('drop')['p95'])} "
            f"| {_row(gaps)} | {one.moves_per_change:.1f} | {sent:,} "
            f"| {one.total('lost')} | {one.total('duplicated')} | {one.total('out_of_order')} |"
        )
    return "\n".join(lines)


def _row(values: Iterable[float | int | None]) -> str:
    return " / ".join(_shown(one) for one in values)


def _shown(value: float | int | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
