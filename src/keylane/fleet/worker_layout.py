"""The layout `worker`: one consumer for all partitions of a worker, their positions, and what dead workers leave.

Makes the readers of a worker under one worker id. Writes their positions at an interval. The leader also deletes the
consumers of workers whose lease has ended: their filters would block a work queue, and what they have handled is in
their records.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from keylane.core.consumer_filters import SUBJECT_CAP
from keylane.core.fleet_names import worker_in
from keylane.core.fleet_partitions import Partition
from keylane.core.fleet_view import FleetView
from keylane.errors import FleetError, KeylaneError, NotFound
from keylane.fleet.lag import PartitionLag, unread_lag
from keylane.fleet.origin import PartitionOrigin
from keylane.fleet.positions import PositionStore
from keylane.fleet.shared_consumer import ConsumerTerms
from keylane.fleet.store import FleetStore
from keylane.fleet.worker_consumer import UpdateCounts, WorkerConsumer
from keylane.fleet.worker_reader import WorkerReader
from keylane.jetstream import Connection, Message, consumers
from keylane.processing.message import Placing
from keylane.processing.message_processor import MessageProcessor

_log = logging.getLogger("keylane.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLayoutOptions:
    """What `join` says about the worker's consumer."""

    terms: ConsumerTerms
    max_subjects: int = SUBJECT_CAP
    split_consumer: bool = False


class Holder(NamedTuple):
    """Under which id and as which run a worker holds partitions."""

    worker_id: str
    number: int
    instance: str


class WorkerLayout:
    """The readers of one worker, and the consumer that they share."""

    def __init__(
        self,
        connection: Connection,
        store: FleetStore,
        fleet: str,
        options: WorkerLayoutOptions,
        *,
        may_change: Callable[[], bool],
        on_trouble: Callable[[str], None],
        failed: Callable[[KeylaneError], None],
        updated: Callable[[float, KeylaneError | None], None],
        on_delivered: Callable[[list[Message]], None] | None,
    ) -> None:
        """`updated`: told of every change of the consumer, with its seconds, and why it failed."""
        self._connection = connection
        self._store = store
        self._fleet = fleet
        self._options = options
        self._may_change = may_change
        self._on_trouble = on_trouble
        self._failed = failed
        self._updated = updated
        self._on_delivered = on_delivered
        self._holder: Holder | None = None
        self._readers: dict[str, WorkerReader] = {}
        self._reported: dict[int, str] = {}
        self._positions: PositionStore | None = None
        self.consumer: WorkerConsumer | None = None
        self.counts = UpdateCounts()
        """Of all consumers, under whatever id."""

    @property
    def max_subjects(self) -> int:
        return self._options.max_subjects

    def reader(
        self,
        holder: Holder,
        partition: Partition,
        processor: MessageProcessor,
        *,
        place: Placing,
        origin: PartitionOrigin,
        ready: Callable[[], None],
    ) -> WorkerReader:
        """The reader of a partition under this id. Before another id or run is used, `leave` ends the one before."""
        if self._holder is None:
            terms = self._options.terms
            self._holder = holder
            self._positions = PositionStore(self._connection, self._store, terms.stream, holder.number, holder.instance)
            self.consumer = WorkerConsumer(
                self._connection,
                holder.worker_id,
                terms,
                may_change=self._may_change,
                on_trouble=self._on_trouble,
                updated=self._updated,
                on_delivered=self._on_delivered,
                counts=self.counts,
                max_subjects=self._options.max_subjects,
                may_split=self._options.split_consumer,
            )
        assert self._holder == holder, f"{holder} comes before {self._holder} was left"
        assert self.consumer is not None
        assert self._positions is not None
        reader = WorkerReader(
            self._connection,
            partition,
            self.consumer,
            self._positions,
            processor,
            fleet=self._fleet,
            terms=self._options.terms,
            place=place,
            origin=origin,
            ready=ready,
            on_trouble=self._on_trouble,
            failed=self._failed,
        )
        self._readers[partition.id] = reader
        return reader

    async def lag_of(self, partition: Partition) -> PartitionLag:
        """How far behind a partition is: the shared consumer counts all partitions in one."""
        reader = self._readers.get(partition.id)
        position = reader.position if reader is not None else None
        if position is None:
            raise FleetError(f"the position of partition {partition.id} is not read yet")
        terms = self._options.terms
        return await unread_lag(self._connection, terms.stream, partition.filter, position, is_queue=terms.is_queue)

    async def leave(self) -> None:
        """Read nothing more under this id. A consumer that has filters stays: the id may be another's by now."""
        consumer, self.consumer = self.consumer, None
        self._holder = self._positions = None
        self._readers.clear()
        if consumer is not None:
            await consumer.close()

    async def keep_positions(self, every_s: float) -> None:
        """Write the positions of all readers again and again: what a crash repeats is above the last of them."""
        while True:
            await asyncio.sleep(every_s)
            positions = self._positions
            known = {name: one.position for name, one in self._readers.items()}
            now = {name: one for name, one in known.items() if one is not None}
            if positions is None or not now or not self._may_change():
                continue
            try:
                await positions.write(now, owned=frozenset(now))
            except KeylaneError as error:
                _log.warning("%r: a crash now would repeat more messages: %s", positions, error)

    async def look_after_others(self, view: FleetView, leads: Callable[[], bool], every_s: float) -> None:
        """As the leader: report the troubles of workers, and delete the consumers of those whose lease has ended."""
        while True:
            await asyncio.sleep(every_s)
            if not leads():
                continue
            for lease in view.live_leases():
                if lease.trouble != self._reported.get(lease.worker, ""):
                    self._reported[lease.worker] = lease.trouble
                    log = _log.warning if lease.trouble else _log.info
                    log("worker %s-%d: %s", self._fleet, lease.worker, lease.trouble or "its trouble is over")
            try:
                await self._sweep(view)
            except KeylaneError as error:
                _log.warning("fleet %s: consumers of dead workers are not deleted yet: %s", self._fleet, error)

    async def _sweep(self, view: FleetView) -> None:
        stream = self._options.terms.stream
        for name in await consumers.names(self._connection, stream):
            worker = worker_in(name, self._fleet)
            seen = view.workers.get(worker) if worker is not None else None
            if seen is None or seen.lease.state.is_held or worker in view.absent:
                continue
            _log.info("fleet %s: deleting consumer %s of a worker that is gone", self._fleet, name)
            with suppress(NotFound):  # a new owner of its partitions was quicker
                await consumers.delete(self._connection, stream, name)
