"""The play behind `keylane demo`: members handle orders in order while one is killed, one added and one dropped.

Everything is real: an embedded nats-server, member processes, a SIGKILL. The verdict comes from what the members wrote
down, judged by `keylane.testing`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

import keylane
from keylane import groups
from keylane.cli.demo_pipelines import GROUP, STREAM, look_back
from keylane.errors import GroupEnded, KeylaneError, RequestTimeout
from keylane.jetstream import streams
from keylane.jetstream.connection import Connection
from keylane.jetstream.publish import open_publisher
from keylane.server import NatsServer
from keylane.testing import Effect, Verdict, judge

PARTITIONS = 10
CUSTOMERS = 100
ACK_WAIT_S = 1.5
_START_DEADLINE_S = 30.0
_FINISH_DEADLINE_S = 30.0
_RATE_WINDOW_S = 1.0


@dataclass(slots=True)
class Instance:
    """A member process, as its own words tell."""

    name: str
    process: asyncio.subprocess.Process
    state: str = "starting"
    partitions: tuple[int, ...] = ()
    handled: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=20_000))

    def rate(self, now: float) -> float:
        while self.recent and self.recent[0] < now - _RATE_WINDOW_S:
            self.recent.popleft()
        return len(self.recent) / _RATE_WINDOW_S


@dataclass(slots=True)
class Run:
    """What the demo knows so far."""

    url: str
    published: int = 0
    instances: dict[str, Instance] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last_picture: Group | None = None
    """Kept when the play is over: the end of its actors is not part of it."""


async def play(seconds: float, rate: int, *, pipelines: bool) -> bool:
    """Perform the demo, drawn live, and judge it; with `pipelines` also on Spark. Returns whether all is clean."""
    console = Console()
    console.print("Starting a NATS server with JetStream on this machine ...")
    with NatsServer.start() as server:
        version = ".".join(map(str, server.version))
        console.print(f"nats-server {version} runs at {server.url}")
        async with await keylane.connect(server.url) as connection:
            await _prepare(connection)
            console.print(f"Stream {STREAM}, elastic group {GROUP!r} of {PARTITIONS} partitions")
            run = Run(server.url)
            sent: list[int] = []
            try:
                with Live(console=console, get_renderable=lambda: _picture(run), refresh_per_second=8):
                    sent = await _perform(connection, run, seconds, rate)
            except* KeylaneError as failures:
                raise failures.exceptions[0] from None
            finally:
                await _end_members(run)
        verdict = judge(sent, run.effects)
        _print_verdict(console, verdict)
        return verdict.clean and (not pipelines or await asyncio.to_thread(look_back, console, server.url))


async def _prepare(connection: Connection) -> None:
    await streams.create(connection, streams.StreamConfig(name=STREAM, subjects=["orders.>"]))
    await groups.create_elastic(
        connection,
        STREAM,
        GROUP,
        max_members=PARTITIONS,
        partitioning=[("orders.*", [1])],
        members=["alice", "bob", "carol"],
    )


async def _perform(connection: Connection, run: Run, seconds: float, rate: int) -> list[int]:
    """The play. Returns the sequences that were sent."""
    async with asyncio.TaskGroup() as tasks:

        async def start(name: str, member: str) -> None:
            run.instances[name] = Instance(name, await _start_process(run.url, member))
            tasks.create_task(_listen(run, run.instances[name]))

        for name in ("alice", "bob", "carol"):
            await start(name, name)
        await start("bob, standby", "bob")
        await _wait_for(run, _everyone_ready, _START_DEADLINE_S, "the members did not start")
        events = tasks.create_task(_events(connection, run, seconds, start))
        sent = await _publish(connection, run, seconds, rate)
        await events
        await _wait_for(
            run,
            lambda run: len({effect.sequence for effect in run.effects}) >= len(sent),
            _FINISH_DEADLINE_S,
            "not every order was handled",
        )
        run.last_picture = _picture(run)
        await _end_members(run)
    return sent


async def _events(connection: Connection, run: Run, seconds: float, start: Callable[[str, str], object]) -> None:
    await asyncio.sleep(seconds / 4)
    await _wait_for(run, _active_bob, _START_DEADLINE_S, "bob did not become active")
    victim = _active_bob(run)
    assert victim is not None
    victim.state = "killed"
    victim.process.kill()
    run.story.append(f"{victim.name} was killed (SIGKILL): the other instance of bob takes over in {ACK_WAIT_S} s")

    await asyncio.sleep(seconds / 4)
    starting = start("dave", "dave")
    assert asyncio.iscoroutine(starting)
    await starting
    await _wait_for(run, _everyone_ready, _START_DEADLINE_S, "dave did not start")
    before = (await groups.get_config(connection, STREAM, GROUP)).plan
    after = (await groups.add_members(connection, STREAM, GROUP, ["dave"], plan="sticky")).plan
    run.story.append(f"dave was added: {len(after.moves_from(before))} of {PARTITIONS} partitions move")

    await asyncio.sleep(seconds / 4)
    gone = (await groups.drop_members(connection, STREAM, GROUP, ["carol"], plan="sticky")).plan
    run.story.append(f"carol was dropped: {len(gone.moves_from(after))} of {PARTITIONS} partitions move")


async def _start_process(url: str, member: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "keylane.cli.demo_member", url, STREAM, GROUP, member, str(ACK_WAIT_S),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def _listen(run: Run, instance: Instance) -> None:
    """Write down what a member says it did, until it ends."""
    assert instance.process.stdout is not None
    async for line in instance.process.stdout:
        word, value = json.loads(line)
        if word == "handled":
            run.effects.append(Effect(value[0], value[1], instance.name))
            instance.handled += 1
            instance.recent.append(time.monotonic())
        elif word == "partitions":
            instance.partitions = tuple(value)
        elif instance.state != "killed":
            instance.state = word
        run.changed.set()
    await instance.process.wait()
    instance.partitions = ()
    if instance.state != "killed":
        instance.state = "stopped"
        if instance.process.returncode:
            raise GroupEnded(f"the demo's member {instance.name} failed: its own words are above")
    run.changed.set()


async def _publish(connection: Connection, run: Run, seconds: float, rate: int) -> list[int]:
    loop = asyncio.get_running_loop()
    start = loop.time()
    pending = []
    async with open_publisher(connection) as publisher:
        for number in range(int(seconds * rate)):
            pending.append(await publisher.send(f"orders.customer-{number % CUSTOMERS}", b"%d" % number))
            run.published = number + 1
            ahead_s = start + number / rate - loop.time()
            if ahead_s > 0.01:
                await asyncio.sleep(ahead_s)
    return [(await one).sequence for one in pending]


async def _end_members(run: Run) -> None:
    """Closing a member's standard input tells it to stop; one that does not is killed."""
    alive = [one.process for one in run.instances.values() if one.process.returncode is None]
    for process in alive:
        assert process.stdin is not None
        process.stdin.close()
    for process in alive:
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _wait_for(run: Run, condition: Callable[[Run], object], deadline_s: float, problem: str) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            while not condition(run):
                run.changed.clear()
                await run.changed.wait()
    except TimeoutError:
        raise RequestTimeout(f"{problem} within {deadline_s:g} s") from None


