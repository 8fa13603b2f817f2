"""How many workers a group should have: observations over time in, the wanted number out. Pure.

What it aims for: the oldest message that waits is younger than `target_s`. What bounds it:

1. **One change a window.** After a change, and after the start, it only looks for `window_s`.
2. **Up early.** It compares what the lag will be a window from now, as it grows now, with `UP_ABOVE` of the target. How
   many workers are needed follows from the rate of messages and from what a busy worker handles.
3. **Up only if it helps.** Never more workers than there are partitions, nor more than the partitions in which messages
   wait. Workers that were asked for and are not at work yet are waited for.
4. **Down late.** The lag must have been below `DOWN_BELOW` of the target for `CALM_WINDOWS`, and the workers that stay
   must be able to handle the rate. Between the two limits nothing changes.
5. **Unknown is not 0.** While the lag is unknown, or the group is paused, nothing changes.

What a busy worker handles is learned while messages wait in at least as many partitions as there are workers. It is
forgotten after `REMEMBER_WINDOWS`: otherwise handlers that were slow for an hour would keep the group large for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from keylane.core.group_summary import age_text
from keylane.errors import InvalidInput

UP_ABOVE = 0.5
DOWN_BELOW = 0.2
CALM_WINDOWS = 3
REMEMBER_WINDOWS = 60
BUSY = 0.8
"""How much of what it can handle a worker is to be given."""
_LEARN_ABOVE = 0.05
_LEARN_WEIGHT = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """What is wanted, and the limits. `target_lag`: messages that may wait; None: only their age counts."""

    target_s: float
    min_workers: int = 1
    max_workers: int
    window_s: float = 60.0
    target_lag: int | None = None

    def check(self) -> None:
        """Raises `InvalidInput` if it contradicts itself."""
        if self.min_workers < 1:
            raise InvalidInput(f"the minimum is {self.min_workers} workers: it must be at least 1")
        if self.max_workers < self.min_workers:
            raise InvalidInput(
                f"the maximum is {self.max_workers} workers and the minimum {self.min_workers}: it must not be smaller"
            )
        for name, value in (("target age", self.target_s), ("window", self.window_s), ("target lag", self.target_lag)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InvalidInput(f"the {name} is {value}: it must be more than 0")


class LoadObservation(NamedTuple):
    """How a group stands at one time."""

    at_s: float
    """By a clock that never goes back."""
    workers: int
    """Workers that it has, or members that it lists."""
    active: int
    """Those that are at work."""
    partitions: int
    lagging: int
    """Partitions in which messages wait, or may wait."""
    lag: int | None
    """Messages that wait; None: unknown."""
    lag_s: float | None
    """The age of the oldest of them; 0: there is none."""
    arrived: int | None = None
    """Messages that ever came, also those that were handled; None: unknown."""
    problem: str | None = None
    """Why nothing may be changed now, such as a pause."""


class ScalingDecision(NamedTuple):
    """The wanted number, and why in words."""

    wanted: int
    change: int
    """Workers more or fewer than now; 0: nothing changes."""
    reason: str


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What the rule remembers from one observation to the next."""

    wanted: int | None = None
    """The number that was decided last; None: the number that there is counts."""
    waits_from_s: float | None = None
    """The last change, or the start."""
    seen: tuple[LoadObservation, ...] = ()
    capacity: float | None = None
    """Messages a second that one busy worker handles."""
    learned_at_s: float = 0.0

    def may_change(self, rule: ScalingRule, at_s: float) -> bool:
        """Whether a window has passed since the last change."""
        return self.waits_from_s is not None and at_s - self.waits_from_s >= rule.window_s

    def changed(self, wanted: int | None, at_s: float) -> ScalingState:
        return replace(self, wanted=wanted, waits_from_s=at_s, seen=self.seen[-1:])


def step(rule: ScalingRule, state: ScalingState, now: LoadObservation) -> tuple[ScalingState, ScalingDecision]:
    """Take in an observation, and decide. The caller performs a change, and says so by `ScalingState.changed`.

    >>> rule = ScalingRule(target_s=20, max_workers=4, window_s=10)
    >>> state = ScalingState()
    >>> for at_s in (0, 5, 10):
    ...     seen = LoadObservation(at_s, 1, 1, 8, 8, lag=100 * at_s, lag_s=at_s, arrived=110 * at_s)
    ...     state, decision = step(rule, state, seen)
    >>> decision
    ScalingDecision(wanted=4, change=3, reason='the oldest message would be 19 s old in 10 s, above half of 20 s')
    """
    if state.waits_from_s is None:
        state = replace(state, waits_from_s=now.at_s)
    state = _remembering(rule, state, now)
    return state, _decision(rule, state, now)


