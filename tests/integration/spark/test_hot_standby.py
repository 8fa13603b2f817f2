"""Two real drivers of one query: one works, the other waits, and takes over whatever happens to the first."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it has no types
import pytest

from keylane import Connection
from keylane.jetstream import Outgoing, StreamConfig, consumers, publish_many, streams
from keylane.server import NatsServer
from keylane.spark import register
from keylane.spark.driver.lease import LeaseRecord
from keylane.spark.query_records import bucket_of, lease_key
from tests.peers.java import LIGHT_JAVA
from tests.peers.store import REPOSITORY
from tests.waiter import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Unique = Callable[..., str]

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

LEASE_S, DEADLINE_S = 6.0, 180.0
WAITS = "this driver waits and takes over if that one ends"
TOOK_OVER = "this driver has the lease now"


class Driver:
    """A running `query_driver`: its process, and all processes that it started, are one session of the machine."""

    def __init__(self, directory: Path, plan: dict[str, str], options: dict[str, str]) -> None:
        self._said, self._logged = directory / "said.txt", directory / "logged.txt"
        directory.mkdir()
        with self._said.open("w") as said, self._logged.open("w") as logged:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.integration.spark.query_driver",
                    str(directory / "spark"),
                    json.dumps(plan),
                    json.dumps(options),
                ],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=logged,
                text=True,
                start_new_session=True,
                env=os.environ | LIGHT_JAVA,
            )

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def said(self, text: str) -> int:
        return self._said.read_text().count(text)

    def logged(self, text: str) -> int:
        return self._logged.read_text().count(text)

    def last_words(self) -> str:
        return f"{self._said.read_text()}\n{self._logged.read_text()[-4000:]}"

    def processes(self) -> list[int]:
        """All that this driver started and that still runs: JVM, Python workers, daemons."""
        return [pid for pid, session in sessions() if session == self.process.pid]

    def signal(self, number: int) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def sessions() -> Iterator[tuple[int, int]]:
    """Every process of the machine that is not a zombie, and its session."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z":
                    yield int(entry.name), int(session)


@contextmanager
def driver(directory: Path, plan: dict[str, str], options: dict[str, str]) -> Iterator[Driver]:
    started = Driver(directory, plan, options)
    try:
        yield started
    except BaseException:
        sys.stderr.write(f"---- {directory.name} ----\n{started.last_words()}\n")
        raise
    finally:
        started.signal(signal.SIGCONT)
        started.signal(signal.SIGKILL)
        started.process.wait(30)
        assert started.process.stdin is not None
        started.process.stdin.close()


def written(output: Path) -> list[int]:
    """The sequences in the files that the sink's log names: what any reader of the table sees."""
    files: set[str] = set()
    for entry in (output / "_spark_metadata").glob("[0-9]*"):
        files |= {json.loads(line)["path"] for line in entry.read_text().splitlines()[1:]}
    found: list[int] = []
    for name in files:
        found += pq.read_table(name.removeprefix("file://"))["sequence"].to_pylist()
    return sorted(found)


@pytest.fixture
async def stream(connection: Connection, unique: Unique) -> AsyncIterator[str]:
    name = unique("ORDERS")
    await streams.create(connection, StreamConfig(name=name, subjects=[f"{name}.>"]))
    yield name
    await streams.delete(connection, name)


async def publish(connection: Connection, stream: str, count: int) -> int:
    """Publish so many more; returns the last sequence."""
    await publish_many(connection, [Outgoing(f"{stream}.{number % 7}", b"x" * 32) for number in range(count)])
    return (await streams.state(connection, stream)).last_sequence


async def released(connection: Connection, query: str) -> None:
    """Wait for the lease to be deleted. One that merely ran out stays there."""
    await until(lambda: bucket_of(connection).get(lease_key(query)), lambda entry: not LeaseRecord.of(entry), 60)


