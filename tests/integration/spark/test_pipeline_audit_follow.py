"""An audit that follows the stream, while members work, through a kill and a restart: in the end it says what one batch
over everything says, every finding once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import keylane
from keylane import Connection, groups
from keylane.groups import GroupMessage
from keylane.journal import Journal
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines import audit
from tests.integration.spark import audit_follower
from tests.integration.spark import journal_rig as rig
from tests.integration.spark.planted import faulty, findings_in, told
from tests.peers.java import LIGHT_JAVA
from tests.waiter import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

KEYS, WAVE, WAVES = 20, 200, 4
DEADLINE_S = 400.0


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    async with rig.named(connection, unique("orders")) as name:
        await rig.make_stream(connection, name)
        await rig.make_group(connection, name)
        yield name


# ---- members, one of which keeps no order ---------------------------------------------------------------


class Work:
    """What is published in waves, and handled by two members. One message is lost, and one of each wave overtaken."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self.connection = connection
        self.stream = stream
        self.published = 0
        self.done: set[int] = set()
        bobs = [number for number in range(KEYS) if rig.partition_of(f"k{number}") >= rig.PARTITIONS // 2]
        self.lost = KEYS * 3 + bobs[0] + 1
        self.overtaken = {WAVE * wave + bobs[1] + 1 for wave in range(WAVES)}

    async def publish_wave(self) -> None:
        await rig.publish(self.connection, self.stream, [f"k{number % KEYS}" for number in range(WAVE)])
        self.published += WAVE

    async def lose(self) -> None:
        """Somebody takes a message out of the queue, and does nothing with it."""
        await rig.empty_queue(self.connection, self.stream, self.published, keep=lambda sequence: sequence != self.lost)

    async def until_done(self) -> None:
        await until(lambda: len(self.done) == self.published - 1, deadline_s=DEADLINE_S)

    async def handle(self, message: GroupMessage) -> None:
        if message.sequence in self.overtaken:
            await until(lambda: message.sequence + KEYS in self.done, deadline_s=DEADLINE_S)  # the next one of its key
        self.done.add(message.sequence)

    @asynccontextmanager
    async def members(self, url: str) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for name, order in (("alice", "key"), ("bob", "none")):
                own = await stack.enter_async_context(await keylane.connect(url))
                journal = await stack.enter_async_context(Journal(own, stream=self.stream))
                member = await groups.join(
                    own, self.stream, rig.GROUP, name, self.handle, journal=journal, order=order, concurrency=4  # type: ignore[arg-type]
                )  # fmt: skip
                stack.push_async_callback(member.stop)
            yield


# ---- followers ------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process and all that it starts, gone in the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **LIGHT_JAVA},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()


def half_done(work: Path) -> str | None:
    """A batch of the journal that was begun and not ended, after one that was ended."""
    begun, ended = (
        {one.name for one in (work / "checkpoint" / "journal" / name).glob("[0-9]*")} for name in ("offsets", "commits")
    )
    return min(begun - ended, default=None) if ended else None


def verdict_of(work: Path) -> int:
    """Which verdict is in place: another number, another verdict."""
    findings = work / "findings" / "_SUCCESS"
    return findings.stat().st_mtime_ns if findings.exists() else 0


async def until_new_verdicts(work: Path, process: asyncio.subprocess.Process, times: int = 1) -> None:
    for _ in range(times):
        before = verdict_of(work)

        def is_there(before: int = before) -> bool:
            assert process.returncode is None, "the audit ended"
            return verdict_of(work) not in (0, before)

        await until(is_there, deadline_s=DEADLINE_S)


async def test_killed_in_the_midst_and_restarted_it_says_what_a_batch_says(
    spark: SparkSession, connection: Connection, nats_server: NatsServer, stream: str, tmp_path: Path
) -> None:
    """The first one is the function, killed with all that it started; the second one the command, ended by Ctrl-C."""
    work, batch_work = tmp_path / "work", tmp_path / "batch"
    asked: dict[str, Any] = {"stream": stream, "group": rig.GROUP, "tolerance_s": 0.0, "settle_s": 0.0}
    doing = Work(connection, stream)
    await doing.publish_wave()
    await doing.lose()
    async with AsyncExitStack() as members:
        await members.enter_async_context(doing.members(nats_server.url))
        following = json.dumps(asked | {"work": str(work), "interval_s": 0.0})
        async with running("-m", audit_follower.__name__, str(tmp_path / "spark"), nats_server.url, following) as first:
            await until_new_verdicts(work, first)
            await doing.publish_wave()
            await kill_in_the_midst(work, first)
        await doing.publish_wave()
        await doing.until_done()
        async with running(
            *("-m", "keylane.cli.main", "pipeline", "run", "audit", "--stream", stream, "--group", rig.GROUP),
            *("--server", nats_server.url, "--master", "local[2]", "--work", str(work), "--follow"),
            *("--interval", "0", "--tolerance", "0", "--settle", "0", "--json"),
        ) as second:
            await until_new_verdicts(work, second)
            await doing.publish_wave()
            await doing.until_done()
            await members.aclose()
            await until_new_verdicts(work, second, 2)  # the second of them began after all had ended
            os.killpg(second.pid, signal.SIGINT)  # as a terminal does
            async with asyncio.timeout(DEADLINE_S):
                stdout, stderr = (text.decode() for text in await second.communicate())
    settings = audit.Settings(address=Address(url=nats_server.url), work=str(batch_work), **asked)
    batch = await asyncio.to_thread(audit.run, spark, settings)
    assert second.returncode == batch.exit_code == 3, stderr
    streamed = json.loads(stdout)
    assert told(streamed) == told(batch.as_json())
    assert streamed["stopped"]
    assert stderr.endswith("stopped; run the same command to go on where it was\n"), stderr
    assert batch.facts["handled"] == WAVE * WAVES - 1
    assert batch.violations["lost"] == 1
    assert doing.overtaken <= {json.loads(row)["sequence"] for row in findings_in(batch_work)}
    assert findings_in(work) == findings_in(batch_work)


async def kill_in_the_midst(work: Path, process: asyncio.subprocess.Process) -> None:
    """It stands still while it is looked at: where the batch has ended meanwhile, the next one is waited for."""
    half: str | None = None
    async with asyncio.timeout(DEADLINE_S):
        while half is None:
            assert process.returncode is None
            await asyncio.sleep(0.005)
            if half_done(work) is not None:
                os.killpg(process.pid, signal.SIGSTOP)
                half = half_done(work)
                if half is None:
                    os.killpg(process.pid, signal.SIGCONT)
    os.killpg(process.pid, signal.SIGKILL)
    await process.communicate()
    assert half_done(work) == half, "it was not in the midst of a batch any more"


async def test_as_a_function_it_follows_until_it_is_told_to_stop(
    spark: SparkSession, connection: Connection, nats_server: NatsServer, stream: str, tmp_path: Path
) -> None:
    past, _, _ = faulty()
    batches = past.batches(stream)
    asked: dict[str, Any] = {
        "stream": stream, "group": rig.GROUP, "address": Address(url=nats_server.url), "tolerance_s": 0.1,
        "settle_s": 0.0, "complete": True,
    }  # fmt: skip
    await rig.publish(connection, stream, past.keys[:3_000])
    await rig.write(connection, stream, batches[:3])
    stop, verdicts = threading.Event(), []
    settings = audit.Settings(**asked, work=str(tmp_path / "work"), follow=True, interval_s=0.0)

    def say(line: str) -> None:
        if line.startswith(f"{stream}/{rig.GROUP}: "):
            verdicts.append(line)

    following = asyncio.create_task(asyncio.to_thread(audit.run, spark, settings, say, stop=stop))
    try:
        await until(lambda: bool(verdicts) or following.done(), deadline_s=DEADLINE_S)
        await rig.publish(connection, stream, past.keys[3_000:])
        await rig.empty_queue(connection, stream, len(past.keys))
        await rig.write(connection, stream, batches[3:])
        seen = len(verdicts)
        await until(
            lambda: len(verdicts) > seen + 1 or following.done(), deadline_s=DEADLINE_S
        )  # the second of them began after that
    finally:
        stop.set()
    followed = await following
    batch = await asyncio.to_thread(audit.run, spark, audit.Settings(**asked, work=str(tmp_path / "batch")))
    assert (followed.stopped, followed.exit_code) == (True, 3)
    assert told(followed.as_json()) == told(batch.as_json())
    assert findings_in(tmp_path / "work") == findings_in(tmp_path / "batch") != []
