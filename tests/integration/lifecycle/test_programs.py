"""Every whole program that README, docs and examples show stops cleanly when it is interrupted.

No traceback, exit code 0, and what it did not handle is handled by the next one: nothing lost, nothing twice, in order.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals

import pytest

import keylane
from keylane import Connection, groups
from keylane.jetstream import streams
from keylane.server import NatsServer
from tests.integration.chaos.test_chaos_short import MARK, left_behind
from tests.waiter import until

ROOT = Path(__file__).parents[3]
README_URL = "nats://127.0.0.1:4222"
KEYS = 20
DEADLINE_S = 40.0

pytestmark = pytest.mark.timeout(120)


def program(page: str, *, containing: str = "") -> str:
    """The first whole program of a page that has this in it."""
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if ".run(" in block and (containing or "keylane.run(") in block)


class Running:
    """A program as a user would run it, in a process of its own, read line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.decode().rstrip("\n")))

    async def until(self, is_so: Callable[[], bool]) -> None:
        await until(lambda: is_so() or self.process.returncode is not None, deadline_s=DEADLINE_S)
        assert is_so(), await self._complaints()

    async def end(self, by: Signals) -> tuple[int | None, str]:
        """Interrupt it as a terminal (SIGINT, to its children too) or a supervisor (SIGTERM) does."""
        if by is SIGINT:
            os.killpg(self.process.pid, by)
        else:
            self.process.send_signal(by)
        async with asyncio.timeout(DEADLINE_S):
            complaints = await self._complaints()
            await self._reading
            return await self.process.wait(), complaints

    async def _complaints(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


@asynccontextmanager
async def running(*command: str, **environment: str) -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", *command,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True, env=os.environ | environment,
    )  # fmt: skip
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# ---- programs that take part in something ---------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """One for each test, as the programs use names of their own."""
    with NatsServer.start() as started:
        yield started


@pytest.fixture
async def ground(server: NatsServer) -> AsyncIterator[Connection]:
    async with keylane.connect(server.url) as connection:
        yield connection


async def plain_stream(connection: Connection) -> None:
    await streams.create(connection, streams.StreamConfig(name="ORDERS", subjects=["orders.>"]))


async def stream_with_group(connection: Connection) -> None:
    await plain_stream(connection)
    await groups.create_elastic(
        connection, "ORDERS", "billing", partitions=4, partition_by="orders.*", members=["alice"]
    )


async def parted_stream(connection: Connection) -> None:
    transform = {"src": "orders.*", "dest": "{{Partition(4,1)}}.orders.{{Wildcard(1)}}"}
    config = {"name": "ORDERS", "subjects": ["orders.*"], "subject_transform": transform}
    await connection.api.request("STREAM.CREATE.ORDERS", config)


class Load:
    """Publishes numbers, the keys in turns, until it is told to end."""

    def __init__(self, connection: Connection, subject: str) -> None:
        self.sent = 0
        self._connection = connection
        self._subject = subject
        self._ending = False
        self._task = asyncio.create_task(self._publish())

    async def _publish(self) -> None:
        while not self._ending:
            key = f"k{self.sent % KEYS}"
            await self._connection.jetstream.publish(self._subject.format(key), b"%d" % self.sent)
            self.sent += 1
            await asyncio.sleep(0.003)

    async def end(self) -> None:
        self._ending = True
        await self._task


def numbers(lines: list[tuple[float, str]]) -> list[int]:
    """The payloads that the handler printed, as its last word: `b'7'` or `7`."""
    return [int(line.split()[-1].strip("b'")) for _, line in lines]


def check_handed_over(sent: int, first: Running, second: Running) -> None:
    handled = numbers(sorted(first.lines + second.lines))
    assert sorted(handled) == list(range(sent)), "nothing lost, nothing twice"
    by_key = defaultdict(list)
    for number in handled:
        by_key[number % KEYS].append(number)
    assert all(of_one == sorted(of_one) for of_one in by_key.values()), "in order"


