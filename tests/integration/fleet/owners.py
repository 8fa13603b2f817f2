"""Owners of partitions, in either layout, without leases and claims: a test moves partitions as fast as it likes."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Literal

from keylane.core.fleet_names import partition_consumer
from keylane.core.fleet_partitions import Partition
from keylane.core.pull_budget import PullBudget
from keylane.errors import KeylaneError
from keylane.fleet.consumer_limit import CreationPace
from keylane.fleet.origin import PartitionOrigin
from keylane.fleet.partition_reader import MOST_BYTES, PartitionReader, ReaderOptions
from keylane.fleet.shared_consumer import ConsumerTerms
from keylane.fleet.store import FLEET_BUCKET, FleetStore
from keylane.fleet.worker_layout import Holder, WorkerLayout, WorkerLayoutOptions
from keylane.fleet.worker_reader import WorkerReader
from keylane.groups import GroupMessage
from keylane.jetstream import Bucket, Connection, RetentionPolicy, streams
from keylane.processing.handler_options import HandlerOptions
from keylane.processing.message import Placing, placing_by
from keylane.processing.message_processor import MessageProcessor, handler_call
from keylane.retrying import Backoff
from tests.integration.fleet.rig import FleetGround, cut_link

FLEET = "f"
Layout = Literal["partition", "worker"]
_ACK_WAIT_S = 30.0
_MAX_ACK_PENDING = 500
_PIN_TIMEOUT_S = 60.0
_UNPIN_AFTER_S = 1.0
"""As a worker with a lease of 3 s."""
_tokens = itertools.count(1)


class Owner:
    """One worker: a connection, the consumer of layout `worker`, and the readers of what it owns or is about to."""

    def __init__(
        self,
        ground: FleetGround,
        number: int,
        connection: Connection,
        shared: WorkerLayout,
        *,
        is_queue: bool,
        layout: Layout,
    ) -> None:
        self._ground = ground
        self._holder = Holder(f"{FLEET}-{number}", number, f"run-{number}")
        self.connection = connection
        self.layout = shared
        self._is_queue = is_queue
        self._has_shared = layout == "worker"
        self._options = HandlerOptions(
            order="key",
            concurrency=64,
            ack_wait_s=_ACK_WAIT_S,
            remember=2 * _MAX_ACK_PENDING,
            tracks_position=not is_queue and not self._has_shared,
        )
        self._call = handler_call(self._handle, self._options)
        self._pace = CreationPace(lambda _: None)
        self._budget = PullBudget(_MAX_ACK_PENDING, MOST_BYTES)
        self.unpins = 0
        """How often a pin had to be cleared."""
        self._readers: dict[str, tuple[WorkerReader | PartitionReader, MessageProcessor]] = {}
        self._pinned: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._pinning: dict[str, asyncio.Task[None]] = {}

    @classmethod
    async def start(cls, ground: FleetGround, number: int, stack: AsyncExitStack, layout: Layout = "worker") -> Owner:
        connection = await ground.client()
        config = (await streams.info(connection, ground.stream)).config
        await Bucket(connection, FLEET_BUCKET).ensure(replicas=config.num_replicas or 1)
        store = FleetStore(connection, ground.stream, FLEET, timeout_s=2.0, hinted=lambda _: None)
        await stack.enter_async_context(store)
        is_queue = config.retention == RetentionPolicy.WORK_QUEUE
        terms = ConsumerTerms(
            stream=ground.stream,
            is_queue=is_queue,
            ack_wait_s=_ACK_WAIT_S,
            max_ack_pending=_MAX_ACK_PENDING,
            pin_timeout_s=_PIN_TIMEOUT_S,
        )
        failed: list[KeylaneError] = []
        troubles: list[str] = []
        shared = WorkerLayout(
            connection,
            store,
            FLEET,
            WorkerLayoutOptions(terms=terms),
            may_change=lambda: True,
            on_trouble=troubles.append,
            failed=failed.append,
            updated=lambda _seconds, _error: None,
            on_delivered=None,
        )
        owner = cls(ground, number, connection, shared, is_queue=is_queue, layout=layout)
        await owner._call.start()
        stack.push_async_callback(owner.stop)
        return owner

    async def _handle(self, message: GroupMessage) -> None:
        await self._ground.evidence.note(self._holder.worker_id, message)

    async def _owns(self, partition: str) -> bool:
        return partition in self._readers

    async def open(self, partition: Partition) -> None:
        """Prepare for it. In layout `partition` this waits as the server's standby, while the owner before goes on."""
        processor = MessageProcessor(self._call, self._options, partition.id, on_crash=lambda: None)
        origin = PartitionOrigin(
            self.connection,
            (self._ground.stream, FLEET, self._holder.worker_id),
            instance=self._holder.instance,
            partition=partition.id,
            wait=lambda _: None,
            is_owner=self._owns,
        )
        place = placing_by([self._ground.partitions.partitioning], whole_subject=False)
        reader: WorkerReader | PartitionReader
        if self._has_shared:
            reader = self.layout.reader(
                self._holder, partition, processor, place=place, origin=origin, ready=lambda: None
            )
        else:
            reader = self._partition_reader(partition, processor, place, origin)
        self._readers[partition.id] = reader, processor
        await reader.open()

    def _partition_reader(
        self, partition: Partition, processor: MessageProcessor, place: Placing, origin: PartitionOrigin
    ) -> PartitionReader:
        options = ReaderOptions(
            stream=self._ground.stream,
            is_queue=self._is_queue,
            ack_wait_s=_ACK_WAIT_S,
            max_ack_pending=_MAX_ACK_PENDING,
            pin_timeout_s=_PIN_TIMEOUT_S,
        )
        return PartitionReader(
            self.connection,
            partition,
            partition_consumer(FLEET, partition.id),
            options,
            processor,
            place=place,
            origin=origin,
            pinned=self._pinned[partition.id].set,
            unpinned=self._pinned[partition.id].clear,
            lost=lambda _: None,
            redelivered=lambda: None,
            pace=self._pace,
            budget=self._budget,
        )

    async def gain(self, partition: Partition) -> None:
        if partition.id not in self._readers:
            await self.open(partition)
        reader = self._readers[partition.id][0]
        await reader.start(next(_tokens))
        if not self._has_shared:
            self._pinning[partition.id] = asyncio.create_task(self._unpin_late(partition.id, reader))

    async def _unpin_late(self, partition: str, reader: WorkerReader | PartitionReader) -> None:
        """An owner before may leave a pin behind, as the server pins pulls that are just being closed."""
        while not self._pinned[partition].is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_UNPIN_AFTER_S):
                    await self._pinned[partition].wait()
                    return
            self.unpins += 1
            await reader.take_pin()

    async def lose(self, partition: Partition) -> None:
        reader, processor = self._readers.pop(partition.id)
        await self._stop_pinning(partition.id)
        await Backoff("drain").call(lambda: reader.drain(lost=False))
        await reader.close()
        await processor.close()

    async def _stop_pinning(self, partition: str) -> None:
        pinning = self._pinning.pop(partition, None)
        if pinning is not None:
            pinning.cancel()
            await asyncio.gather(pinning, return_exceptions=True)
        self._pinned.pop(partition, None)

    def cut_link(self) -> None:
        cut_link(self.connection)

    async def stop(self) -> None:
        for partition, (reader, processor) in self._readers.items():
            await self._stop_pinning(partition)
            await reader.close()
            await processor.close()
        await self.layout.leave()
        await self._call.close()


async def paced(publish: Callable[[], Awaitable[object]], over: asyncio.Event, each_s: float) -> None:
    """Publish at a steady pace until it is over."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while not over.is_set():
        await publish()
        due = max(due + each_s, loop.time() - 1)
        await asyncio.sleep(max(0.0, due - loop.time()))