async def test_a_standby_follows_a_frozen_and_a_killed_driver_and_every_message_is_written_once(
    connection: Connection, nats_server: NatsServer, stream: str, tmp_path: Path, unique: Unique
) -> None:
    query = unique("query")
    output = tmp_path / "output"
    plan = {"output": str(output), "checkpoint": str(tmp_path / "checkpoint")}
    options = {
        "url": nats_server.url,
        "stream": stream,
        "queryName": query,
        "leaseSeconds": str(LEASE_S),
        "maxOffsetsPerTrigger": "40",
    }
    with driver(tmp_path / "first", plan, options) as first, driver(tmp_path / "second", plan, options) as second:
        await until(lambda: first.said("ready") and second.said("ready"), deadline_s=DEADLINE_S)
        last = await publish(connection, stream, 120)
        first.tell("start")
        await until(lambda: len(written(output)) >= 40, deadline_s=DEADLINE_S)
        second.tell("start")
        await until(lambda: second.logged(WAITS), deadline_s=DEADLINE_S)
        await until(lambda: written(output) == list(range(1, last + 1)), deadline_s=DEADLINE_S)
        assert first.said("ended") == second.said("ended") == 0

        # Frozen in the middle of its work, for longer than its lease.
        last = await publish(connection, stream, 200)
        await until(lambda: len(written(output)) > last - 200, deadline_s=DEADLINE_S)
        first.signal(signal.SIGSTOP)
        frozen_at = time.monotonic()
        await until(lambda: second.logged(TOOK_OVER), deadline_s=DEADLINE_S)
        assert time.monotonic() - frozen_at < LEASE_S + 15
        await until(lambda: written(output) == list(range(1, last + 1)), deadline_s=DEADLINE_S)
        first.signal(signal.SIGCONT)
        await until(lambda: first.said("ended"), deadline_s=DEADLINE_S)
        assert second.said("ended") == 0
        assert first.said("does not hold the lease") or first.said("CONCURRENT") or first.said("oncurrent")

        # Started again it stands by, until the other one is killed: JVM, Python and all.
        first.tell("start")
        await until(lambda: first.logged(WAITS), deadline_s=DEADLINE_S)
        last = await publish(connection, stream, 200)
        await until(lambda: len(written(output)) > last - 200, deadline_s=DEADLINE_S)
        second.signal(signal.SIGKILL)
        killed_at = time.monotonic()
        await until(lambda: first.logged(TOOK_OVER), deadline_s=DEADLINE_S)
        assert time.monotonic() - killed_at < LEASE_S + 15
        await until(lambda: not second.processes(), deadline_s=30)
        await until(lambda: written(output) == list(range(1, last + 1)), deadline_s=DEADLINE_S)
        last = await publish(connection, stream, 50)
        await until(lambda: written(output) == list(range(1, last + 1)), deadline_s=DEADLINE_S)
        assert first.said("ended") == 1

        # Every NATS tool sees how far the query is.
        await until(
            lambda: consumers.info(connection, stream, f"spark-{query}"),
            lambda seen: not seen.num_pending,
            deadline_s=30,
        )

        # A query that is stopped gives its lease back.
        first.tell("stop")
        await until(lambda: first.said("ended") == 2, deadline_s=DEADLINE_S)
        await released(connection, query)
        first.tell("end")
        await until(lambda: first.said("bye"), deadline_s=DEADLINE_S)


async def test_a_driver_whose_jvm_dies_leaves_no_process_that_holds_or_takes_the_lease(
    connection: Connection, nats_server: NatsServer, stream: str, tmp_path: Path, unique: Unique
) -> None:
    """Only the JVMs are killed: their Python children must notice by themselves, at work and while they wait."""
    query = unique("query")
    plan = {"output": str(tmp_path / "output"), "checkpoint": str(tmp_path / "checkpoint")}
    # Nobody waits for the end of such a lease: what follows happens because a child noticed.
    options = {"url": nats_server.url, "stream": stream, "queryName": query, "leaseSeconds": "600"}
    await publish(connection, stream, 50)
    with driver(tmp_path / "first", plan, options) as first, driver(tmp_path / "second", plan, options) as second:
        await until(lambda: first.said("ready") and second.said("ready"), deadline_s=DEADLINE_S)
        first.tell("start")
        await until(lambda: written(tmp_path / "output"), deadline_s=DEADLINE_S)
        second.tell("start")
        await until(lambda: second.logged(WAITS), deadline_s=DEADLINE_S)
        kill_jvm(second)
        await until(lambda: not source_runners(second), deadline_s=30)
        assert not second.logged(TOOK_OVER)
        kill_jvm(first)
        await until(lambda: not source_runners(first), deadline_s=30)
        await released(connection, query)


async def test_a_query_that_ended_or_was_stopped_starts_again_at_once(
    spark: SparkSession, connection: Connection, nats_server: NatsServer, stream: str, tmp_path: Path
) -> None:
    register(spark)
    query = f"query-{stream}"
    options = {"url": nats_server.url, "stream": stream, "queryName": query, "leaseSeconds": "600"}
    read = spark.readStream.format("keylane").options(**options).load()
    write = read.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    await publish(connection, stream, 10)
    for _ in range(2):
        once = await asyncio.to_thread(write.trigger(availableNow=True).start)
        assert await asyncio.to_thread(once.awaitTermination, 120)
        await released(connection, query)
    running = await asyncio.to_thread(write.trigger(processingTime="100 milliseconds").start)
    try:
        await publish(connection, stream, 10)
        await until(lambda: any(one["numInputRows"] for one in running.recentProgress), deadline_s=DEADLINE_S)
    finally:
        await asyncio.to_thread(running.stop)
    await released(connection, query)


def command_of(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def source_runners(of: Driver) -> list[int]:
    return [pid for pid in of.processes() if "python_streaming_source_runner" in command_of(pid)]


def kill_jvm(of: Driver) -> None:
    found = [pid for pid in of.processes() if "org.apache.spark.deploy.SparkSubmit" in command_of(pid)]
    assert len(found) == 1
    assert source_runners(of)
    os.kill(found[0], signal.SIGKILL)
