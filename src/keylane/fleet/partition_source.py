"""Partitions that are looked up while a fleet runs: a list in a KV value, or the subjects of the stream.

Only the leader looks. What it finds goes into the partition table first, then into an assignment, so every worker knows
what a partition is before it is given one. What cannot be read or used changes nothing: the last good list stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from keylane.core.fleet_discovery import SubjectMemory
from keylane.core.fleet_partitions import (
    DiscoveredPartitions,
    KvPartitions,
    Partition,
    entries_of,
)
from keylane.errors import FleetError, InvalidInput
from keylane.fleet.partition_table import FleetPartitions
from keylane.jetstream import Bucket, Connection, streams

_log = logging.getLogger("keylane.fleet")

_LOOK_KV_S = 2.0
_LOOK_STREAM_S = 1.0


class PartitionLookup(Protocol):
    """A source that somebody must ask."""

    every_s: float
    """How often, if nothing tells of a change."""

    async def look(self) -> tuple[Partition, ...]:
        """Raises `InvalidInput` or `FleetError` if there is nothing that can be used."""

    def watch(self, changed: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Call `changed` when there may be something new."""


class KvLookup:
    """A list in a KV value."""

    every_s = _LOOK_KV_S

    def __init__(self, connection: Connection, source: KvPartitions) -> None:
        self._source = source
        self._bucket = Bucket(connection, source.bucket)

    async def look(self) -> tuple[Partition, ...]:
        source = self._source
        entry = await self._bucket.get(source.key)
        if entry is None or entry.value is None:
            raise FleetError(
                f"bucket {source.bucket!r} has no key {source.key!r}: write the list of the fleet's subjects there"
            )
        return source.resolve(entry.value).partitions

    def watch(self, changed: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return self._bucket.hints(self._source.key, lambda _key, _value: changed())


class SubjectLookup:
    """The subjects that the stream has."""

    every_s = _LOOK_STREAM_S

    def __init__(
        self, connection: Connection, stream: str, source: DiscoveredPartitions, known: FleetPartitions
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._source = source
        self._known = known
        self._memory = SubjectMemory()
        self._told: frozenset[str] = frozenset()

    async def look(self) -> tuple[Partition, ...]:
        source = self._source
        self._memory.know(one.filter for one in self._known.current)
        found = source.resolve(await streams.subjects(self._connection, self._stream, source.filter))
        if found.left_out and not self._told.issuperset(found.left_out):
            self._told |= set(found.left_out)
            _log.warning("subjects with a wildcard as a token are no partitions: %s", ", ".join(found.left_out[:5]))
        filters = self._memory.look((one.filter for one in found.partitions), time.monotonic())
        return source.resolve((), known=filters).partitions

    def watch(self, changed: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class SourceKeeper:
    """Keeps the table as the source says it, while its worker leads."""

    def __init__(
        self, lookup: PartitionLookup, partitions: FleetPartitions, told: Callable[[str | None], None]
    ) -> None:
        """`told`: told what is wrong with the source; None: nothing any more."""
        self._lookup = lookup
        self._partitions = partitions
        self._told = told

    def watch(self, changed: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return self._lookup.watch(changed)

    async def tend(self) -> float:
        table = self._partitions
        try:
            found = await self._lookup.look()
        except (InvalidInput, FleetError) as error:
            self._told(f"{error}. The last good list of partitions stays in force")
            found = table.current
        else:
            self._told(None)
        if found and (found != table.current or table.is_lost):
            version = table.table.version + 1
            await table.write(replace(table.table, version=version, entries=entries_of(found)))
        return self._lookup.every_s


async def first_look(lookup: PartitionLookup, partitions: FleetPartitions) -> None:
    """What a worker that joins must be able to read, unless the fleet has partitions already."""
    await partitions.read()
    if not partitions.current:
        await lookup.look()
