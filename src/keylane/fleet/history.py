"""The last assignments of a fleet: when and why each was written, and what it moved."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from keylane.core.fleet_records import HISTORY, HistoryEntry, from_json
from keylane.fleet.admin import required_spec
from keylane.fleet.store import FLEET_BUCKET
from keylane.jetstream import Bucket, Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedPartitions:
    """Partitions that moved together. No worker before: they are new; none after: they wait, or are gone."""

    before: str | None
    after: str | None
    partitions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAssignment:
    """An assignment that the leader wrote."""

    at: datetime
    """By the clock of the leader."""
    epoch: int
    version: int
    cause: str
    """`start`, `emergency`, `drain`, `partitions`, `scale`, `restore` or `leader` (a new one, no change)."""
    reason: str
    """In words: `worker 3 left`."""
    moves: tuple[MovedPartitions, ...]


async def history(connection: Connection, stream: str, fleet: str) -> list[PastAssignment]:
    """The last assignments of a fleet, the oldest first; 100 at most. One is missing if its leader died with it."""
    spec = await required_spec(connection, stream, fleet)
    prefix = f"{stream}.{fleet}."
    found = await Bucket(connection, FLEET_BUCKET).get_matching(f"{prefix}{HISTORY}")
    records = [from_json(one.key.removeprefix(prefix), one.value) for one in found if one.value is not None]
    entries = [one for one in records if isinstance(one, HistoryEntry)]

    def name(worker: int | None) -> str | None:
        return f"{spec.prefix}-{worker}" if worker is not None else None

    return [
        PastAssignment(
            at=datetime.fromtimestamp(one.at_ms / 1000, UTC),
            epoch=one.epoch,
            version=one.version,
            cause=one.cause,
            reason=one.reason,
            moves=tuple(
                MovedPartitions(before=name(move.before), after=name(move.after), partitions=move.partitions)
                for move in one.moves
            ),
        )
        for one in sorted(entries, key=lambda one: one.rank)
    ]
