"""Ground for the tests of priority groups: streams, readers on connections of their own, workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import nats.errors
import pytest
from nats.js.api import RetentionPolicy, StorageType, StreamConfig

import keylane
from keylane import Connection
from keylane.errors import ApiError, KeylaneError, RequestTimeout
from keylane.jetstream import (
    ConsumerConfig,
    ConsumerInfo,
    Feed,
    Outgoing,
    PriorityPolicy,
    PublishAck,
    consumers,
    publish_many,
    streams,
)
from keylane.priority import consume, create
from keylane.server import NatsCluster, NatsServer
from tests.integration.priority.evidence import Line
from tests.integration.priority.workers import Worker
from tests.waiter import until

GROUP = "jobs"
WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Ground:
    """A stream with one consumer that has a priority group."""

    connection: Connection
    stream: str
    consumer: str

    async def publish(self, count: int) -> list[int]:
        """Publish this many messages; returns their sequences."""
        messages = [Outgoing(f"{self.stream}.x", b"%d" % number) for number in range(count)]
        acks = await publish_many(self.connection, messages)
        assert all(isinstance(ack, PublishAck) for ack in acks), acks
        return [ack.sequence for ack in acks if isinstance(ack, PublishAck)]

    async def led(self) -> None:
        """Wait until stream and consumer have a leader: before that nothing can be stored or read."""
        async with asyncio.timeout(20):
            while True:
                with suppress(ApiError, RequestTimeout):
                    info = await consumers.info(self.connection, self.stream, self.consumer)
                    if info.leader and (await streams.state(self.connection, self.stream)).leader:
                        return
                await asyncio.sleep(0.02)

    async def acked(self, sequence: int) -> None:
        """Wait until everything up to this sequence is acked."""
        await until(self.info, lambda info: info.ack_floor >= sequence)

    async def pulls(self, count: int) -> None:
        """Wait until the server holds this many open pulls. It tells nobody: one has to look."""
        await until(self.info, lambda info: info.num_waiting >= count)

    async def info(self) -> ConsumerInfo:
        return await consumers.info(self.connection, self.stream, self.consumer)


MakeGround = Callable[..., Awaitable[Ground]]
OpenClient = Callable[[], Awaitable[Connection]]
StartReader = Callable[..., Awaitable["Reader"]]
StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def open_client(stack: AsyncExitStack, nats_server: NatsServer) -> OpenClient:
    """A connection of its own, as another process would have."""

    async def one() -> Connection:
        return await stack.enter_async_context(await keylane.connect(nats_server.url))

    return one


@pytest.fixture
def open_cluster_client(stack: AsyncExitStack, nats_cluster: NatsCluster) -> OpenClient:
    async def one() -> Connection:
        return await stack.enter_async_context(await keylane.connect(nats_cluster.urls))

    return one


@pytest.fixture
def ground(stack: AsyncExitStack, connection: Connection, unique: Callable[..., str]) -> MakeGround:
    """A function that makes a stream and a consumer on the single server."""

    async def make(policy: PriorityPolicy, **options: Any) -> Ground:
        return await make_ground(stack, connection, unique("prio"), policy, **options)

    return make


@pytest.fixture
async def cluster_ground(
    stack: AsyncExitStack, open_cluster_client: OpenClient, unique: Callable[..., str]
) -> MakeGround:
    """A function that makes a stream with three replicas in files, and a consumer, in the cluster."""
    connection = await open_cluster_client()

    async def make(policy: PriorityPolicy, **options: Any) -> Ground:
        return await make_ground(stack, connection, unique("prio"), policy, replicas=3, **options)

    return make


async def make_ground(
    stack: AsyncExitStack,
    connection: Connection,
    stream: str,
    policy: PriorityPolicy,
    *,
    retention: Literal["workqueue", "limits"] = "workqueue",
    storage: Literal["file", "memory"] = "file",
    replicas: int = 1,
    **options: Any,
) -> Ground:
    config = StreamConfig(
        name=stream,
        subjects=[f"{stream}.>"],
        retention=RetentionPolicy(retention),
        storage=StorageType(storage),
        num_replicas=replicas,
    )
    await patiently(streams.create, connection, config)

    async def remove() -> None:
        with suppress(KeylaneError):  # the server may be gone: that is what some tests do
            await streams.delete(connection, stream)

    stack.push_async_callback(remove)
    consumer = ConsumerConfig(durable_name="workers", priority_groups=(GROUP,), priority_policy=policy, **options)
    await patiently(create, connection, stream, consumer)
    place = Ground(connection, stream, "workers")
    if replicas > 1:
        await place.led()
    return place


async def patiently(call: Callable[..., Awaitable[object]], *arguments: object) -> None:
    """Ask twice: a busy cluster may take longer than one request waits, and both calls may be repeated."""
    try:
        await call(*arguments)
    except RequestTimeout:
        await call(*arguments)


async def nobody_listens(connection: Connection, subject: str) -> None:
    """Wait until the server gives nothing more to a connection that listened to this."""
    async with asyncio.timeout(20):
        while True:
            try:
                await connection.nats.request(subject, timeout=0.1)
            except nats.errors.NoRespondersError:
                return
            except nats.errors.TimeoutError:
                continue


@dataclass(slots=True)
class Reader:
    """A task that reads a feed, writes evidence and acks; others wait on what it writes."""

    name: str
    feed: Feed
    _changed: asyncio.Condition
    """One for all readers of a test."""
    handle_s: float = 0.0
    acks: Callable[[int], bool] = lambda _: True
    log: list[Line] = field(default_factory=list)
    _at_work: bool = False
    _stopping: bool = False
    _task: asyncio.Task[None] | None = None

    def start(self) -> Reader:
        self._task = asyncio.create_task(self._read(), name=f"reader {self.name}")
        return self

    @property
    def sequences(self) -> list[int]:
        return [line.sequence for line in self.log]

    async def got(self, count: int = 1, *, timeout_s: float = 20.0) -> Line:
        """Wait until this many handlers were started; returns the last of them."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: len(self.log) >= count)
        return self.log[count - 1]

    async def together(self, *others: Reader, count: int, timeout_s: float = 20.0) -> None:
        """Wait until this reader and the others have started this many handlers in all."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: sum(len(one.log) for one in (self, *others)) >= count)

    async def stop(self) -> None:
        """Finish the handler at work, read no more, then close the feed, as a well-behaved program does."""
        self._stopping = True
        assert self._task is not None
        if not self._at_work:
            self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()
        await self.feed.stop()

    async def abandon(self) -> None:
        """Read no more and say nothing: the feed stays open."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self.feed:
            self._at_work = True
            self.log.append(Line(time.monotonic(), self.name, message.sequence))
            async with self._changed:
                self._changed.notify_all()
            if self.handle_s:
                await asyncio.sleep(self.handle_s)
            if self.acks(message.sequence):
                message.ack()
            self._at_work = False
            if self._stopping:
                return


@pytest.fixture
def read(stack: AsyncExitStack) -> StartReader:
    """A function that reads a consumer through a connection until the test ends."""
    changed = asyncio.Condition()

    async def start(connection: Connection, place: Ground, name: str, **options: Any) -> Reader:
        own = {key: options.pop(key) for key in ("handle_s", "acks") if key in options}
        feed = await consume(connection, place.stream, place.consumer, **options)
        reader = Reader(name, feed, changed, **own).start()
        stack.push_async_callback(reader.abandon)
        return reader

    return start


@pytest.fixture
def start_worker(stack: AsyncExitStack) -> StartWorker:
    """A function that starts a reader in a process of its own; it is killed at the end of the test."""

    async def start(url: str | list[str], ground: Ground, name: str, **options: Any) -> Worker:
        where = {"url": url, "stream": ground.stream, "consumer": ground.consumer}
        worker = await Worker.start([sys.executable, str(WORKER)], {**where, "name": name, "options": options})
        stack.push_async_callback(worker.end)
        return worker

    return start
