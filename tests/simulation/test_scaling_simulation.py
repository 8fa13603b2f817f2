"""The scaling rule through a day of load: Poisson arrivals with a daily wave, spikes, and workers that die."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from keylane.core.scaling import ScalingRule, ScalingState, step
from tests.simulation.load_model import TICK_S, LoadModel

HOUR_S = 3600
RULE = ScalingRule(target_s=120, min_workers=2, max_workers=24, window_s=60)
LOOK_EVERY_S = 10
SPIKES = ((3.0, 2.5, 600), (9.2, 2.0, 900), (13.0, 3.0, 300), (13.5, 2.0, 60), (20.0, 3.0, 1200))
"""At this hour, so many times the load, for so many seconds."""
DEATHS_H = (5.0, 13.02, 18.0)


def daily_rate(second: int) -> float:
    """10 messages a second at night, 60 by day."""
    usual = 35 - 25 * math.cos(2 * math.pi * second / (24 * HOUR_S))
    return usual * max((times for hour, times, lasts_s in SPIKES if 0 <= second - hour * HOUR_S < lasts_s), default=1.0)


@dataclass
class Day:
    """What happened."""

    changes: list[tuple[int, int]] = field(default_factory=list)
    """When, and to how many."""
    lags_s: list[float] = field(default_factory=list)
    worker_seconds: int = 0


def model(seed: int, **options: Any) -> LoadModel:
    return LoadModel(daily_rate, random.Random(seed), **options)  # noqa: S311 - the same seed lives the same day


def simulated(model: LoadModel, seconds: int, rule: ScalingRule = RULE) -> Day:
    state, day = ScalingState(), Day()
    deaths = {int(hour * HOUR_S) // TICK_S * TICK_S for hour in DEATHS_H}
    for second in range(0, seconds, TICK_S):
        model.tick()
        if second in deaths:
            model.kill()
        day.worker_seconds += TICK_S * model.workers
        if second % LOOK_EVERY_S:
            continue
        day.lags_s.append(model.lag_s)
        state, decision = step(rule, state, model.observation())
        if decision.change:
            model.scale(decision.wanted)
            state = state.changed(None, model.now_s)
            day.changes.append((model.now_s, decision.wanted))
    return day


@pytest.mark.parametrize("seed", range(2))
def test_a_day_of_load_stays_below_its_target_with_one_change_a_window(seed: int) -> None:
    day = simulated(model(seed), 24 * HOUR_S)
    assert max(day.lags_s) < RULE.target_s, f"seed {seed}"
    gaps = [later - sooner for (sooner, _), (later, _) in zip(day.changes, day.changes[1:], strict=False)]
    assert min(gaps) >= RULE.window_s
    assert all(RULE.min_workers <= wanted <= RULE.max_workers for _, wanted in day.changes)
    # A group of a fixed size needs 24 for the highest spike, all day.
    assert day.worker_seconds < 0.5 * 24 * 24 * HOUR_S, day.worker_seconds / (24 * HOUR_S)
    assert len(day.changes) < 100, "it must not go up and down all the time"


def test_without_scaling_the_same_day_fails() -> None:
    fixed = ScalingRule(target_s=120, min_workers=6, max_workers=6, window_s=60)
    day = simulated(model(0, workers=6), 14 * HOUR_S, fixed)
    assert not day.changes
    assert max(day.lags_s) > RULE.target_s
