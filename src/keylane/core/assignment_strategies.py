"""Which worker of a fleet handles which partition: four strategies.

Owns: `assign`, from partitions, workers and the assignment before to the next one. Never decides when to assign, never
stores anything, and knows a worker only while it lives.

- `consistent` (the default): consistent hashing with bounded load. A hash chooses among the workers that have room, so
  a list of workers alone gives nearly the same assignment again. Nobody carries more than 1.1 times its share.
- `weighted`: the heaviest partitions first, each to the lightest worker. The same bound, and more even shares.
- `sticky`: counts partitions, not weights. Sizes differ by at most one, and the fewest partitions move.
- `round_robin`: dealt in turn, whatever was before and whatever a worker can carry. It moves nearly everything.

The first three keep every partition where it is, unless its worker is gone, has not its label, or carries too much. A
worker that is new gets its share from those who carry most: nothing moves between workers that stay. A partition
goes home to a worker that comes back (`homes`).

Labels: a partition with a label goes only to workers that have it; others go to any worker. While no worker has the
label the partition waits, until the caller names the label as spilled. Labelled partitions are spread first, each label
over its pool; the rest then evens out what all workers carry.

`plans` and `weighted_plan` have the same ideas for groups, whose members have neither labels nor capacities, and whose
plans are stored in a form that other languages read.

The same input gives the same assignment on any machine, in any order of partitions and workers: the hash is SHA-256,
and loads are whole numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import sha256
from itertools import pairwise
from typing import Literal, get_args

from keylane.core.fleet_partitions import Partition, check_weight
from keylane.core.subjects import shown
from keylane.errors import InvalidInput

Strategy = Literal["consistent", "weighted", "sticky", "round_robin"]

_BOUND = Fraction(11, 10)
_UNIT = 1_000_000  # weights count to a millionth
_PRIME = 2**30 - 35  # the largest that keeps the arithmetic of scores in single digits of Python's integers


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker that may be given partitions. One with twice the capacity of another carries twice as much."""

    id: int
    """The number in `<prefix>-<n>`."""
    labels: frozenset[str] = frozenset()
    capacity: float = 1.0
    instance: str = ""
    """Which run of a process holds the id."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who handles what, and who was there to be chosen."""

    owners: Mapping[str, int]
    """The worker of every partition, by partition id."""
    workers: tuple[int, ...]
    """All that were considered, also those that got nothing."""
    waiting: tuple[str, ...] = ()
    """Partitions without a worker: nobody has their label, or there is nobody at all."""

    def partitions_of(self, worker: int) -> tuple[str, ...]:
        return tuple(partition for partition, owner in self.owners.items() if owner == worker)


@dataclass(frozen=True, slots=True)
class AssignmentChange:
    """What an assignment changes, and how even it is."""

    moved: int
    """Partitions that had another worker before."""
    moved_weight: float
    """Their share of the weight of all partitions, 0 to 1."""
    between_staying: int
    """Those that moved from a worker that stays to a worker that was there before."""
    imbalance: float
    """The largest load for its capacity, divided by the mean; 1.0 is even. In weights."""


def assign(
    partitions: Iterable[Partition],
    workers: Iterable[LiveWorker],
    previous: Assignment | None = None,
    *,
    strategy: Strategy = "consistent",
    homes: Mapping[str, int] | None = None,
    spilled: Collection[str] = (),
) -> Assignment:
    """The assignment for these partitions and workers.

    `homes`: by partition id, the worker that had it when that worker left. If it is back the partition goes there.
    `spilled`: labels whose partitions go to any worker as long as no worker has the label.

    >>> from keylane.core.fleet_partitions import hashed
    >>> two = assign(hashed(4, "orders.*").resolve().partitions, [LiveWorker(0), LiveWorker(1)])
    >>> two.owners
    {'0': 0, '1': 0, '2': 1, '3': 1}
    """
    if strategy not in get_args(Strategy):
        raise InvalidInput(f"strategy {shown(strategy)} is none: use one of {', '.join(get_args(Strategy))}")
    wanted = _sorted_partitions(partitions)
    living = _sorted_workers(workers)
    layers, waiting = _layers(wanted, living, spilled)
    owners: dict[str, int] = {}
    if strategy == "round_robin":
        for layer, pool in layers:
            owners |= {one.id: living[pool[turn % len(pool)]].id for turn, one in enumerate(layer)}
    else:
        fleet = _Fleet(living, previous, homes or {}, strategy)
        for layer, pool in layers:
            owners |= _spread(fleet, layer, pool)
    in_order = {one.id: owners[one.id] for one in wanted if one.id in owners}
    return Assignment(in_order, tuple(worker.id for worker in living), tuple(waiting))


