"""Which faults strike when: decided by the seed alone, before anything runs. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["kill", "freeze", "stop", "membership", "server"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FEWEST_MEMBERS = 2
_AWAY_S = (0.2, 2.0)
_FROZEN_S = (3.0, 8.0)
_SERVER_AWAY_S = (0.0, 1.0)
_SERVER_REST_S = 2.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to do. `target`: an instance, a member, or the server; `how`: the signal, or the change."""

    at_s: float
    kind: Kind
    target: str
    how: str
    lasts_s: float = 0.0
    """How long it is away or frozen."""

    def __str__(self) -> str:
        lasting = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind} {self.target} ({self.how}){lasting}"


def plan(
    seed: int,
    *,
    seconds: float,
    every_s: float,
    kinds: Sequence[Kind],
    instances: Sequence[str],
    members: Sequence[str],
    present: Sequence[str],
) -> list[Fault]:
    """One fault every `every_s`, the first after that time, none in the last `every_s`.

    What is away or frozen is let alone until it is back. If nothing fits at some moment, that moment passes in peace.
    """
    chance = random.Random(seed)  # noqa: S311 - the same seed makes the same run
    back_s: dict[str, float] = {}
    here = list(present)
    made: list[Fault] = []
    step = 1
    while (at_s := step * every_s) <= seconds - every_s:
        step += 1
        free = [one for one in instances if back_s.get(one, 0.0) <= at_s]
        possible = [kind for kind in KINDS if kind in kinds and _fits(kind, free, back_s, at_s)]
        if not possible:
            continue
        kind = chance.choice(possible)
        if kind == "membership":
            fault = _change(chance, at_s, members, here)
        elif kind == "server":
            fault = Fault(at_s, kind, "server", chance.choice(("SIGKILL", "SIGTERM")), chance.uniform(*_SERVER_AWAY_S))
            back_s["server"] = at_s + fault.lasts_s + _SERVER_REST_S
        else:
            fault = _strike(chance, at_s, kind, chance.choice(free))
            back_s[fault.target] = at_s + fault.lasts_s
        made.append(fault)
    return made


def _fits(kind: Kind, free: Sequence[str], back_s: dict[str, float], at_s: float) -> bool:
    if kind == "server":
        return back_s.get("server", 0.0) <= at_s
    return kind == "membership" or bool(free)


def _strike(chance: random.Random, at_s: float, kind: Kind, instance: str) -> Fault:
    if kind == "freeze":
        return Fault(at_s, kind, instance, "SIGSTOP", chance.uniform(*_FROZEN_S))
    return Fault(at_s, kind, instance, "SIGKILL" if kind == "kill" else "SIGTERM", chance.uniform(*_AWAY_S))


def _change(chance: random.Random, at_s: float, members: Sequence[str], here: list[str]) -> Fault:
    """Changes `here` too."""
    outside = [one for one in members if one not in here]
    if outside and (len(here) <= FEWEST_MEMBERS or chance.random() < 0.5):
        member = chance.choice(outside)
        here.append(member)
        return Fault(at_s, "membership", member, "add")
    member = chance.choice(sorted(here))
    here.remove(member)
    return Fault(at_s, "membership", member, "drop")
