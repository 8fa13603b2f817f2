"""Ground for the tests of fleets: workers on connections of their own, workers in processes, and a load."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from keylane import Connection, fleet
from keylane.errors import KeylaneError
from keylane.fleet import HashedPartitions, Worker, hashed
from keylane.jetstream.transport import DirectTransport
from keylane.testing import DeliveryVerdict
from tests.integration.groups.rig import Ground, Line, flawless
from tests.waiter import until

PARTITIONS = 8
KEYS = [f"k{number}" for number in range(40)]
PROGRAM = Path(__file__).with_name("worker_program.py")


class FleetGround:
    """A stream, the workers that a test starts on it, and their evidence. All of it ends with the test."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.connection = ground.connection
        self.stream = ground.stream
        self.evidence = ground.evidence
        self.clients: list[Connection] = []
        """Of the workers, in the order in which they joined."""
        self.publish = ground.publish
        self.client = ground.client
        self.url = ground.url if isinstance(ground.url, str) else ground.url[0]

    @property
    def partitions(self) -> HashedPartitions:
        return hashed(PARTITIONS, f"{self.stream}.*")

    async def join(self, name: str, handler: Any = None, **options: Any) -> Worker:
        """A worker on a connection of its own, which writes evidence unless it has a handler."""
        options.setdefault("partitions", self.partitions)
        self.clients.append(await self._ground.client())
        worker = await fleet.join(
            self.clients[-1],
            self.stream,
            options.pop("fleet", "f"),
            handler or self.evidence.handler(name),
            name=name,
            **options,
        )

        async def stop() -> None:
            with suppress(KeylaneError):
                await worker.stop(timeout_s=2)

        self._ground.stack.push_async_callback(stop)
        return worker

    @asynccontextmanager
    async def process(self, name: str, **options: Any) -> AsyncIterator[WorkerProcess]:
        """A worker in a process of its own, which a test may kill."""
        given = {"url": self.url, "stream": self.stream, "name": name, **options}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), json.dumps(given), stdout=asyncio.subprocess.PIPE
        )
        worker = WorkerProcess(name, process, self)
        reading = asyncio.create_task(worker.read())
        try:
            yield worker
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await reading

    @asynccontextmanager
    async def load(self, pause_s: float = 0.01) -> AsyncIterator[list[int]]:
        """Publish one message on each key again and again; yields the sequences so far."""
        sent: list[int] = []
        over = asyncio.Event()

        async def publish() -> None:
            while not over.is_set():
                sent.extend(await self.publish(KEYS))
                await asyncio.sleep(pause_s)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish())
            try:
                yield sent
            finally:
                over.set()  # a publish that is cut off may be stored all the same

    async def come_and_go(self, **options: Any) -> None:
        """Two workers join, stop and join again under load; each leads for a while. Nothing may be lost or repeated."""
        async with self.load() as sent:
            a = await self.join("a", **options)
            await self.shared(a)
            b = await self.join("b", **options)
            await self.shared(a, b)
            await a.stop()  # the leader
            await self.shared(b)
            a = await self.join("a", **options)
            await self.shared(a, b)
            await b.stop()
            await self.shared(a)
        await self.evidence.all_of(sent)
        assert flawless(self.evidence.verdict(sent))
        assert {line.by for line in self.evidence.lines} == {"a", "b"}

    async def lose_a_worker(self, **options: Any) -> DeliveryVerdict:
        """A worker in a process is killed under load, and another one takes over: nothing is lost or out of order."""
        a = await self.join("a", **options)
        async with self.process("b", **options) as b:
            await until(lambda: bool(b.partitions) and bool(a.partitions), deadline_s=45)  # it takes time to start
            async with self.load() as sent:
                await self.evidence.until(lambda lines: len({one.partition for one in lines if one.by == "b"}) > 1)
                b.process.kill()
                await self.shared(a)
                await self.evidence.all_of(list(sent))
            await self.evidence.all_of(sent)
        verdict = self.evidence.verdict(sent)
        assert verdict.clean
        # A takeover begins above the ack floor of a partition, or its record: what was done above it comes again.
        assert len(verdict.duplicated) <= 500 * len(b.partitions)
        return verdict

    async def shared(self, *workers: Worker) -> None:
        """Wait until these own all partitions together, each some."""
        await until(
            lambda: [worker.partitions for worker in workers],
            lambda owned: all(owned) and sorted(sum(owned, ())) == sorted(map(str, range(PARTITIONS))),
        )


async def owns_all(count: int, *workers: Worker) -> None:
    """Wait until these workers own this many partitions together, each some."""
    await until(
        lambda: [worker.partitions for worker in workers],
        lambda owned: all(owned) and len(sum(owned, ())) == len(set(sum(owned, ()))) == count,
    )


def cut_link(connection: Connection) -> None:
    """End the link of a connection, unnoticed so far."""
    transport = connection.nats._transport
    assert isinstance(transport, DirectTransport)
    if transport._wire is not None and transport._wire.transport is not None:
        transport._wire.transport.abort()


class WorkerProcess:
    """What a worker in a process has written so far."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, ground: FleetGround) -> None:
        self._name = name
        self.process = process
        self._ground = ground
        self.partitions: list[str] = []
        self.retrying: list[int] = []
        """Sequences whose delayed retry it has begun, if it says so."""

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            if not raw.endswith(b"\n"):
                return  # cut off by the kill
            line = json.loads(raw)
            if "partitions" in line:
                self.partitions = line["partitions"]
            elif "retrying" in line:
                self.retrying.append(line["retrying"])
            else:
                self._ground.evidence.lines.append(
                    Line(line["at"], self._name, line["partition"], line["key"], line["sequence"], "", b"")
                )
