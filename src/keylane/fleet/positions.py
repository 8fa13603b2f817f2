"""How far partitions are handled, kept in the fleet's bucket: one record for each worker, written by compare-and-set.

Read from the bucket's leader: a replica that lags would have the next owner repeat what was handled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from keylane.core.fleet_events import WriteConfirmed, WriteRecord
from keylane.core.fleet_positions import gap_of, highest_of, merged, merged_gaps, position_of, pruned
from keylane.core.fleet_records import POSITIONS, HandledBut, WorkerPositions, from_json, position_key
from keylane.errors import BrokenFleetRecord, RequestTimeout
from keylane.fleet.store import FleetStore
from keylane.jetstream import Connection, streams

_log = logging.getLogger("keylane.fleet")

CHECKPOINT_S = 1.0
_TRIES = 3
_LOOKS_PER_PRUNE = 30


class PositionStore:
    """The positions of one worker, and those of the others to begin from."""

    def __init__(self, connection: Connection, store: FleetStore, stream: str, worker: int, instance: str) -> None:
        self._connection = connection
        self._store = store
        self._stream = stream
        self._worker = worker
        self._instance = instance
        self._written: WorkerPositions | None = None
        self._revision = 0
        self._is_read = False
        self._writing = asyncio.Lock()
        self._pending: Mapping[str, int] = {}
        self._pending_gaps: Mapping[str, HandledBut] = {}
        self._reading: asyncio.Task[tuple[list[WorkerPositions], str, int]] | None = None
        self._rounds = 0

    def __repr__(self) -> str:
        return f"<PositionStore of worker {self._worker}, {len(self._written.positions) if self._written else 0}>"

    async def position_of(self, partition: str) -> int:
        """Up to which sequence a partition is handled, as its owners before have written. Read after your claim."""
        return (await self.handled_of(partition))[0]

    async def handled_of(self, partition: str) -> tuple[int, HandledBut | None]:
        """The same, and what is handled above."""
        if self._reading is None:  # many partitions are gained at once: one read for all that ask in one turn
            self._reading = asyncio.create_task(self._read_all())
        found = await asyncio.shield(self._reading)
        return position_of(partition, *found), gap_of(partition, *found)

    async def _read_all(self) -> tuple[list[WorkerPositions], str, int]:
        await asyncio.sleep(0)
        self._reading = None
        records = await self._records()
        state = await streams.state(self._connection, self._stream)
        return records, state.created.isoformat(), state.last_sequence

    async def _records(self) -> list[WorkerPositions]:
        found = []
        for key, entry in (await self._store.newest(POSITIONS)).items():
            if entry.value is None:
                continue
            try:
                record = from_json(key, entry.value)
            except BrokenFleetRecord as error:
                _log.warning("%s; its positions do not count, so messages may be repeated", error)
                continue
            assert isinstance(record, WorkerPositions)
            found.append(record)
            if record.worker == self._worker:
                self._written, self._revision = record, entry.revision
        self._is_read = True
        return found

    async def write(
        self,
        positions: Mapping[str, int],
        owned: frozenset[str] | None = None,
        gaps: Mapping[str, HandledBut] | None = None,
    ) -> None:
        """Record that partitions are handled up to here. Returns when the store has it; raises if it has not.

        `owned`: what this worker has now; given by whoever writes at an interval, so that the record stays small.
        `gaps`: what is handled above a position, of a partition that is given away.
        """
        self._pending = merged(self._pending, positions)
        self._pending_gaps = merged_gaps(self._pending_gaps, gaps or {}, {})
        async with self._writing:
            if self._has(positions) and not self._pending_gaps:
                return  # whoever wrote before took these along
            pending, self._pending = self._pending, {}
            pending_gaps, self._pending_gaps = self._pending_gaps, {}
            is_written = False
            try:
                for _ in range(_TRIES):
                    is_written = await self._write(pending, pending_gaps, owned)
                    if is_written:
                        return
                    self._is_read = False  # another run of this worker wrote it, or the outcome is unknown
            finally:
                if not is_written:
                    self._pending = merged(pending, self._pending)
                    self._pending_gaps = merged_gaps(pending_gaps, self._pending_gaps, {})
        raise RequestTimeout(
            f"the positions of worker {self._worker} could not be written: {self._store.failure or 'others write them'}"
        )

    def _has(self, positions: Mapping[str, int]) -> bool:
        written = self._written.positions if self._written is not None and self._is_read else {}
        return all(written.get(name, -1) >= one for name, one in positions.items())

    async def _write(
        self, positions: Mapping[str, int], gaps: Mapping[str, HandledBut], owned: frozenset[str] | None
    ) -> bool:
        others: list[WorkerPositions] | None = None
        self._rounds += owned is not None
        is_due = owned is not None and self._rounds % _LOOKS_PER_PRUNE == 0
        if not self._is_read or (is_due and owned is not None and self._keeps_more_than(owned)):
            others = [one for one in await self._records() if one.worker != self._worker]
        created = (await streams.state(self._connection, self._stream)).created.isoformat()
        before = self._written
        is_same = before is not None and before.stream_created == created
        after = merged(before.positions if before is not None and is_same else {}, positions)
        gaps_after = merged_gaps(before.gaps if before is not None and is_same else {}, gaps, after)
        if owned is not None and others is not None:
            after = pruned(after, owned, others, created)
            gaps_after = merged_gaps(gaps_after, {}, highest_of(others, created))
        if before is not None and (before.positions, before.gaps, is_same) == (after, gaps_after, True):
            return True
        record = WorkerPositions(
            worker=self._worker,
            instance=self._instance,
            beat=before.beat + 1 if before is not None else 1,
            stream_created=created,
            positions=after,
            gaps=gaps_after,
        )
        answer = await self._store.write(WriteRecord(position_key(self._worker), self._revision, record))
        if isinstance(answer, WriteConfirmed):
            self._written, self._revision = record, answer.revision
            return True
        return False

    def _keeps_more_than(self, owned: frozenset[str]) -> bool:
        return self._written is not None and not self._written.positions.keys() <= owned
