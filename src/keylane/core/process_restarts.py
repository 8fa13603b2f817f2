"""When a process that ended by itself is started again, and when its ends are a crash loop.

A process that was at work for long is started again at once. One that ends soon after its start waits: the pause
doubles with every such end in a row. The third in a row is a crash loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

STABLE_S = 30.0
"""A process that was at work for this long has not failed at its start."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
LOOP_AFTER = 3


class Restart(NamedTuple):
    """What to do after an end."""

    pause_s: float
    is_crash_loop: bool


@dataclass(slots=True)
class Restarts:
    """The ends of one process and of those that replaced it."""

    failures: int = 0
    """Ends soon after the start, in a row."""

    def ended(self, at_work_s: float) -> Restart:
        """It was at work for so long; 0 if it never was.

        >>> restarts = Restarts()
        >>> restarts.ended(0.0), restarts.ended(3600.0)
        (Restart(pause_s=0.2, is_crash_loop=False), Restart(pause_s=0.0, is_crash_loop=False))
        """
        if at_work_s >= STABLE_S:
            self.failures = 0
            return Restart(0.0, False)
        self.failures += 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.failures - 1, 20))
        return Restart(pause_s, self.failures >= LOOP_AFTER)
