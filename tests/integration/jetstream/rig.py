"""What the tests of the JetStream adapter share: streams to read, a link to cut, notices to wait for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from nats.js.api import StorageType, StreamConfig

from keylane import Connection
from keylane.core.pulls import Meaning
from keylane.jetstream import (
    ConsumerConfig,
    ConsumerInfo,
    Feed,
    Notice,
    Outgoing,
    PublishAck,
    consumers,
    parse_headers,
    publish_many,
    status_of,
    streams,
)
from keylane.server import NatsServer
from keylane.server.ports import ReservedPort
from tests.waiter import until, wait_until

SECOND_NS = 1_000_000_000

T = TypeVar("T")


async def make_stream(connection: Connection, name: str, **options: Any) -> str:
    """A stream with the subjects `<name>.>`, in memory unless told otherwise."""
    given = {"subjects": [f"{name}.>"], "storage": StorageType.MEMORY, "allow_direct": True, **options}
    await streams.create(connection, StreamConfig(name=name, **given))
    return name


async def fill(connection: Connection, stream: str, count: int, *, size: int = 0, subject: str = "a") -> None:
    """Store `count` messages; each begins with its number."""
    sent = [Outgoing(f"{stream}.{subject}", b"%d" % number + bytes(size)) for number in range(count)]
    results = await publish_many(connection, sent)
    assert all(isinstance(result, PublishAck) for result in results), results[-1]


async def make_consumer(connection: Connection, stream: str, name: str = "reader", **options: Any) -> str:
    given = {"max_ack_pending": 100_000, **options}
    await consumers.create(connection, stream, ConsumerConfig(durable_name=name, **given))
    return name


async def all_acked(connection: Connection, stream: str, consumer: str) -> ConsumerInfo:
    """Wait until the server has worked off the acks that were sent, and nothing is open."""
    return await until(
        lambda: consumers.info(connection, stream, consumer),
        lambda info: info.num_ack_pending == 0 and info.num_pending == 0,
    )


async def link_is(connection: Connection, *, up: bool) -> None:
    """Wait until the connection has noticed the loss, or the return, of its link."""
    await until(lambda: connection.is_connected is up, deadline_s=30.0)


def buffered(feed: Feed) -> int:
    """How many messages it holds that nobody has taken."""
    return len(feed._messages)


def buffered_bytes(feed: Feed) -> int:
    return feed._buffer.bytes


def asked(feed: Feed) -> int:
    """How many messages its open pulls may still bring."""
    return feed._pulls._window.asked


class Notices:
    """Collects a feed's notices."""

    def __init__(self) -> None:
        self.all: list[Notice] = []

    def __call__(self, notice: Notice) -> None:
        self.all.append(notice)

    async def until(self, meaning: Meaning | None, deadline_s: float = 30.0) -> Notice:
        def found() -> list[Notice]:
            return [notice for notice in self.all if notice.meaning is meaning]

        return (await until(found, deadline_s=deadline_s))[0]


class Pulls:
    """Overhears the pull requests on a consumer."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    @classmethod
    @asynccontextmanager
    async def of(cls, connection: Connection, stream: str, consumer: str) -> AsyncIterator[Pulls]:
        heard = cls()
        route = await connection.nats.route(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", heard)
        await connection.flush()
        try:
            yield heard
        finally:
            await connection.nats.unroute(route)

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        self.batches.append(json.loads(data)["batch"])

    def received(self) -> None:
        pass


class RawPull:
    """One pull request, and what the server answers to it."""

    def __init__(self) -> None:
        self.messages = 0
        self.statuses: asyncio.Queue[tuple[int, str, dict[str, str]]] = asyncio.Queue()

    @classmethod
    @asynccontextmanager
    async def on(
        cls, connection: Connection, stream: str, consumer: str, request: dict[str, object] | bytes
    ) -> AsyncIterator[RawPull]:
        pull = cls()
        inbox = connection.nats.new_inbox()
        route = await connection.nats.route(inbox, pull)
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        subject = connection.api.subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer}")
        await connection.nats.publish(subject, body, reply=inbox)
        await connection.flush()
        try:
            yield pull
        finally:
            await connection.nats.unroute(route)

    def receive(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if reply:
            self.messages += 1
        else:
            self.statuses.put_nowait((*status_of(headers), parse_headers(headers)))

    def received(self) -> None:
        pass

    async def answer(self, deadline_s: float = 30.0) -> tuple[int, str, dict[str, str]]:
        """The next status that is not a heartbeat."""
        async with asyncio.timeout(deadline_s):
            while True:
                code, text, fields = await self.statuses.get()
                if code != 100:
                    return code, text, fields


class Link:
    """A TCP link to a server that a test can cut and mend."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._reserved = ReservedPort()
        self.port = self._reserved.number

    @classmethod
    @asynccontextmanager
    async def to(cls, server: NatsServer) -> AsyncIterator[Link]:
        link = cls(server.port)
        await link.mend()
        try:
            yield link
        finally:
            await link.cut()
            link._reserved.release()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def mend(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def cut(self) -> None:
        """End every link and refuse new ones."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, far_writer}
        for source, target in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, target))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(target)
            target.close()


@contextmanager
def frozen(server: NatsServer) -> Iterator[None]:
    """The server stands still, as if its machine hung."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        _wait_until_stopped(server.pid)
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def _wait_until_stopped(pid: int) -> None:
    """A signal takes effect a little later: until then some thread may still answer."""

    def states() -> set[str]:
        return {thread.read_text().rpartition(")")[2].split()[0] for thread in Path(f"/proc/{pid}/task").glob("*/stat")}

    wait_until(states, lambda seen: seen == {"T"})
