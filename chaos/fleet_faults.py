"""What happens to a fleet when: decided by the scenario and the seed alone, before anything runs. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Scenario = Literal["mixed", "planned", "kill", "leader", "partition", "freeze", "server", "node", "moves"]
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)
Action = Literal["start", "stop", "roll", "kill", "leader", "freeze", "cut", "server", "node"]

HALF = "half"
"""The processes that reach the server through the proxy."""
NODE_KILLS = 10
_FEWEST = 2
_MORE = 2
_BACK_S = (0.2, 6.0)
_FROZEN_S = (4.0, 8.0)
_CUT_S = (1.0, 8.0)
_SERVER_AWAY_S = (0.0, 1.0)
_NODE_AWAY_S = (0.5, 2.0)
_REST_S = 3.0


@dataclass(frozen=True, slots=True)
class FleetStep:
    """One thing to do. `target`: a process of workers, `HALF`, the server, or the number of a node."""

    at_s: float
    action: Action
    target: str
    how: str = ""
    lasts_s: float = 0.0
    """How long it is away, frozen or cut off."""

    def __str__(self) -> str:
        lasting = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.action} {self.target}{f' ({self.how})' if self.how else ''}{lasting}"


def plan(
    scenario: Scenario,
    seed: int,
    *,
    seconds: float,
    every_s: float,
    processes: Sequence[str],
    mixed: Collection[Action] = get_args(Action),
) -> list[FleetStep]:
    """All steps of a run. `processes`: those that run at the start; planned changes add up to two more.

    `mixed`: what the scenario of that name chooses from.
    """
    chance = random.Random(seed)  # noqa: S311 - the same seed makes the same run
    if scenario == "partition":
        away_s = min(30.0, seconds * 0.6)
        return [FleetStep(seconds * 0.1, "cut", HALF, chance.choice(("silent", "reset")), away_s)]
    if scenario == "node":
        kills = max(1, min(NODE_KILLS, int(seconds / every_s) - 1))
        return [_node(chance, (step + 1) * every_s) for step in range(kills)]
    makers: dict[Scenario, Callable[[], Iterator[FleetStep]]] = {
        "planned": lambda: _planned(chance, seconds, every_s, processes),
        "moves": lambda: _in_and_out(seconds, every_s, processes),
        "mixed": lambda: _mixed(chance, seconds, every_s, processes, mixed),
        "leader": lambda: _leaders(seconds, every_s, processes),
    }
    if scenario in makers:
        return list(makers[scenario]())
    return list(_strikes(chance, scenario, seconds, every_s, processes))


def _moments(seconds: float, every_s: float) -> Iterator[float]:
    """None in the last `every_s`."""
    step = 1
    while step * every_s <= seconds - every_s:
        yield step * every_s
        step += 1


def _strikes(
    chance: random.Random, scenario: Scenario, seconds: float, every_s: float, processes: Sequence[str]
) -> Iterator[FleetStep]:
    """One kind of fault again and again. What is away is let alone until it is back."""
    back_s: dict[str, float] = {}
    for at_s in _moments(seconds, every_s):
        free = [one for one in processes if back_s.get(one, 0.0) <= at_s]
        if scenario == "server":
            yield _server(chance, at_s)
        elif len(free) >= min(_FEWEST, len(processes)):
            step = _strike(chance, at_s, "kill" if scenario == "kill" else "freeze", free)
            back_s[step.target] = at_s + step.lasts_s + _REST_S
            yield step


def _planned(chance: random.Random, seconds: float, every_s: float, processes: Sequence[str]) -> Iterator[FleetStep]:
    """Workers added, stopped, and rolled one by one."""
    here = list(processes)
    outside = [f"more{number}" for number in range(_MORE)]
    turns: list[str] = []
    for at_s in _moments(seconds, every_s):
        possible: list[Action] = ["roll", "roll"]
        possible += ["start"] if outside else []
        possible += ["stop"] if len(here) > _FEWEST else []
        action = chance.choice(possible)
        if action == "start":
            target = outside.pop(0)
            here.append(target)
        elif action == "stop":
            target = here.pop(chance.randrange(len(here)))
            outside.append(target)
        else:
            turns = [one for one in turns if one in here] or chance.sample(here, len(here))
            target = turns.pop()
        yield FleetStep(at_s, action, target)


def _in_and_out(seconds: float, every_s: float, processes: Sequence[str]) -> Iterator[FleetStep]:
    """Two more workers come and go, so that partitions move all the time."""
    for number, at_s in enumerate(_moments(seconds, every_s)):
        for one in range(_MORE):
            yield FleetStep(at_s, "stop" if number % 2 else "start", f"more{one}")


def _leaders(seconds: float, every_s: float, processes: Sequence[str]) -> Iterator[FleetStep]:
    """A worker comes or goes; when the assignment that follows is written, its leader is killed."""
    for number, at_s in enumerate(_moments(seconds, every_s)):
        yield FleetStep(at_s, "leader", "more0", "stop" if number % 2 else "start", 1.0)


def _mixed(
    chance: random.Random, seconds: float, every_s: float, processes: Sequence[str], allowed: Collection[Action]
) -> Iterator[FleetStep]:
    """Anything, one after the other; what is away is let alone until it is back."""
    back_s: dict[str, float] = {}
    outside = [f"more{number}" for number in range(_MORE)]
    inside: list[str] = []
    for at_s in _moments(seconds, every_s):
        free = [one for one in processes if back_s.get(one, 0.0) <= at_s]
        possible: list[Action] = ["kill", "freeze", "roll"] if free else []
        possible += ["cut"] if back_s.get(HALF, 0.0) <= at_s else []
        possible += ["server", "node"] if back_s.get("server", 0.0) <= at_s else []
        possible += ["start"] if outside else []
        possible += ["stop"] if inside else []
        possible = [one for one in possible if one in allowed]
        if not possible:
            continue
        action = chance.choice(possible)
        if action in ("start", "stop"):
            here, there = (outside, inside) if action == "start" else (inside, outside)
            step = FleetStep(at_s, action, here.pop(0))
            there.append(step.target)
        elif action == "server":
            step = _server(chance, at_s)
        elif action == "node":
            step = _node(chance, at_s)
            back_s["server"] = at_s + step.lasts_s + _REST_S
        else:
            step = _strike(chance, at_s, action, free)
        back_s[step.target] = at_s + step.lasts_s + _REST_S
        yield step


def _strike(chance: random.Random, at_s: float, action: Action, free: Sequence[str]) -> FleetStep:
    if action == "cut":
        return FleetStep(at_s, action, HALF, chance.choice(("silent", "reset")), chance.uniform(*_CUT_S))
    target = chance.choice(free)
    if action == "roll":
        return FleetStep(at_s, action, target)
    if action == "freeze":
        return FleetStep(at_s, action, target, "SIGSTOP", chance.uniform(*_FROZEN_S))
    return FleetStep(at_s, action, target, "SIGKILL", chance.uniform(*_BACK_S))


def _server(chance: random.Random, at_s: float) -> FleetStep:
    how = chance.choice(("SIGKILL", "SIGTERM"))
    return FleetStep(at_s, "server", "server", how, chance.uniform(*_SERVER_AWAY_S))


def _node(chance: random.Random, at_s: float) -> FleetStep:
    return FleetStep(at_s, "node", str(chance.randrange(3)), "SIGKILL", chance.uniform(*_NODE_AWAY_S))