class _Rates(NamedTuple):
    """Messages a second."""

    arrived: float
    handled: float


def _decision(rule: ScalingRule, state: ScalingState, now: LoadObservation) -> ScalingDecision:
    workers = now.workers if state.wanted is None else state.wanted
    wanted, reason = _proposal(rule, state, now, workers)
    if wanted != workers and not state.may_change(rule, now.at_s):
        assert state.waits_from_s is not None
        left_s = rule.window_s - (now.at_s - state.waits_from_s)
        wanted, reason = workers, f"{reason}; the next change is possible in {age_text(left_s)}"
    return ScalingDecision(wanted, wanted - workers, reason)


def _proposal(rule: ScalingRule, state: ScalingState, now: LoadObservation, workers: int) -> tuple[int, str]:
    """The number of workers, whenever the last change was."""
    top = max(rule.min_workers, min(rule.max_workers, now.partitions))
    if now.problem is not None:
        return workers, now.problem
    if not rule.min_workers <= workers <= top:
        limits = f"{rule.min_workers} to {rule.max_workers} workers for {now.partitions} partitions"
        return min(max(workers, rule.min_workers), top), f"{workers} workers are outside the limits, {limits}"
    if now.lag is None or now.lag_s is None:
        return workers, "the lag is unknown"
    if above := _above(rule, state, now):
        helpful = min(top, max(workers, now.lagging))
        wanted = max(workers, min(helpful, _needed(rule, state, now, workers)))
        return wanted, above if wanted > workers else f"{above}; {_why_not_more(rule, now, workers, helpful)}"
    if not _is_calm(rule, state, now):
        return workers, f"lag {now.lag:,}, {age_text(now.lag_s)}"
    wanted = min(workers, _enough(rule, state, workers))
    calm = f"for {age_text(CALM_WINDOWS * rule.window_s)} next to nothing has waited"
    is_needed = wanted == workers and workers > rule.min_workers
    return wanted, f"{calm}; what comes needs all workers" if is_needed else calm


# ---- up -------------------------------------------------------------------------------------------------------


def _above(rule: ScalingRule, state: ScalingState, now: LoadObservation) -> str | None:
    """Why there are too few workers, in words; None: there are enough."""
    assert now.lag is not None
    assert now.lag_s is not None
    if now.lag_s > UP_ABOVE * rule.target_s:
        return f"the oldest message is {age_text(now.lag_s)} old, above half of {age_text(rule.target_s)}"
    if rule.target_lag is not None and now.lag > UP_ABOVE * rule.target_lag:
        return f"{now.lag:,} messages wait, more than half of {rule.target_lag:,}"
    rates = _rates(state.seen, now.at_s - rule.window_s)
    if rates is None or rates.handled >= rates.arrived or now.lag_s < _LEARN_ABOVE * rule.target_s:
        return None
    in_s = age_text(rule.window_s)
    age_s = now.lag_s + rule.window_s * (1 - rates.handled / rates.arrived)
    if age_s > UP_ABOVE * rule.target_s:
        return f"the oldest message would be {age_text(age_s)} old in {in_s}, above half of {age_text(rule.target_s)}"
    lag = now.lag + rule.window_s * (rates.arrived - rates.handled)
    if rule.target_lag is not None and lag > UP_ABOVE * rule.target_lag:
        return f"{lag:,.0f} messages would wait in {in_s}, more than half of {rule.target_lag:,}"
    return None


def _needed(rule: ScalingRule, state: ScalingState, now: LoadObservation, workers: int) -> int:
    """The workers that handle what comes, and what waits within the target."""
    assert now.lag is not None
    are_all_at_work = now.active >= workers
    rates = _rates(state.seen, now.at_s - rule.window_s)
    capacity = state.capacity
    if rates is not None and rates.handled < rates.arrived and now.active:
        capacity = rates.handled / now.active
    if rates is None or not capacity:
        return 2 * workers if are_all_at_work else workers
    needed = _workers_for(rates.arrived + now.lag / rule.target_s, capacity, now.partitions)
    return max(needed, workers + 1) if are_all_at_work else needed


