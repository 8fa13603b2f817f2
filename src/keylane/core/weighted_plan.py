"""Plans by load: bring what each member carries down to a cap, with few moves.

Owns: `weighted`, and the search behind it, which knows loads and members only as numbers.

A partition cannot be split. So a member may carry the cap, or a partition hotter than the cap and a little
besides, but nobody more than the hottest partition needs. The task is hard in general (packing), so this is a
search with a bound: the largest sum ends at or below the cap, or within 4/3 of the lowest there is. How few
the moves are is measured, not proven: the tests hold it beside every plan there is for small cases.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from keylane.core.partitions import check_partition_count
from keylane.core.plans import Move, Plan, check_range, check_whole, distinct_names, sticky
from keylane.core.subjects import shown
from keylane.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class WeightedPlan:
    """What `weighted` came to. Imbalance is the largest load of a member divided by the mean; 1.0 is even."""

    plan: Plan
    moves: tuple[Move, ...]
    imbalance_before: float
    """Of the current plan among the members it had."""
    imbalance_after: float
    max_imbalance: float
    """The cap that was asked for."""
    floor: float
    """No plan can be below this, most often because the hottest partition cannot be split."""
    unmeasured: tuple[int, ...]
    """Partitions without a load. They count as 0."""

    @property
    def is_within_cap(self) -> bool:
        """False where no plan within the cap was found; `floor` says whether there can be one."""
        return self.imbalance_after <= self.max_imbalance


def weighted(
    current: Plan,
    members: Iterable[str],
    partitions: int,
    loads: Mapping[int, float],
    *,
    max_imbalance: float = 1.15,
) -> WeightedPlan:
    """The current plan with few moves, so that no member carries more than `max_imbalance` times the mean.

    `loads` is what each partition costs in any unit, such as messages per second; a missing partition counts
    as 0. With nothing measured the plan is the sticky one. No member is idle while another owns two
    partitions, because an idle one is not stored.

    A partition hotter than the cap cannot be split: its member stays above, with little besides. Where the
    cap cannot be met the largest load comes as near to it as was found, at most 4/3 of the best there is. It
    never rises, unless partitions without a member have to go somewhere.

    >>> current = Plan({"a": [0, 1, 2], "b": [3]})
    >>> weighted(current, ["a", "b"], 4, {0: 50, 1: 30, 2: 20, 3: 10}).moves
    (Move(partition=0, source='a', target='b'),)
    """
    names = distinct_names(members)
    check_partition_count(partitions)
    check_range(current, partitions)
    weights = _exact_loads(loads, partitions)
    if not _is_number(max_imbalance) or not 1 <= max_imbalance < math.inf:
        raise InvalidInput(
            f"max_imbalance {shown(max_imbalance)} is out of range: "
            "the heaviest member carries at least the mean; give 1.0 or more, such as 1.15"
        )
    floor = 1.0
    if not names or not any(weights):
        plan = sticky(current, names, partitions)
    else:
        mean = Fraction(sum(weights), len(names))
        floor = float(lowest_top(weights, len(names)) / mean)
        plan = _spread_plan(current, names, weights, cap=math.floor(Fraction(max_imbalance) * mean))
    return WeightedPlan(
        plan=plan,
        moves=tuple(plan.moves_from(current)),
        imbalance_before=_imbalance(current, weights),
        imbalance_after=_imbalance(plan, weights),
        max_imbalance=max_imbalance,
        floor=floor,
        unmeasured=tuple(partition for partition in range(partitions) if partition not in loads),
    )


def _spread_plan(current: Plan, names: list[str], weights: list[int], cap: int) -> Plan:
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    homes = [numbers.get(current.owner_of(partition), -1) for partition in range(len(weights))]
    owned: dict[str, list[int]] = {name: [] for name in names}
    for partition, holder in enumerate(spread_loads(weights, homes, len(names), cap)):
        owned[names[holder]].append(partition)
    return Plan(owned)


def _imbalance(plan: Plan, weights: list[int]) -> float:
    sums = [sum(weights[partition] for partition in owned) for _, owned in plan.shares]
    return max(sums) * len(sums) / sum(sums) if any(sums) else 1.0


def _exact_loads(loads: Mapping[int, float], partitions: int) -> list[int]:
    """Loads as multiples of the largest unit they have in common, so that nothing is ever rounded."""
    for partition, load in loads.items():
        check_whole(partition, f"partition {shown(partition)} in the loads")
        if not 0 <= partition < partitions:
            raise InvalidInput(f"partition {partition} in the loads is out of range: give 0 to {partitions - 1}")
        if not _is_number(load) or not 0 <= load < math.inf:
            raise InvalidInput(
                f"load {shown(load)} of partition {partition} is not a load: give a finite number, 0 or more"
            )
    ratios = [loads.get(partition, 0).as_integer_ratio() for partition in range(partitions)]
    fine = math.lcm(*(below for _, below in ratios))
    weights = [above * (fine // below) for above, below in ratios]
    common = math.gcd(*weights) or 1
    return [weight // common for weight in weights]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- the search ----------------------------------------------------------------------------------


def lowest_top(weights: list[int], members: int) -> int:
    """A lower bound for the largest sum of any distribution.

    It is at least the mean. And of the heaviest k x members + 1 partitions, some member holds k + 1.
    """
    falling = sorted(weights, reverse=True)
    crowded = [sum(falling[at - at // members : at + 1]) for at in range(0, len(falling), members)]
    return max([-(-sum(weights) // members), *crowded])


def spread_loads(weights: list[int], homes: list[int], members: int, cap: int) -> list[int]:
    """The holder of each partition: no member overloaded, few partitions away from home.

    `homes` are the previous holders, -1 for nobody. The cap is at least the mean, rounded down. If it cannot be met or
    no solution was found, the sums are the lowest found. Without homeless partitions the largest sum never rises. No
    member is idle while another holds two.

    >>> spread_loads([5, 5, 1, 1], homes=[0, 0, 1, 1], members=2, cap=6)
    [1, 0, 0, 1]
    """
    hot = [weight for weight in weights if weight > cap]
    others = [weight for weight in weights if weight <= cap]
    target = max(cap, lowest_top(others, members - len(hot)))
    task = _Task(weights, homes, members, target, target - sum(weights) // members, max(weights))

    attempts = [_from_homes(task, loosen=False), _from_homes(task, loosen=True)]
    if all(attempt.overload for attempt in attempts):
        attempts.append(_afresh(task))
    goal = max(target, task.hottest)
    best = min(attempts, key=lambda tried: (max(tried.top, goal), tried.overload, tried.away))
    return best.holders


@dataclass(frozen=True, slots=True)
class _Task:
    weights: list[int]
    homes: list[int]
    members: int
    target: int
    """What a member without a hot partition may carry: the cap, or more if the cap cannot be met."""
    slack: int
    """What a member with a partition above the target may carry in addition."""
    hottest: int


class _Spread:
    """Who holds what at one point of the search. `held` are pairs of load and partition, ascending."""

    def __init__(self, task: _Task) -> None:
        self.task = task
        self.holders = [-1] * len(task.weights)
        self.sums = [0] * task.members
        self.held: list[list[tuple[int, int]]] = [[] for _ in range(task.members)]

    @property
    def top(self) -> int:
        return max(self.sums)

    @property
    def away(self) -> int:
        return sum(home != holder for home, holder in zip(self.task.homes, self.holders, strict=True))

    @property
    def overload(self) -> int:
        """The largest sum of an overloaded member, 0 if there is none."""
        return max((self.sums[member] for member in self.overloaded()), default=0)

    def overloaded(self) -> list[int]:
        """Members that carry too much, the heaviest first."""
        found = [member for member, carried in enumerate(self.sums) if carried > self.limit(member)]
        return sorted(found, key=lambda member: (-self.sums[member], member))

    def limit(self, member: int, extra: int = 0) -> int:
        """What a member may carry, given its heaviest partition or the `extra` one that it would hold."""
        heaviest = max(extra, self.held[member][-1][0]) if self.held[member] else extra
        if heaviest <= self.task.target:
            return self.task.target
        return min(heaviest + self.task.slack, self.task.hottest)

    def give(self, partition: int, member: int) -> None:
        entry = (self.task.weights[partition], partition)
        if (holder := self.holders[partition]) >= 0:
            del self.held[holder][bisect_left(self.held[holder], entry)]
            self.sums[holder] -= entry[0]
        self.holders[partition] = member
        if member >= 0:
            insort(self.held[member], entry)
            self.sums[member] += entry[0]


# ---- attempts ---------------------------------------------------------------------------------------


def _from_homes(task: _Task, *, loosen: bool) -> _Spread:
    """Start with everything at home, place loose partitions, and move partitions until nobody is overloaded."""
    spread = _Spread(task)
    for partition, home in enumerate(task.homes):
        spread.give(partition, home)
    if loosen:
        _loosen(spread)
    _place_loose(spread)
    _seat_idle(spread)
    _level(spread)
    _send_home(spread)
    return spread


def _afresh(task: _Task) -> _Spread:
    """Build piles as if there were no homes, then give each to the member it has most in common with.

    Heaviest first, each to the lightest pile: that is within 4/3 of the lowest possible top.
    """
    piles = _Spread(task)
    _place_loose(piles)
    common = Counter(zip(piles.holders, task.homes, strict=True))
    member_of: dict[int, int] = {}
    without_pile = set(range(task.members))
    for pile, home in sorted(common, key=lambda pair: (-common[pair], pair)):
        if home in without_pile and pile not in member_of:
            member_of[pile] = home
            without_pile.remove(home)
    nameless = [pile for pile in range(task.members) if pile not in member_of]
    member_of.update(zip(nameless, sorted(without_pile), strict=True))

    spread = _Spread(task)
    for partition, pile in enumerate(piles.holders):
        spread.give(partition, member_of[pile])
    _send_home(spread)
    return spread


# ---- steps ------------------------------------------------------------------------------------------


def _loosen(spread: _Spread) -> None:
    """Take as few partitions as necessary from overloaded members, and of those the lightest."""
    for member in spread.overloaded():
        held = spread.held[member]
        while (excess := spread.sums[member] - spread.limit(member)) > 0:
            at = min(bisect_left(held, (excess, -1)), len(held) - 1)
            spread.give(held[at][1], -1)


def _place_loose(spread: _Spread) -> None:
    """Assign partitions without a holder, the heaviest first, each to the lightest member."""
    loose = [(-spread.task.weights[at], at) for at, holder in enumerate(spread.holders) if holder < 0]
    lightest = [(spread.sums[member], len(held), member) for member, held in enumerate(spread.held)]
    heapq.heapify(lightest)
    for _, partition in sorted(loose):
        member = lightest[0][2]
        spread.give(partition, member)
        heapq.heapreplace(lightest, (spread.sums[member], len(spread.held[member]), member))


def _seat_idle(spread: _Spread) -> None:
    """While a member is idle and another holds two, give it a share of the heaviest such member."""
    for idle in [member for member, held in enumerate(spread.held) if not held]:
        crowded = [member for member, held in enumerate(spread.held) if len(held) > 1]
        if not crowded:
            return
        giver = max(crowded, key=lambda member: (spread.sums[member], len(spread.held[member]), -member))
        whole = spread.sums[giver]
        _, shared = min(spread.held[giver], key=lambda entry: (max(entry[0], whole - entry[0]), entry))
        spread.give(shared, idle)


def _level(spread: _Spread) -> None:
    """Move or swap between the heaviest overloaded member and another while that makes the heavier lighter.

    The number of searches for swaps is limited: they cost most, and gain less and less if the target is out of reach.
    """
    searches_left = 2 * spread.task.members
    while overloaded := spread.overloaded():
        giver = overloaded[0]
        step: tuple[int, int, int | None] | None = _best_move(spread, giver)
        if step is None and searches_left:
            searches_left -= 1
            step = _best_exchange(spread, giver)
        if step is None:
            return
        taker, given, taken = step
        spread.give(given, taker)
        if taken is not None:
            spread.give(taken, giver)


def _best_move(spread: _Spread, giver: int) -> tuple[int, int, None] | None:
    """The move to the lightest member that does not overload it and leaves both most equal."""
    taker = min(range(len(spread.sums)), key=lambda member: (spread.sums[member], member))
    carried = spread.sums[taker]
    gap = spread.sums[giver] - carried
    fitting = [
        (abs(2 * weight - gap), partition)
        for weight, partition in spread.held[giver]
        if 0 < weight < gap and carried + weight <= spread.limit(taker, weight)
    ]
    return (taker, min(fitting)[1], None) if fitting else None


def _best_exchange(spread: _Spread, giver: int) -> tuple[int, int, int | None] | None:
    """The move or swap, with any member, that leaves the heavier of the two lightest."""
    best: tuple[int, bool, int, int, int] | None = None
    for taker, theirs in enumerate(spread.held):
        gap = spread.sums[giver] - spread.sums[taker]
        for weight, given in spread.held[giver]:
            at = bisect_left(theirs, (weight - gap // 2, -1))
            for lighter, taken in [(0, -1), *theirs[max(at - 1, 0) : at + 1]]:
                shift = weight - lighter
                if 0 < shift < gap:
                    top = max(spread.sums[giver] - shift, spread.sums[taker] + shift)
                    found = (top, taken >= 0, taker, given, taken)
                    best = found if best is None else min(best, found)
    if best is None:
        return None
    _, is_swap, taker, given, taken = best
    return taker, given, taken if is_swap else None


def _send_home(spread: _Spread) -> None:
    """Undo moves that turned out to be unnecessary, the lightest first."""
    reached = spread.overload
    for weight, partition in sorted(zip(spread.task.weights, range(len(spread.holders)), strict=True)):
        home, holder = spread.task.homes[partition], spread.holders[partition]
        if home in (-1, holder) or spread.sums[home] + weight > max(reached, spread.limit(home, weight)):
            continue
        if len(spread.held[holder]) > 1 or not spread.held[home]:
            spread.give(partition, home)