def compare_assignments(
    before: Assignment | None, after: Assignment, partitions: Iterable[Partition], workers: Iterable[LiveWorker]
) -> AssignmentChange:
    """What changes from one assignment to the next."""
    had = before.owners if before else {}
    staying = frozenset(before.workers if before else ()) & frozenset(after.workers)
    weights = {one.id: _weight(one) for one in partitions}
    moved = [one for one, owner in after.owners.items() if one in had and had[one] != owner]
    between = sum(had[one] in staying and after.owners[one] in staying for one in moved)
    loads = dict.fromkeys(after.workers, 0)
    for one, owner in after.owners.items():
        loads[owner] += weights[one]
    capacities = {worker.id: _capacity(worker) for worker in workers}
    relative = [Fraction(load, capacities[worker]) for worker, load in loads.items()]
    mean = Fraction(sum(loads.values()), sum(capacities.values())) if loads else Fraction(0)
    return AssignmentChange(
        moved=len(moved),
        moved_weight=sum(weights[one] for one in moved) / (sum(weights.values()) or 1),
        between_staying=between,
        imbalance=float(max(relative) / mean) if mean else 1.0,
    )


# ---- input ------------------------------------------------------------------------------------------


def _sorted_partitions(partitions: Iterable[Partition]) -> list[Partition]:
    found = sorted(partitions, key=lambda one: (len(one.id), one.id))  # 2 before 10
    for one, following in pairwise(found):
        if one.id == following.id:
            raise InvalidInput(f"partition {shown(one.id)} is given twice: give each once")
    for one in found:
        check_weight(one.weight, f"partition {shown(one.id)}")
    return found


def _sorted_workers(workers: Iterable[LiveWorker]) -> list[LiveWorker]:
    found = sorted(workers, key=lambda one: one.id)
    for one, following in pairwise(found):
        if one.id == following.id:
            raise InvalidInput(f"worker {one.id} is given twice: give each once")
    for one in found:
        if check_weight(one.capacity, f"worker {one.id}") * _UNIT < 1:
            raise InvalidInput(f"capacity {shown(one.capacity)} of worker {one.id} is too small: give 1.0")
    return found


def _layers(
    partitions: list[Partition], workers: list[LiveWorker], spilled: Collection[str]
) -> tuple[list[tuple[list[Partition], list[int]]], list[str]]:
    """Partitions with the numbers of the workers that may have them, the labelled ones first; and those that wait."""
    labels = sorted({one.label for one in partitions if one.label is not None})
    pools = {label: [at for at, worker in enumerate(workers) if label in worker.labels] for label in labels}
    layers: dict[str | None, list[Partition]] = {label: [] for label in labels if pools[label]}
    layers[None] = []
    waiting = []
    for one in partitions:
        if one.label in layers:
            layers[one.label].append(one)
        elif workers and one.label in spilled:
            layers[None].append(one)
        else:
            waiting.append(one.id)
    if not workers:
        return [], [one.id for one in partitions]
    everybody = list(range(len(workers)))
    return [(layer, everybody if label is None else pools[label]) for label, layer in layers.items() if layer], waiting


def _weight(partition: Partition) -> int:
    return max(1, round(partition.weight * _UNIT))  # what weighs nothing still needs somebody


def _capacity(worker: LiveWorker) -> int:
    return round(worker.capacity * _UNIT)


def _hash(name: str) -> int:
    return int.from_bytes(sha256(name.encode()).digest()[:8]) % (_PRIME - 1) + 1