@pytest.mark.parametrize(
    ("page", "prepare", "subject", "by"),
    [
        ("docs/groups.md", plain_stream, "orders.{}", SIGINT),
        ("docs/groups.md", plain_stream, "orders.{}", SIGTERM),
        ("docs/journal.md", stream_with_group, "orders.{}", SIGTERM),
    ],
)
async def test_a_member_hands_over_to_its_standby(  # noqa: PLR0917 - a row of the table above, and its ground
    server: NatsServer,
    ground: Connection,
    page: str,
    prepare: Callable[[Connection], Awaitable[None]],
    subject: str,
    by: Signals,
) -> None:
    await prepare(ground)
    code = program(page).replace(README_URL, ground.server)
    # The program of the groups' page plays whom it is told: alice has all partitions here.
    code = code.replace('members=["alice", "bob"]', 'members=["alice"]')
    command = ("-W", "error", "-c", code, "alice")
    load = Load(ground, subject)
    async with running(*command, NATS_URL=ground.server) as first:
        await first.until(lambda: len(first.lines) > 50)
        async with running(*command, NATS_URL=ground.server) as second:
            await two_instances(server)
            assert await first.end(by) == (0, "")
            await second.until(lambda: len(second.lines) > 100)
            await load.end()
            await second.until(lambda: len(first.lines) + len(second.lines) >= load.sent)
            assert await second.end(by) == (0, "")
    check_handed_over(load.sent, first, second)
    gap_s = second.lines[0][0] - first.lines[-1][0]
    assert gap_s < 1.5, "a pin's timeout is longer"


@pytest.mark.parametrize("page", ["README.md", "docs/fleet.md"])
async def test_a_worker_of_a_fleet_hands_over_to_another(ground: Connection, page: str) -> None:
    transform = {"src": "orders.*", "dest": "{{Partition(32,1)}}.orders.{{Wildcard(1)}}"}
    config = {"name": "ORDERS", "subjects": ["orders.*"], "subject_transform": transform, "allow_direct": True}
    await ground.api.request("STREAM.CREATE.ORDERS", config)
    code = program(page, containing="keylane.App(" if page == "README.md" else "")
    for before, after in (
        (README_URL, ground.server),
        ("=10", "=32"),
        ("order: Order", "order: int"),
        (".cents)", ")"),
    ):
        code = code.replace(before, after)  # the load publishes numbers
    command = ("-W", "error", "-c", code)
    load = Load(ground, "orders.{}")
    async with running(*command, NATS_URL=ground.server) as first:
        await first.until(lambda: len(first.lines) > 50)
        async with running(*command, NATS_URL=ground.server) as second:
            await second.until(lambda: len(second.lines) > 10)
            assert await first.end(SIGTERM) == (0, "")
            await load.end()
            await second.until(lambda: len(first.lines) + len(second.lines) >= load.sent)
            assert await second.end(SIGINT) == (0, "")
    check_handed_over(load.sent, first, second)


async def two_instances(server: NatsServer) -> None:
    """Wait until both pull: each listens for answers, to the group's record, and for messages."""
    await until(
        lambda: [one["subscriptions"] for one in server.monitor("connz")["connections"]],
        lambda found: sum(number >= 3 for number in found) >= 2,
        deadline_s=DEADLINE_S,
    )


@pytest.mark.parametrize("by", [SIGINT, SIGTERM])
async def test_a_marshal_consumer_releases_for_the_next(ground: Connection, by: Signals) -> None:
    await parted_stream(ground)
    code = program("docs/marshal.md", containing="open_jetstream_log")
    load = Load(ground, "orders.{}")
    async with running("-W", "error", "-c", code, NATS_URL=ground.server) as first:
        await first.until(lambda: len(first.lines) > 50)
        assert await first.end(by) == (0, "")
    async with running("-W", "error", "-c", code.replace("worker-1", "worker-2"), NATS_URL=ground.server) as second:
        await second.until(lambda: len(second.lines) > 50)
        await load.end()
        await second.until(lambda: len(first.lines) + len(second.lines) >= load.sent)
        assert await second.end(by) == (0, "")
    check_handed_over(load.sent, first, second)


# ---- programs that bring their own server ---------------------------------------------------------------


@pytest.mark.parametrize("by", [SIGINT, SIGTERM])
async def test_a_feed_that_reads_for_ever_is_left(by: Signals, unique: Callable[..., str]) -> None:
    code = program("docs/jetstream.md").replace("== 1000:", "== 0:").replace(".ack()", ".ack() or print('acked')")
    mark = unique("feed")
    async with running("-W", "error", "-c", code, **{MARK: mark}) as reader:
        await reader.until(lambda: bool(reader.lines))
        assert await reader.end(by) == (0, "")
    assert left_behind(mark) == []


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
async def test_an_example_takes_its_processes_along(example: Path, unique: Callable[..., str]) -> None:
    mark = unique("example")
    by = SIGINT if len(example.stem) % 2 else SIGTERM  # some this way, some that way
    async with running("-W", "error", str(example), **{MARK: mark}) as story:
        await story.until(lambda: len(story.lines) >= 2)
        assert await story.end(by) == (0, "")
    assert left_behind(mark) == []
