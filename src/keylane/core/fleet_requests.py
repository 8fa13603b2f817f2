"""The requests that a fleet worker has made of its store and that are not answered yet.

Owns: one write at a time for each key, one read at a time for each set of keys, and the actions of the present step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from keylane.core.fleet_events import FleetAction, ReadRecords, WriteRecord
from keylane.core.fleet_records import FleetRecord, LeaseState, WorkerLease, key_of, worker_key
from keylane.core.fleet_view import FleetView, Sighting


class PendingWrite(NamedTuple):
    """A write without an answer."""

    record: FleetRecord
    revision: int
    """What it expects."""
    sent_at: float
    above: int
    """The store gave this revision before: another write gets a higher one, unless the store went back."""
    losses: int
    """How often the store had gone back by then. If it has again since, an answer says nothing of it as it is now."""


@dataclass(slots=True)
class StoreRequests:
    """Collects the actions of a step."""

    view: FleetView
    actions: list[FleetAction] = field(default_factory=list)
    writes: dict[str, PendingWrite] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)

    def do(self, action: FleetAction) -> None:
        self.actions.append(action)

    def is_writing(self, key: str) -> bool:
        return key in self.writes

    def write(self, record: FleetRecord, revision: int, now: float) -> None:
        key = key_of(record)
        assert key not in self.writes, f"{key} is being written"
        self.writes[key] = PendingWrite(record, revision, now, self.view.highest_revision, self.view.losses)
        self.do(WriteRecord(key, revision, record))

    def expire(self, worker: int, seen: Sighting, now: float) -> None:
        """End a lease that was seen unchanged for lease_s. If its holder has renewed it meanwhile, this fails."""
        if isinstance(seen.lease, WorkerLease) and not self.is_writing(worker_key(worker)):
            ended_ms = self.view.wall_ms(now)
            self.write(replace(seen.lease, state=LeaseState.EXPIRED, ended_ms=ended_ms), seen.revision, now)

    def is_outdated(self, key: str) -> bool:
        """Whether the store went back since this key was written."""
        return key in self.writes and self.writes[key].losses != self.view.losses

    def answered(self, key: str) -> PendingWrite | None:
        return self.writes.pop(key, None)

    def read(self, *keys: str) -> None:
        """Read these keys. What is being read already is read once more after that: its answer may be older."""
        fresh = tuple(key for key in dict.fromkeys(keys) if key not in self.reads)
        self.again.update(key for key in keys if key in self.reads)
        if fresh:
            self.reads.update(fresh)
            self.do(ReadRecords(fresh))

    def look(self, *keys: str) -> None:
        """The same without the second read."""
        self.read(*(key for key in keys if key not in self.reads))

    def read_ended(self, asked: tuple[str, ...]) -> None:
        self.reads.difference_update(asked)
        if again := self.again.intersection(asked):
            self.again -= again
            self.read(*sorted(again))

    def take(self) -> list[FleetAction]:
        actions, self.actions = self.actions, []
        return actions