# ---- spreading --------------------------------------------------------------------------------------


class _Fleet:
    """The workers by number, with what they carry so far."""

    def __init__(
        self, workers: list[LiveWorker], previous: Assignment | None, homes: Mapping[str, int], strategy: Strategy
    ) -> None:
        self.ids = [worker.id for worker in workers]
        self.numbers = {worker: at for at, worker in enumerate(self.ids)}
        self.capacities = [_capacity(worker) for worker in workers]
        self.is_uniform = len(set(self.capacities)) == 1
        self.hashes = [_hash(f"worker {worker}") for worker in self.ids]
        self.loads = [0] * len(workers)
        self.had = previous.owners if previous else {}
        self.homes = homes
        self.strategy = strategy
        known = frozenset(previous.workers if previous else ())
        self.new = {at for at, worker in enumerate(self.ids) if worker not in known}


@dataclass(slots=True)
class _Layer:
    """One search: partitions by number, and the workers that may have them."""

    fleet: _Fleet
    pool: list[int]
    weights: list[int]
    hashes: list[int]
    holders: list[int]
    levels: dict[int, Fraction] = field(default_factory=dict)
    """What each worker would carry if partitions could be split, and besides what it has of other layers."""
    caps: dict[int, int] = field(default_factory=dict)
    """The most that each should carry."""
    held: dict[int, set[int]] = field(default_factory=dict)
    guests: set[int] = field(default_factory=set)
    """Partitions that have a home and are not there: they are the first to be moved on."""

    def give(self, partition: int, worker: int) -> None:
        holder, weight = self.holders[partition], self.weights[partition]
        if holder >= 0:
            self.held[holder].remove(partition)
            self.fleet.loads[holder] -= weight
        self.holders[partition] = worker
        if worker >= 0:
            self.held[worker].add(partition)
            self.fleet.loads[worker] += weight

    def score(self, partition: int, worker: int) -> int:
        """How much the hash prefers a worker for a partition: rendezvous hashing, in arithmetic modulo a prime."""
        return self.hashes[partition] * self.fleet.hashes[worker] % _PRIME

    def lightest(self, weight: int) -> int:
        """The worker that would carry least for its capacity with so much more."""
        loads, capacities = self.fleet.loads, self.fleet.capacities
        if self.fleet.is_uniform:
            return min(self.pool, key=loads.__getitem__)
        return min(self.pool, key=lambda worker: (loads[worker] + weight) / capacities[worker])


def _spread(fleet: _Fleet, partitions: list[Partition], pool: list[int]) -> dict[str, int]:
    counts = fleet.strategy == "sticky"
    layer = _Layer(
        fleet,
        pool,
        weights=[_UNIT if counts else _weight(one) for one in partitions],
        hashes=[_hash(one.id) for one in partitions],
        holders=[-1] * len(partitions),
        held={worker: set() for worker in pool},
    )
    layer.levels = _levels(fleet, pool, sum(layer.weights))
    mean = sum(layer.weights) // len(layer.weights)
    for worker, level in layer.levels.items():
        least = math.ceil(level + mean) - 1  # where shares are small, a whole partition more
        layer.caps[worker] = least // _UNIT * _UNIT if counts else max(math.floor(level * _BOUND), least)
    _keep(layer, partitions)
    _send_home(layer, partitions)
    loose = [at for at, holder in enumerate(layer.holders) if holder < 0]
    released = _release(layer, sum(layer.weights[at] for at in loose))
    if fleet.strategy == "consistent":
        _place_by_hash(layer, loose, pool)
        _place_by_hash(layer, released, [worker for worker in pool if worker in fleet.new] or pool)
    else:
        for at in sorted(loose + released, key=lambda at: (-layer.weights[at], at)):
            layer.give(at, layer.lightest(layer.weights[at]))
    _relieve(layer)
    return {one.id: fleet.ids[holder] for one, holder in zip(partitions, layer.holders, strict=True)}


