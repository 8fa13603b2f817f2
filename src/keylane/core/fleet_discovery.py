"""Which of the subjects that listings of a stream have shown are partitions now.

Owns: how long a subject that is not listed any more remains a partition. Never asks a server.

A subject is a partition as soon as one listing has it. It stays one until several listings in a row, over `KEEP_S`,
have lacked it: a listing may be cut short, and the subject of a work queue is gone whenever all its messages are acked.
Nothing is lost if it comes back: its consumer and position are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

KEEP_S = 600.0
_FEWEST_LOOKS = 3


@dataclass(slots=True)
class SubjectMemory:
    """The filters of partitions, and since when and how often listings have lacked them."""

    missing: dict[str, tuple[float, int] | None] = field(default_factory=dict)

    def know(self, filters: Iterable[str]) -> None:
        """Partitions that the fleet has already."""
        for one in filters:
            self.missing.setdefault(one, None)

    def look(self, listed: Iterable[str], now_s: float) -> frozenset[str]:
        """What is a partition after a listing."""
        present = set(listed)
        for one in present:
            self.missing[one] = None
        for one in self.missing.keys() - present:
            since_s, looks = self.missing[one] or (now_s, 0)
            self.missing[one] = (since_s, looks + 1)
            if looks + 1 >= _FEWEST_LOOKS and now_s - since_s >= KEEP_S:
                del self.missing[one]
        return frozenset(self.missing)
