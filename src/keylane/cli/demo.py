"""`keylane demo`: orders are published and handled in order while the active reader is killed.

Everything is real: an embedded nats-server, two reader processes, a SIGKILL. The verdict comes from what the
readers wrote down, judged by `keylane.testing`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from keylane.jetstream.connection import Connection
    from keylane.testing import Effect, Verdict

STREAM = "ORDERS"
CONSUMER = "billing"
CUSTOMERS = 12
PIN_TIMEOUT_S = 1.5
_START_DEADLINE_S = 20.0
_FINISH_DEADLINE_S = 30.0


@dataclass(slots=True)
class Reader:
    """A reader process, as its own words tell."""

    name: str
    process: asyncio.subprocess.Process
    state: str = "starting"
    handled: int = 0
    newest: int = 0


@dataclass(slots=True)
class Run:
    """What the demo knows so far."""

    published: int = 0
    readers: dict[str, Reader] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


def demo(
    seconds: Annotated[float, typer.Option(min=3, max=120, help="How long to publish.")] = 6.0,
    rate: Annotated[int, typer.Option(min=10, max=20_000, help="Orders per second.")] = 2000,
) -> None:
    """Publish orders, read them in order with two processes, kill the active one, and judge the result."""
    verdict = asyncio.run(_demo(seconds, rate))
    raise typer.Exit(0 if verdict.clean else 1)


async def _demo(seconds: float, rate: int) -> Verdict:
    from rich.console import Console
    from rich.live import Live

    import keylane
    from keylane.server import NatsServer
    from keylane.testing import judge

    console = Console()
    console.print("Starting a NATS server with JetStream on this machine ...")
    with NatsServer.start() as server:
        version = ".".join(map(str, server.version))
        console.print(f"nats-server {version} runs at {server.url}")
        async with await keylane.connect(server.url) as connection:
            await _prepare(connection)
            console.print(f"Stream {STREAM}, consumer {CONSUMER!r}: one reader works, one stands by")
            run = Run()
            try:
                with Live(console=console, get_renderable=lambda: _picture(run), refresh_per_second=10):
                    sent = await _perform(connection, server.url, run, seconds, rate)
            finally:
                await _end_readers(run)
    verdict = judge(sent, run.effects)
    _print_verdict(console, verdict)
    return verdict


async def _prepare(connection: Connection) -> None:
    from keylane import priority
    from keylane.jetstream import streams

    await streams.create(
        connection,
        streams.StreamConfig(
            name=STREAM, subjects=["orders.>"], retention=streams.RetentionPolicy.WORK_QUEUE
        ),
    )
    await priority.create(
        connection,
        STREAM,
        priority.ConsumerConfig(
            durable_name=CONSUMER,
            max_ack_pending=500,
            priority_groups=("billing",),
            priority_policy="pinned_client",
            priority_timeout_s=PIN_TIMEOUT_S,
        ),
    )


async def _perform(connection: Connection, url: str, run: Run, seconds: float, rate: int) -> list[int]:
    """The play: two readers, a stream of orders, a kill in the middle. Returns the sequences sent."""
    async with asyncio.TaskGroup() as tasks:
        for name in ("first", "second"):
            run.readers[name] = Reader(name, await _start_reader(url, name))
            tasks.create_task(_listen(run, run.readers[name]))
        await _wait_for(run, _everyone_ready, _START_DEADLINE_S, "the readers did not start")
        killing = tasks.create_task(_kill_the_active(run, seconds / 2))
        sent = await _publish(connection, run, seconds, rate)
        await killing
        await _wait_for(
            run,
            lambda run: len({effect.sequence for effect in run.effects}) >= len(sent),
            _FINISH_DEADLINE_S,
            "not every order was handled in time",
        )
        await _end_readers(run)
    return sent


async def _start_reader(url: str, name: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "keylane.cli.demo_reader", url, STREAM, CONSUMER, name,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def _listen(run: Run, reader: Reader) -> None:
    """Write down what a reader says it did, until it ends."""
    from keylane.testing import Effect

    assert reader.process.stdout is not None
    async for line in reader.process.stdout:
        word, value = json.loads(line)
        if word == "handled":
            for key, sequence in value:
                run.effects.append(Effect(key, sequence, reader.name))
            reader.handled += len(value)
            reader.newest = value[-1][1]
        else:
            reader.state = word
            if word == "active":
                run.story.append(f"reader {reader.name} is pinned: it gets every order")
        run.changed.set()
    await reader.process.wait()
    reader.state = "killed" if reader.state == "killed" else "stopped"
    run.changed.set()


async def _publish(connection: Connection, run: Run, seconds: float, rate: int) -> list[int]:
    from keylane.jetstream.publish import open_publisher

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


async def _kill_the_active(run: Run, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await _wait_for(run, _active, _START_DEADLINE_S, "no reader became active")
    victim = _active(run)
    assert victim is not None
    victim.state = "killed"
    victim.process.kill()
    run.story.append(f"reader {victim.name} was killed (SIGKILL) at order {victim.newest:,}")


async def _end_readers(run: Run) -> None:
    """Closing a reader's standard input tells it to stop; one that does not is killed."""
    for reader in run.readers.values():
        process = reader.process
        if process.returncode is not None:
            continue
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _wait_for(run: Run, condition: Callable[[Run], object], deadline_s: float, problem: str) -> None:
    from keylane.errors import RequestTimeout

    try:
        async with asyncio.timeout(deadline_s):
            while not condition(run):
                run.changed.clear()
                await run.changed.wait()
    except TimeoutError:
        raise RequestTimeout(f"{problem} within {deadline_s:g} s") from None


def _everyone_ready(run: Run) -> bool:
    return all(reader.state != "starting" for reader in run.readers.values())


def _active(run: Run) -> Reader | None:
    return next((reader for reader in run.readers.values() if reader.state == "active"), None)


def _picture(run: Run) -> Table:
    from rich.table import Table

    table = Table(title=f"{run.published:,} orders published, {len(run.effects):,} handled", min_width=72)
    table.add_column("reader")
    table.add_column("state")
    table.add_column("handled", justify="right")
    table.add_column("newest order", justify="right")
    colours = {"active": "green", "standby": "yellow", "killed": "red"}
    for reader in run.readers.values():
        colour = colours.get(reader.state, "white")
        table.add_row(
            reader.name, f"[{colour}]{reader.state}[/]", f"{reader.handled:,}", f"{reader.newest:,}"
        )
    table.caption = "\n".join(run.story[-4:])
    return table


def _print_verdict(console: Console, verdict: Verdict) -> None:
    console.print()
    colour = "green" if verdict.clean else "red"
    console.print(f"[bold {colour}]Verdict:[/] {verdict}")
    if verdict.duplicated:
        console.print(
            f"The {len(verdict.duplicated):,} repeated orders were handled by the killed reader before its "
            "acks left: at least once, in order."
        )
