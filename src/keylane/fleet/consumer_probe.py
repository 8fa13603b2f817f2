"""Finds consumers that were lost with their server, or went back with it. Nobody tells their readers.

A consumer in memory with one replica does not answer while its server is down, and begins at its start when that is up
again, without the pulls that were open. One consumer of each server is asked every second, or every three seconds if
that server has delivered nothing meanwhile; only if it is not well, all of that server are. The cost does not grow with
the number of partitions.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable

from keylane.errors import KeylaneError
from keylane.fleet.partition_reader import PartitionReader
from keylane.jetstream import Connection

_log = logging.getLogger("keylane.fleet")

PROBE_S = 1.0
_PROBES_AT_REST = 3
_AT_ONCE = 16


class ConsumerProbe:
    """Looks after the consumers of one worker."""

    def __init__(
        self,
        connection: Connection,
        readers: Callable[[], Iterable[PartitionReader]],
        lost: Callable[[PartitionReader], None],
    ) -> None:
        """`readers`: those that own their partitions. `lost`: called with one whose consumer must be looked after."""
        self._connection = connection
        self._readers = readers
        self._lost = lost

    async def run(self) -> None:
        for probe in itertools.count():
            await asyncio.sleep(PROBE_S)
            if self._connection.is_connected:
                by_server: dict[str | None, list[PartitionReader]] = {}
                for reader in self._readers():
                    by_server.setdefault(reader.server, []).append(reader)
                due = [
                    readers
                    for readers in by_server.values()
                    if any(one.was_delivered_to() for one in readers) or probe % _PROBES_AT_REST == 0
                ]
                await asyncio.gather(*(self._look(readers) for readers in due))

    async def _look(self, readers: list[PartitionReader]) -> None:
        furthest = max(readers, key=lambda one: one.seen_floor)
        if await self._is_well(furthest):
            return
        limit = asyncio.Semaphore(_AT_ONCE)

        async def look(reader: PartitionReader) -> None:
            async with limit:
                if reader is furthest or not await self._is_well(reader):
                    self._lost(reader)

        await asyncio.gather(*(look(reader) for reader in readers))

    async def _is_well(self, reader: PartitionReader) -> bool:
        try:
            return await reader.is_well(PROBE_S)
        except KeylaneError as error:
            _log.info("%r: its consumer does not answer: %s", reader, error)
            return not self._connection.is_connected
