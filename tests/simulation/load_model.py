"""A group under load, in simulated seconds: messages come by chance, workers handle them, start slowly, and die."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

from keylane.core.scaling import LoadObservation

START_S = 20
"""From the wish for a worker until it handles messages."""
REPLACE_S = 45
"""From a worker's death until another one has taken its place: its lease, and a restart."""
TICK_S = 5


@dataclass
class LoadModel:
    """`rate(second)`: messages a second; `capacity`: what one worker handles a second."""

    rate: Callable[[int], float]
    chance: random.Random
    partitions: int = 24
    capacity: float = 10.0
    workers: int = 2
    now_s: int = 0
    arrived: int = 0
    queues: list[deque[list[int]]] = field(default_factory=list)
    """By partition: [second, messages], oldest first."""
    starting: list[int] = field(default_factory=list)
    """When those that start are at work."""
    lag: int = 0

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.partitions)]

    @property
    def active(self) -> int:
        return self.workers - len(self.starting)

    def scale(self, wanted: int) -> None:
        """More workers start after a while; fewer are gone at once."""
        for _ in range(wanted, self.workers):
            if self.starting:
                self.starting.pop()
        self.starting += [self.now_s + START_S] * (wanted - self.workers)
        self.workers = wanted

    def kill(self, workers: int = 1) -> None:
        """Their partitions wait until others have taken their places."""
        self.starting += [self.now_s + REPLACE_S] * min(workers, self.active)

    def tick(self) -> None:
        """Let `TICK_S` pass."""
        self.now_s += TICK_S
        self.starting = [one for one in self.starting if one > self.now_s]
        new = poisson(self.chance, TICK_S * self.rate(self.now_s))
        self.arrived += new
        self.lag += new
        for partition, queue in enumerate(self.queues):
            share = new // self.partitions + (1 if partition < new % self.partitions else 0)
            if share:
                queue.append([self.now_s, share])
        for worker in range(self.active):
            self._handle(range(worker, self.partitions, self.workers))

    def _handle(self, owned: range) -> None:
        """What one worker does in a tick, the oldest messages first. A dead worker's partitions are nobody's."""
        left = int(TICK_S * self.capacity + self.chance.random())
        mine = [self.queues[one] for one in owned if self.queues[one]]
        while left and mine:
            oldest = min(mine, key=itemgetter(0))
            done = min(left, oldest[0][1])
            oldest[0][1] -= done
            left -= done
            self.lag -= done
            if not oldest[0][1]:
                oldest.popleft()
                if not oldest:
                    mine.remove(oldest)

    @property
    def lag_s(self) -> float:
        return max((self.now_s - queue[0][0] for queue in self.queues if queue), default=0)

    def observation(self) -> LoadObservation:
        return LoadObservation(
            at_s=self.now_s,
            workers=self.workers,
            active=self.active,
            partitions=self.partitions,
            lagging=sum(1 for queue in self.queues if queue),
            lag=self.lag,
            lag_s=self.lag_s,
            arrived=self.arrived,
        )


def poisson(chance: random.Random, mean: float) -> int:
    """By Knuth's product for small means, else by the normal distribution."""
    if mean > 30:
        return max(0, round(chance.gauss(mean, math.sqrt(mean))))
    end, product, found = math.exp(-mean), chance.random(), 0
    while product > end:
        product *= chance.random()
        found += 1
    return found
