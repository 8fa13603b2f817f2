"""The pace of an owner: when its next heartbeat is due, and whether it keeps up with its partition.

Owns: these two rules. Uses no clock, no log and no randomness: the caller passes what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from keylane.errors import InvalidInput

SAMPLES = 10
BAD_CYCLES = 3
_EARLIEST = 0.6
_LATEST = 0.9
_CYCLES_AHEAD = 2


def heartbeat_delay_s(interval_s: float, fraction: float) -> float:
    """Seconds from one heartbeat to the next: 0.6 to 0.9 of the interval, by a `fraction` from 0 to 1.

    Below one interval, so that the owner is still fresh when the record is in the log; spread, so that many owners
    that started together do not always write together.

    >>> heartbeat_delay_s(10.0, 0.5)
    7.5
    """
    if not 0 <= fraction <= 1:
        raise InvalidInput(f"fraction is {fraction!r}: give a number from 0 to 1")
    return interval_s * (_EARLIEST + (_LATEST - _EARLIEST) * fraction)


@dataclass(frozen=True, slots=True)
class Pace:
    """How an owner keeps up: up to ten samples of its position and of the partition's end, one for each heartbeat.

    A cycle is bad if the owner will not have caught up two cycles from now, and is not faster than the inflow. After
    three bad ones in a row it should release: another consumer may have more capacity.

    >>> pace = Pace()
    >>> for position, end in [(0, 100), (10, 200), (20, 300), (30, 400)]:
    ...     pace = pace.sampled(position, end)
    >>> pace.is_behind
    True
    """

    samples: tuple[tuple[int, int], ...] = ()
    bad_cycles: int = 0

    def sampled(self, position: int, end: int) -> Pace:
        """Add the sample of one heartbeat: the next message to read, and the end of the partition."""
        samples = (*self.samples, (position, end))[-SAMPLES:]
        later = Pace(samples)
        if len(samples) == 1:
            return later  # one sample has no velocity
        will_catch_up = position + _CYCLES_AHEAD * later.velocity >= end
        if will_catch_up or later.velocity > later.inflow:
            return later
        return Pace(samples, self.bad_cycles + 1)

    @property
    def is_behind(self) -> bool:
        return self.bad_cycles >= BAD_CYCLES

    @property
    def velocity(self) -> float:
        """Messages that the owner advances by, per cycle."""
        return self._per_cycle(0)

    @property
    def inflow(self) -> float:
        """Messages that arrive, per cycle."""
        return self._per_cycle(1)

    def _per_cycle(self, which: int) -> float:
        if len(self.samples) < 2:
            return 0.0
        return (self.samples[-1][which] - self.samples[0][which]) / (len(self.samples) - 1)