def _levels(fleet: _Fleet, pool: list[int], weight: int) -> dict[int, Fraction]:
    """What each carries when the weight is poured over the pool, as water is: those that carry much get nothing."""
    by_load = sorted(pool, key=lambda worker: (fleet.loads[worker] / fleet.capacities[worker], worker))
    carried, capacity, height = weight, 0, Fraction(0)
    for place, worker in enumerate(by_load):
        carried += fleet.loads[worker]
        capacity += fleet.capacities[worker]
        height = Fraction(carried, capacity)
        if place + 1 == len(by_load):
            break
        following = by_load[place + 1]
        if height <= Fraction(fleet.loads[following], fleet.capacities[following]):
            break
    return {worker: max(height * fleet.capacities[worker], Fraction(fleet.loads[worker])) for worker in pool}


def _keep(layer: _Layer, partitions: list[Partition]) -> None:
    """Every partition stays where it was, if its worker lives and may have it."""
    for at, one in enumerate(partitions):
        holder = layer.fleet.numbers.get(layer.fleet.had.get(one.id, -1), -1)
        if holder in layer.held:
            layer.give(at, holder)


def _send_home(layer: _Layer, partitions: list[Partition]) -> None:
    """Partitions go back to the worker that had them before it left, as far as it has room."""
    for at, one in enumerate(partitions):
        if one.id not in layer.fleet.homes:
            continue
        home = layer.fleet.numbers.get(layer.fleet.homes[one.id], -1)
        if home == layer.holders[at]:
            continue
        has_room = home in layer.held and (
            layer.fleet.loads[home] + layer.weights[at] <= layer.caps[home] or not layer.held[home]
        )
        if has_room:
            layer.give(at, home)
            layer.fleet.new.discard(home)  # it has what it had
        else:
            layer.guests.add(at)


def _release(layer: _Layer, loose: int) -> list[int]:
    """Take partitions from workers that stay, so that new ones get their share; `loose` counts towards it."""
    fleet = layer.fleet
    new = [worker for worker in layer.pool if worker in fleet.new]
    staying = [worker for worker in layer.pool if worker not in fleet.new]
    needed = sum(max(0, math.floor(layer.levels[worker]) - fleet.loads[worker]) for worker in new) - loose
    if needed <= 0 or not staying:
        return []
    hashes = [fleet.hashes[worker] for worker in new]
    scores = [max([own * one % _PRIME for one in hashes]) for own in layer.hashes]
    released: list[int] = []
    if fleet.strategy == "consistent":
        released += _over_cap(layer, staying, scores)
        preferred = [at for at in range(len(scores)) if _is_held_with_less(layer, at, scores[at])]
        needed -= sum(layer.weights[at] for at in released)
        for at in sorted(preferred, key=lambda at: (-scores[at], at)):
            if layer.weights[at] <= needed:
                needed -= layer.weights[at]
                layer.give(at, -1)
                released.append(at)
    return released + _from_the_highest(layer, staying, needed, scores)


def _is_held_with_less(layer: _Layer, at: int, score: int) -> bool:
    return layer.holders[at] >= 0 and layer.score(at, layer.holders[at]) < score


def _over_cap(layer: _Layer, workers: list[int], scores: list[int]) -> list[int]:
    """Bring each down to its cap: the heaviest that fit into the excess, and the lightest that ends it."""
    released = []
    for worker in workers:
        released += _excess(layer, worker, Fraction(layer.caps[worker]), scores)
        if layer.fleet.loads[worker] > layer.caps[worker] and layer.held[worker]:
            lightest = min(layer.held[worker], key=lambda at: (layer.weights[at], -scores[at], at))
            layer.give(lightest, -1)
            released.append(lightest)
    return released


def _from_the_highest(layer: _Layer, workers: list[int], needed: int, scores: list[int]) -> list[int]:
    """Take so much from those that stand highest, and nobody below its level."""
    height = _height_after(layer.fleet, workers, needed)
    released = []
    for worker in workers:
        limit = max(height * layer.fleet.capacities[worker], layer.levels[worker])
        released += _excess(layer, worker, limit, scores)
    return released