def _active_bob(run: Run) -> Instance | None:
    return next((one for name, one in run.instances.items() if name.startswith("bob") and one.state == "active"), None)


def _everyone_ready(run: Run) -> bool:
    return all(one.state != "starting" for one in run.instances.values())


def _picture(run: Run) -> Group:
    if run.last_picture is not None:
        return run.last_picture
    now = time.monotonic()  # drawn in rich's own thread, which has no event loop
    table = Table(title=f"{run.published:,} orders published, {len(run.effects):,} handled", min_width=76)
    for column in ("member", "state", "partitions"):
        table.add_column(column)
    for column in ("handled", "orders/s"):
        table.add_column(column, justify="right")
    colours = {"active": "green", "standby": "yellow", "killed": "red"}
    for one in run.instances.values():
        state = "no partitions" if one.state == "active" and not one.partitions else one.state
        table.add_row(
            one.name,
            f"[{colours.get(state, 'white')}]{state}[/]",
            " ".join(map(str, one.partitions)) if state == "active" else "-",
            f"{one.handled:,}",
            f"{one.rate(now):,.0f}",
        )
    return Group(table, *run.story)


def _print_verdict(console: Console, verdict: Verdict) -> None:
    console.print()
    colour = "green" if verdict.clean else "red"
    console.print(f"[bold {colour}]Verdict:[/] {verdict}")
    if verdict.duplicated:
        console.print(
            f"The {len(verdict.duplicated):,} repeated orders were handled by the killed process before their acks "
            "arrived: at least once, in order."
        )
