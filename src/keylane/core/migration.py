"""Moving the partitions of a stream from consumers of any program, one for each partition, to a fleet: the rules.

Owns: which consumer is a partition's old one, what stands in the way, and when figures are bad enough to go back. Never
asks a server.

| state | what is true | what may follow |
| --- | --- | --- |
| none | the old consumers deliver | shadow (limits only), switch |
| shadow | the fleet's consumers exist and are paused; workers can join, and get nothing | switch, rollback |
| dual | both deliver, and both sides skip what the other has handled | switch, rollback |
| switching | the old consumers are paused, one partition after the other is handed over | switch, rollback |
| switched | the fleet delivers; the old consumers are paused, or on a work queue deleted | rollback, finish |
| rolled back | the old consumers deliver, and the fleet's are gone | shadow, switch |
| finished | the fleet delivers; the old consumers are gone | |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from keylane.core.fleet_partitions import Partition


class MigrationState(StrEnum):
    NONE = "none"
    SHADOW = "shadow"
    DUAL = "dual"
    SWITCHING = "switching"
    SWITCHED = "switched"
    ROLLED_BACK = "rolled back"
    FINISHED = "finished"


_BEFORE = (MigrationState.NONE, MigrationState.ROLLED_BACK)
STEPS: Mapping[str, tuple[MigrationState, ...]] = {
    "shadow": _BEFORE,
    "dual": (*_BEFORE, MigrationState.SHADOW),
    "switch": (*_BEFORE, MigrationState.SHADOW, MigrationState.DUAL, MigrationState.SWITCHING),
    "rollback": (MigrationState.SHADOW, MigrationState.DUAL, MigrationState.SWITCHING, MigrationState.SWITCHED),
    "finish": (MigrationState.SWITCHED,),
}
"""From which states each step may be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldConsumer:
    """A consumer that may be a partition's old one."""

    name: str
    filters: tuple[str, ...]
    acks: str
    is_push: bool


@dataclass(frozen=True, slots=True)
class ConsumerMatch:
    """Which consumer is whose, and what stands in the way of a migration."""

    old: Mapping[str, str]
    """Partition -> consumer."""
    obstacles: tuple[str, ...]


def match_consumers(partitions: Iterable[Partition], found: Iterable[OldConsumer], fleet_prefix: str) -> ConsumerMatch:
    """The old consumer of each partition is the one whose only filter is the partition's.

    `fleet_prefix`: what the names of the fleet's own consumers begin with.
    """
    by_filter: dict[str, list[OldConsumer]] = {}
    for one in found:
        if not one.name.startswith(fleet_prefix) and len(one.filters) == 1:
            by_filter.setdefault(one.filters[0], []).append(one)
    old: dict[str, str] = {}
    obstacles: list[str] = []
    lacking: list[str] = []
    for partition in partitions:
        mine = by_filter.get(partition.filter, [])
        if not mine:
            lacking.append(partition.id)
            continue
        if len(mine) > 1:
            names = ", ".join(sorted(one.name for one in mine))
            obstacles.append(f"partition {partition.id} has several consumers ({names}): name the ones to replace")
            continue
        [one] = mine
        if one.is_push:
            obstacles.append(f"consumer {one.name!r} is a push consumer: its position cannot be handed over")
        elif one.acks != "explicit":
            obstacles.append(f"consumer {one.name!r} has ack policy {one.acks}: what it has handled is not known")
        else:
            old[partition.id] = one.name
    if lacking:
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        obstacles.append(
            f"no consumer has the filter of partition {shown} alone: it would begin with all that is stored"
        )
    return ConsumerMatch(old, tuple(obstacles))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """What the fleet must keep after a switch: figures of a window, and how many bad ones in a row are too many."""

    redelivered: float = 0.03
    """Redeliveries by deliveries."""
    oldest_s: float = 60.0
    """The age of the oldest message that is not handled."""
    windows: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceWindow:
    """What was seen in one window. `oldest_s` None: nothing waits."""

    deliveries: int
    redelivered: int
    oldest_s: float | None

    def breach(self, level: ServiceLevel) -> str | None:
        """What is worse than the service level, in words; None: nothing."""
        ratio = self.redelivered / self.deliveries if self.deliveries else 0.0
        if ratio > level.redelivered:
            return f"{ratio:.1%} of the deliveries were redeliveries, {level.redelivered:.1%} are allowed"
        if self.oldest_s is not None and self.oldest_s > level.oldest_s:
            return f"the oldest message waits for {self.oldest_s:.1f} s, {level.oldest_s:g} s are allowed"
        return None


def must_roll_back(windows: Sequence[ServiceWindow], level: ServiceLevel) -> str | None:
    """Why to go back: the last `level.windows` windows were all bad; None: they were not.

    >>> bad = ServiceWindow(deliveries=100, redelivered=50, oldest_s=None)
    >>> must_roll_back([bad, bad], ServiceLevel(windows=3)) is None
    True
    """
    last = [one.breach(level) for one in windows[-level.windows :]]
    if len(last) < level.windows or None in last:
        return None
    return f"{last[-1]}, for {level.windows} windows in a row"
