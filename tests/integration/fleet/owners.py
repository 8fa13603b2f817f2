"""Owners of partitions in layout `worker`, without leases and claims: a test moves partitions as fast as it likes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from keylane.core.fleet_partitions import Partition
from keylane.errors import KeylaneError
from keylane.fleet.origin import PartitionOrigin
from keylane.fleet.shared_consumer import ConsumerTerms
from keylane.fleet.store import FLEET_BUCKET, FleetStore
from keylane.fleet.worker_layout import Holder, WorkerLayout, WorkerLayoutOptions
from keylane.fleet.worker_reader import WorkerReader
from keylane.groups import GroupMessage
from keylane.jetstream import Bucket, Connection, RetentionPolicy, streams
from keylane.jetstream.transport import DirectTransport
from keylane.processing.handler_options import HandlerOptions
from keylane.processing.message import placing_by
from keylane.processing.message_processor import MessageProcessor, handler_call
from keylane.retrying import Backoff
from tests.integration.fleet.rig import FleetGround

FLEET = "f"
_OPTIONS = HandlerOptions(order="key", concurrency=64, ack_wait_s=30.0, remember=1000)
_tokens = itertools.count(1)


class Owner:
    """One worker: a connection, a consumer, and the readers of what it owns."""

    def __init__(self, ground: FleetGround, number: int, connection: Connection, layout: WorkerLayout) -> None:
        self._ground = ground
        self._holder = Holder(f"{FLEET}-{number}", number, f"run-{number}")
        self.connection = connection
        self.layout = layout
        self._call = handler_call(self._handle, _OPTIONS)
        self._readers: dict[str, tuple[WorkerReader, MessageProcessor]] = {}

    @classmethod
    async def start(cls, ground: FleetGround, number: int, stack: AsyncExitStack) -> Owner:
        connection = await ground.client()
        config = (await streams.info(connection, ground.stream)).config
        await Bucket(connection, FLEET_BUCKET).ensure(replicas=config.num_replicas or 1)
        store = FleetStore(connection, ground.stream, FLEET, timeout_s=2.0, hinted=lambda _: None)
        await stack.enter_async_context(store)
        terms = ConsumerTerms(
            stream=ground.stream,
            is_queue=config.retention == RetentionPolicy.WORK_QUEUE,
            ack_wait_s=30.0,
            max_ack_pending=500,
            pin_timeout_s=60.0,
        )
        failed: list[KeylaneError] = []
        troubles: list[str] = []
        layout = WorkerLayout(
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
        owner = cls(ground, number, connection, layout)
        await owner._call.start()
        stack.push_async_callback(owner.stop)
        return owner

    async def _handle(self, message: GroupMessage) -> None:
        await self._ground.evidence.note(self._holder.worker_id, message)

    async def _owns(self, partition: str) -> bool:
        return partition in self._readers

    async def gain(self, partition: Partition) -> None:
        source = self._ground.partitions
        processor = MessageProcessor(self._call, _OPTIONS, partition.id, on_crash=lambda: None)
        origin = PartitionOrigin(
            self.connection,
            (self._ground.stream, FLEET, self._holder.worker_id),
            instance=self._holder.instance,
            partition=partition.id,
            wait=lambda _: None,
            is_owner=self._owns,
        )
        place = placing_by([source.partitioning], whole_subject=False)
        reader = self.layout.reader(self._holder, partition, processor, place=place, origin=origin, ready=lambda: None)
        self._readers[partition.id] = reader, processor
        await reader.start(next(_tokens))

    async def lose(self, partition: Partition) -> None:
        reader, processor = self._readers.pop(partition.id)
        await Backoff("drain").call(lambda: reader.drain(lost=False))
        await reader.close()
        await processor.close()

    def cut_link(self) -> None:
        transport = self.connection.nats._transport
        assert isinstance(transport, DirectTransport)
        if transport._wire is not None and transport._wire.transport is not None:
            transport._wire.transport.abort()  # the link ends, unnoticed so far

    async def stop(self) -> None:
        for reader, processor in self._readers.values():
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