def _excess(layer: _Layer, worker: int, limit: Fraction, scores: list[int]) -> list[int]:
    """Take what a worker carries above the limit, never more: the heaviest first, then as the hash prefers others."""
    excess = layer.fleet.loads[worker] - limit
    released: list[int] = []
    if excess <= 0:
        return released
    for at in sorted(layer.held[worker], key=lambda at: (-layer.weights[at], at not in layer.guests, -scores[at], at)):
        if layer.weights[at] <= excess:
            excess -= layer.weights[at]
            layer.give(at, -1)
            released.append(at)
    return released


def _height_after(fleet: _Fleet, workers: list[int], amount: int) -> Fraction:
    """How high the highest stand when so much is taken from them: the load for a capacity of one."""
    by_load = sorted(workers, key=lambda worker: (-fleet.loads[worker] / fleet.capacities[worker], worker))
    carried, capacity, height = -amount, 0, Fraction(0)
    for place, worker in enumerate(by_load):
        carried += fleet.loads[worker]
        capacity += fleet.capacities[worker]
        height = Fraction(carried, capacity)
        if place + 1 == len(by_load):
            break
        following = by_load[place + 1]
        if height >= Fraction(fleet.loads[following], fleet.capacities[following]):
            break
    return max(height, Fraction(0))


def _place_by_hash(layer: _Layer, loose: list[int], pool: list[int]) -> None:
    """Each goes to the worker that the hash prefers among those with room; where none has any, to the lightest."""
    loads, caps = layer.fleet.loads, layer.caps
    hashes = [layer.fleet.hashes[worker] for worker in pool]
    for at in loose:
        own, weight = layer.hashes[at], layer.weights[at]
        scores = [own * one % _PRIME for one in hashes]
        chosen = pool[scores.index(max(scores))]
        if loads[chosen] + weight > caps[chosen]:
            with_room = [place for place, worker in enumerate(pool) if loads[worker] + weight <= caps[worker]]
            best = max(with_room, key=scores.__getitem__, default=-1)
            chosen = pool[best] if best >= 0 else layer.lightest(weight)
        layer.give(at, chosen)


def _relieve(layer: _Layer) -> None:
    """Move from whoever carries more than its cap while that makes the heavier of the two lighter.

    `sticky` goes on until sizes are as even as they can be.
    """
    fleet = layer.fleet
    stuck: set[int] = set()
    while True:
        giving = [worker for worker in layer.pool if layer.held[worker] and worker not in stuck]
        if fleet.strategy != "sticky":
            giving = [worker for worker in giving if fleet.loads[worker] > layer.caps[worker]]
        if not giving:
            return
        giver = max(giving, key=lambda worker: (fleet.loads[worker] / fleet.capacities[worker], -worker))
        if _give_away(layer, giver):
            stuck.clear()
        else:
            stuck.add(giver)


def _give_away(layer: _Layer, giver: int) -> bool:
    """Move one partition that helps, and more until the cap is kept; False: none helps.

    Each time the lightest that is enough, or the heaviest that helps; of equal ones what the hash prefers least here.
    """
    by_weight: dict[int, list[int]] = {}
    for at in sorted(layer.held[giver], key=lambda at: (at in layer.guests, -layer.score(at, giver), at)):
        by_weight.setdefault(layer.weights[at], []).append(at)
    weights = sorted(by_weight)
    has_moved = False
    while weights:
        excess = layer.fleet.loads[giver] - layer.caps[giver]
        helping = bisect_left(weights, True, key=lambda weight: not _helps(layer, giver, weight))
        if not helping or (has_moved and excess <= 0):
            break
        chosen = weights[min(bisect_left(weights, excess), helping - 1)]
        layer.give(by_weight[chosen].pop(), layer.lightest(chosen))
        has_moved = True
        if not by_weight[chosen]:
            weights.remove(chosen)
    return has_moved


def _helps(layer: _Layer, giver: int, weight: int) -> bool:
    """Whether somebody can take so much and still carry less than the giver does now. If so, it can take less too."""
    loads, capacities = layer.fleet.loads, layer.fleet.capacities
    taker = layer.lightest(weight)
    return (loads[taker] + weight) * capacities[giver] < loads[giver] * capacities[taker]
