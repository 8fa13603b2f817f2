"""What skew tells: the load as it lies, the plan that would spread it, and the bound where no plan can. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from keylane.core.plans import Move, Plan, WeightedPlan

if TYPE_CHECKING:
    from keylane.spark.pipelines.running import StreamRange

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
class Report:
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
    """What the journal told, or why it told nothing."""
    seconds: float
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

    @property
    def exit_code(self) -> int:
        return 0 if self.verdict else 3

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