def _why_not_more(rule: ScalingRule, now: LoadObservation, workers: int, helpful: int) -> str:
    if now.active < workers and helpful > workers:
        return f"only {now.active} of {workers} workers are at work yet"
    if workers >= rule.max_workers:
        return f"{workers} workers are the most that are allowed"
    if workers >= now.partitions:
        return f"more workers than the {now.partitions} partitions would have nothing to do"
    return f"messages wait in {now.lagging} of {now.partitions} partitions, and more workers would not help them"


# ---- down -----------------------------------------------------------------------------------------------------


def _is_calm(rule: ScalingRule, state: ScalingState, now: LoadObservation) -> bool:
    since_s = now.at_s - CALM_WINDOWS * rule.window_s
    return state.seen[0].at_s <= since_s and all(_is_low(rule, one) for one in state.seen)


def _is_low(rule: ScalingRule, one: LoadObservation) -> bool:
    if one.problem is not None or one.lag is None or one.lag_s is None:
        return False
    return one.lag_s <= DOWN_BELOW * rule.target_s and (
        rule.target_lag is None or one.lag <= DOWN_BELOW * rule.target_lag
    )


def _enough(rule: ScalingRule, state: ScalingState, workers: int) -> int:
    fewer = max(rule.min_workers, workers - max(1, workers // 4))
    rates = _rates(state.seen, state.seen[0].at_s)
    if state.capacity is None or rates is None:
        return max(rule.min_workers, workers - 1)
    return max(fewer, _workers_for(rates.arrived, state.capacity, state.seen[-1].partitions))


def _workers_for(rate: float, capacity: float, partitions: int) -> int:
    """The fewest workers of which none has more partitions than it can handle.

    >>> _workers_for(90, 10, 24), _workers_for(110, 10, 24)  # 2 partitions each, as 3 would be too much; 1 each
    (12, 24)
    """
    at_most = partitions if rate <= 0 else math.floor(partitions * capacity * BUSY / rate)
    return math.ceil(partitions / min(max(at_most, 1), max(partitions, 1)))


# ---- what is remembered ---------------------------------------------------------------------------------------


def _remembering(rule: ScalingRule, state: ScalingState, now: LoadObservation) -> ScalingState:
    before = state.seen[-1] if state.seen else None
    since_s = now.at_s - CALM_WINDOWS * rule.window_s
    seen = state.seen
    while len(seen) > 1 and seen[1].at_s <= since_s:
        seen = seen[1:]
    capacity, learned_at_s = state.capacity, state.learned_at_s
    if before is not None and (found := _busy_rate(rule, before, now)) is not None:
        capacity = found if capacity is None else capacity + _LEARN_WEIGHT * (found - capacity)
        learned_at_s = now.at_s
    if now.at_s - learned_at_s > REMEMBER_WINDOWS * rule.window_s:
        capacity = None
    return replace(state, seen=(*seen, now), capacity=capacity, learned_at_s=learned_at_s)


def _busy_rate(rule: ScalingRule, before: LoadObservation, now: LoadObservation) -> float | None:
    """What each worker handled between the two, if all of them had something to do."""
    rates = _rates((before, now), before.at_s)
    if rates is None or rates.handled <= 0 or not before.workers == before.active == now.active == now.workers:
        return None
    are_busy = all(
        one.lag_s is not None and one.lag_s >= _LEARN_ABOVE * rule.target_s and one.lagging >= one.active > 0
        for one in (before, now)
    )
    return rates.handled / now.active if are_busy else None


def _rates(seen: tuple[LoadObservation, ...], since_s: float) -> _Rates | None:
    """Since then; None: unknown, or the counts have begun anew."""
    known = [one for one in seen if one.at_s >= since_s and one.arrived is not None and one.lag is not None]
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    took_s, arrived = last.at_s - first.at_s, (last.arrived or 0) - (first.arrived or 0)
    handled = arrived - (last.lag or 0) + (first.lag or 0)
    if took_s <= 0 or arrived < 0 or handled < 0:
        return None
    return _Rates(arrived / took_s, handled / took_s)
