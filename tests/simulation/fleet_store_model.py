"""The server of a simulated fleet: a KV bucket with compare-and-set, and pinned consumers of a partitioned stream.

Writes are linearizable; reads may be stale. The bucket can be wiped, made anew, rolled back, and made to tell less than
it has. A consumer delivers to one pinned reader, in order from the first message that is not acked.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from keylane.core.fleet_events import RecordEntry
from keylane.core.fleet_records import FleetClaim, FleetRecord

STALE_FOR = 0.8
PIN_TIMEOUT = 8.0


class SimulatedTime:
    """Seconds: what is due runs in order."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = Random(seed)  # noqa: S311
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ticket = count()

    def after(self, delay: float, do: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._ticket), do, arguments))

    def run(self, until: float, is_over: Callable[[], bool]) -> bool:
        """Whether it was over before its time."""
        while self._due and self._due[0][0] <= until:
            self.now, _, do, arguments = heapq.heappop(self._due)
            do(*arguments)
            if is_over():
                return True
        self.now = until
        return False


class StoredRecord:
    """A record with what came before it: a stale read shows that."""

    __slots__ = ("before", "entry", "written")

    def __init__(self, entry: RecordEntry, written: float, before: RecordEntry | None) -> None:
        self.entry, self.written, self.before = entry, written, before


@dataclass
class FleetBucket:
    """One KV bucket, and the history of who claimed what: the latter forgets nothing."""

    time: SimulatedTime
    records: dict[str, StoredRecord] = field(default_factory=dict)
    sequence: int = 0
    created: str = "bucket-1"
    stale_reads: bool = False
    tells_less: bool = False
    is_reachable: bool = True
    lossy_at: float = -1e9
    """When it last lost records."""
    sent_at: float = 0.0
    """When the write was sent that it takes now."""
    claims: dict[str, tuple[str, int, bool]] = field(default_factory=dict)
    """Partition -> instance, token and whether it is held: the last claim that was ever written."""
    epochs: list[int] = field(default_factory=list)
    on_write: list[Callable[[str, FleetRecord], None]] = field(default_factory=list)
    _snapshots: list[tuple[float, int, dict[str, StoredRecord]]] = field(default_factory=list)

    def put(self, key: str, revision: int, record: FleetRecord, value: bytes) -> int | None:
        """The new revision; None: a conflict."""
        present = self.records.get(key)
        if (present.entry.revision if present is not None else 0) != revision:
            return None
        self.sequence += 1
        before = present.entry if present is not None else None
        self.records[key] = StoredRecord(RecordEntry(self.sequence, value), self.time.now, before)
        if isinstance(record, FleetClaim):
            self.claims[record.partition] = (record.instance, record.token, record.held)
        for tell in self.on_write:
            tell(key, record)
        return self.sequence

    def read(self, keys: tuple[str, ...]) -> dict[str, RecordEntry]:
        found = {}
        for key in self._named(keys):
            stored = self.records.get(key)
            entry = stored.entry if stored is not None else None
            if stored is not None and self.stale_reads and self.time.now - stored.written < STALE_FOR:
                entry = stored.before if self.time.random.random() < 0.3 else entry
            if entry is not None:
                found[key] = entry
        return found

    def _named(self, keys: tuple[str, ...]) -> Iterator[str]:
        for key in keys:
            if key.endswith("*"):
                listed = [one for one in self.records if one.startswith(key[:-1])]
                yield from listed[: len(listed) // 2] if self.tells_less else listed
            elif not (self.tells_less and key.startswith("worker") and self.time.random.random() < 0.5):
                yield key

    # ---- lies --------------------------------------------------------------------------------------------

    def snapshot(self) -> None:
        self._snapshots.append((self.time.now, self.sequence, dict(self.records)))
        del self._snapshots[:-12]

    def wipe(self) -> None:
        self.records.clear()
        self._lost()

    def make_anew(self) -> None:
        self.wipe()
        self.sequence = 0
        self.created = f"bucket at {self.time.now}"
        self._snapshots.clear()

    def roll_back(self) -> None:
        if self._snapshots:
            _, self.sequence, records = self.time.random.choice(self._snapshots)
            self.records = dict(records)
            self._lost()

    def _lost(self) -> None:
        self.lossy_at = self.time.now


class PinnedPartition:
    """A partition's messages, and its durable consumer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.published = 0
        self.acked: set[int] = set()
        self.floor = 0
        """All up to this are acked."""
        self.readers: list[Any] = []
        self.pinned: Any = None
        self.pin_seen = 0.0
        self.pin = 0
        """Counts pins: an ack counts only under the pin that its message was delivered with."""

    def ack(self, sequence: int, pin: int) -> None:
        if pin == self.pin and sequence > self.floor:
            self.acked.add(sequence)
            while self.floor + 1 in self.acked:
                self.floor += 1
                self.acked.discard(self.floor)

    def unpin(self) -> None:
        self.pinned = None
        self.pin += 1

    def time_out(self, now: float) -> None:
        """A pinned reader that does not pull any more loses its pin, and its open pulls end."""
        if self.pinned is None or self.pinned.can_pull:
            self.pin_seen = now
        elif now - self.pin_seen > PIN_TIMEOUT:
            self.readers = [one for one in self.readers if one is not self.pinned]
            self.unpin()

    def pinned_reader(self) -> Any:
        """Who gets the next message: the pinned one, else the first that reads."""
        if self.pinned is None and self.readers:
            self.pinned = self.readers[0]
            self.pin += 1
        return self.pinned
