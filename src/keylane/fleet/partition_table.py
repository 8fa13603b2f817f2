"""The partitions of a fleet as one worker knows them, and the record where partitions that change are written.

Every worker reads the table; the leader alone writes it, by compare-and-set, and `repartition` writes its wish. A fleet
whose partitions never changed has no table: then its source says all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from keylane.core.fleet_generations import first_table, partition_id, partitions_of
from keylane.core.fleet_partitions import (
    HashedPartitions,
    ListedPartitions,
    Partition,
    PartitionSource,
    partitions_from_entries,
)
from keylane.core.fleet_records import TABLE, PartitionTable, from_json
from keylane.core.fleet_records import to_json as record_to_json
from keylane.fleet.store import FLEET_BUCKET
from keylane.jetstream import Bucket, Connection


class FleetPartitions:
    """What the partitions are now, as far as this worker has read."""

    def __init__(self, connection: Connection, stream: str, fleet: str, source: PartitionSource) -> None:
        self.source = source
        self._bucket = Bucket(connection, FLEET_BUCKET)
        self._key = f"{stream}.{fleet}.{TABLE}"
        self._revision = 0
        self._stored_version = 0
        self._known: dict[str, Partition] = {}
        """Every partition that was ever seen: an owner drains what has vanished."""
        self.table = PartitionTable(version=0)
        self.current: tuple[Partition, ...] = ()
        """What the leader assigns."""
        self.opened: frozenset[str] | None = None
        """The partitions that may be owned now; None: all."""
        self.changed: Callable[[], None] = lambda: None
        """Called when another table was read or written."""
        self._adopt(first_table(source.partitioning.partitions) if isinstance(source, HashedPartitions) else self.table)

    def __repr__(self) -> str:
        return f"<FleetPartitions {self._key} version {self.table.version}, {len(self.current)} partitions>"

    @property
    def is_fixed(self) -> bool:
        """Whether they can never change."""
        return isinstance(self.source, ListedPartitions)

    @property
    def is_lost(self) -> bool:
        """Whether the store has lost the table, or has an older one."""
        return self._stored_version < self.table.version

    def partition_of(self, partition_id: str) -> Partition | None:
        return self._known.get(partition_id)

    def partition_of_key(self, subject: str, key: str) -> str | None:
        """The partition that handles this key now; None between two generations."""
        source = self.source
        if not isinstance(source, HashedPartitions):
            return key if key in self._known else None
        front = self.table.generations[0]
        if front.retired:
            return None
        numbering = replace(source.partitioning, partitions=front.partitions)
        return partition_id(front, numbering.partition(subject))

    def last_of(self, partition_id: str) -> int | None:
        """The last sequence of a partition that may be handled; None: no end."""
        generations = self.table.generations
        if not generations or generations[0].last is None:
            return None
        return generations[0].last if self.opened is None or partition_id in self.opened else 0

    async def read(self) -> None:
        """Read the table. An older one than is known was lost and came back: it is not followed."""
        entry = await self._bucket.get(self._key)
        stored = from_json(TABLE, entry.value) if entry is not None and entry.value is not None else None
        self.follow(stored if isinstance(stored, PartitionTable) else None, entry.revision if entry is not None else 0)

    def follow(self, stored: PartitionTable | None, revision: int) -> None:
        """Take a table that was read; None: there is none."""
        self._revision = revision
        self._stored_version = stored.version if stored is not None else 0
        if stored is not None and stored.version > self.table.version:
            self._adopt(stored)
            self.changed()

    async def write(self, table: PartitionTable) -> None:
        """Write the next version. Raises `RevisionConflict` if somebody else has written since the last read."""
        self._revision = await self._bucket.put(self._key, record_to_json(table), revision=self._revision)
        self._stored_version = table.version
        if table.version > self.table.version:
            self._adopt(table)
            self.changed()

    def _adopt(self, table: PartitionTable) -> None:
        self.table = table
        source = self.source
        if isinstance(source, HashedPartitions):
            by_generation = [partitions_of(source, one) for one in table.generations]
            front = table.generations[0]
            self.current = tuple(
                one
                for generation, found in zip(table.generations, by_generation, strict=True)
                if not generation.retired
                for one in found
            )
            self.opened = frozenset() if front.retired else frozenset(one.id for one in by_generation[0])
        elif isinstance(source, ListedPartitions):
            self.current = source.resolve().partitions
        else:
            self.current = partitions_from_entries(table.entries) if table.entries else ()
        self._known |= {one.id: one for one in self.current}
