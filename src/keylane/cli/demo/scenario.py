"""The scenario of `keylane demo`: members handle orders in order while one is killed, one added and one dropped.

Everything is real: an embedded nats-server, member processes, a SIGKILL. `keylane.testing` judges the verdict from the
events that the members report.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

import keylane
from keylane import groups
from keylane.cli.demo.member import JOURNAL_FLUSH_S
from keylane.errors import GroupEnded, KeylaneError, RequestTimeout
from keylane.extras import install_command
from keylane.jetstream import Connection, open_publisher, streams
from keylane.server import NatsServer
from keylane.testing import DeliveryVerdict, Effect, judge

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 10
CUSTOMERS = 100
HOT_CUSTOMER = 7
CHART = "keylane-demo.png"
_BAR_CELLS = 40
_ROWS = 5
ACK_WAIT_S = 1.5
_START_DEADLINE_S = 30.0
_FINISH_DEADLINE_S = 30.0
_RATE_WINDOW_S = 1.0


@dataclass(slots=True)
class DemoInstance:
    """A member process, as it reports itself."""

    name: str
    member: str
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
class DemoRun:
    """What the demo knows so far."""

    url: str
    published: int = 0
    instances: dict[str, DemoInstance] = field(default_factory=dict)
    effects: list[tuple[float, Effect]] = field(default_factory=list)
    """When each order was handled, by the machine's monotonic clock."""
    members: tuple[str, ...] = ("alice", "bob", "carol")
    """The members of the group now."""
    dropped: tuple[str, ...] = ()
    killed: tuple[float, DemoInstance] | None = None
    story: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last_picture: Group | None = None
    """Kept when the scenario is over: the end of its processes is not part of it."""


def run_demo(console: Console, seconds: float, rate: int, *, pipelines: bool) -> bool:
    """The whole demo on a server of its own. Returns whether all is clean."""
    console.print("Starting a NATS server with JetStream on this machine ...")
    with NatsServer.start() as server:
        version = ".".join(map(str, server.version))
        console.print(f"nats-server {version} runs at {server.url}")
        clean = keylane.run(_run(console, server.url, seconds, rate))
        clean = clean and (not pipelines or run_pipelines(console, server.url))
    _print_next(console)
    return clean


async def _run(console: Console, url: str, seconds: float, rate: int) -> bool:
    """Run the scenario with a live table and judge it. Returns whether the verdict is clean."""
    run = DemoRun(url)
    async with keylane.connect(url) as connection:
        await _prepare(connection, run)
        console.print(f"Stream {STREAM}, elastic group {GROUP!r} of {PARTITIONS} partitions")
        sent: list[int] = []
        try:
            with Live(console=console, get_renderable=lambda: _picture(run), refresh_per_second=8):
                sent = await _run_events(connection, run, seconds, rate)
        except* KeylaneError as failures:
            raise failures.exceptions[0] from None
        finally:
            await _end_members(run)
    verdict = judge(sent, [effect for _, effect in sorted(run.effects)])
    _print_verdict(console, verdict)
    return verdict.clean


async def _prepare(connection: Connection, run: DemoRun) -> None:
    await streams.create(connection, streams.StreamConfig(name=STREAM, subjects=["orders.>"]))
    await groups.create_elastic(
        connection, STREAM, GROUP, partitions=PARTITIONS, partition_by="orders.*", members=run.members
    )


async def _run_events(connection: Connection, run: DemoRun, seconds: float, rate: int) -> list[int]:
    """Returns the sequences that were sent."""
    async with asyncio.TaskGroup() as tasks:
        for name in ("alice", "bob #1", "bob #2", "carol", "dave"):
            member = name.split()[0]
            run.instances[name] = DemoInstance(name, member, await _start_process(run.url, member))
            tasks.create_task(_listen(run, run.instances[name]))
        await _wait_for(run, _everyone_ready, _START_DEADLINE_S, "the members did not start")
        events = tasks.create_task(_change_members(connection, run, seconds))
        sent = await _publish(connection, run, seconds, rate)
        await events
        await _wait_for(
            run,
            lambda run: len({effect.sequence for _, effect in run.effects}) >= len(sent),
            _FINISH_DEADLINE_S,
            "not every order was handled",
        )
        run.last_picture = _picture(run)
        await _end_members(run)
    return sent


async def _change_members(connection: Connection, run: DemoRun, seconds: float) -> None:
    await asyncio.sleep(seconds / 4)
    await _wait_for(run, _active_bob, _START_DEADLINE_S, "bob did not become active")
    victim = _active_bob(run)
    assert victim is not None
    victim.state = "killed"
    run.killed = time.monotonic(), victim
    victim.process.kill()
    run.story.append(f"{victim.name} was killed (SIGKILL): its standby has not taken over yet")

    await asyncio.sleep(seconds / 4)
    before = (await groups.get_config(connection, STREAM, GROUP)).plan
    after = (await groups.add_members(connection, STREAM, GROUP, ["dave"], plan="sticky")).plan
    run.members = after.members
    run.story.append(f"dave was added: {len(after.moves_from(before))} of {PARTITIONS} partitions move")

    await asyncio.sleep(seconds / 4)
    gone = (await groups.drop_members(connection, STREAM, GROUP, ["carol"], plan="sticky")).plan
    run.members, run.dropped = gone.members, ("carol",)
    run.story.append(f"carol was dropped: {len(gone.moves_from(after))} of {PARTITIONS} partitions move")


def _note_takeover(run: DemoRun, instance: DemoInstance, at_s: float) -> None:
    """Record the time from the kill to the first order that the standby handled."""
    if run.killed is None:
        return
    killed_s, victim = run.killed
    if instance.member == victim.member and instance is not victim and not instance.handled:
        later_s = at_s - killed_s
        run.story[0] = (
            f"{victim.name} was killed (SIGKILL): {instance.name} handled its first order {later_s:.2f} s later"
        )


async def _start_process(url: str, member: str) -> asyncio.subprocess.Process:
    """Start it in its own session: Ctrl-C reaches only the demo, which then ends its members."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "keylane.cli.demo.member", url, STREAM, GROUP, member, str(ACK_WAIT_S),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


async def _listen(run: DemoRun, instance: DemoInstance) -> None:
    """Record what a member reports, until it ends."""
    assert instance.process.stdout is not None
    async for line in instance.process.stdout:
        event, value = json.loads(line)
        if event == "handled":
            key, sequence, at_s = value
            _note_takeover(run, instance, at_s)
            run.effects.append((at_s, Effect(key, sequence, instance.name)))
            instance.handled += 1
            instance.recent.append(time.monotonic())
        elif event == "partitions":
            instance.partitions = tuple(value)
        elif instance.state != "killed":
            instance.state = event
        run.changed.set()
    await instance.process.wait()
    instance.partitions = ()
    if instance.state != "killed":
        instance.state = "stopped"
        if instance.process.returncode:
            raise GroupEnded(f"the demo's member {instance.name} failed: its error is above")
    run.changed.set()


async def _publish(connection: Connection, run: DemoRun, seconds: float, rate: int) -> list[int]:
    loop = asyncio.get_running_loop()
    start = loop.time()
    pending = []
    async with open_publisher(connection) as publisher:
        for number in range(int(seconds * rate)):
            pending.append(await publisher.send(f"orders.customer-{_customer(number)}", b"%d" % number))
            run.published = number + 1
            ahead_s = start + number / rate - loop.time()
            if ahead_s > 0.01:
                await asyncio.sleep(ahead_s)
    return [(await one).sequence for one in pending]


def _customer(number: int) -> int:
    """Every sixth order is that of one customer: a hot key, for the pipelines to find."""
    return HOT_CUSTOMER if number % 6 == 0 else number % CUSTOMERS


async def _end_members(run: DemoRun) -> None:
    """Close each member's stdin, which ends it; kill one that does not end."""
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


async def _wait_for(run: DemoRun, condition: Callable[[DemoRun], object], deadline_s: float, problem: str) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            while not condition(run):
                run.changed.clear()
                await run.changed.wait()
    except TimeoutError:
        raise RequestTimeout(f"{problem} within {deadline_s:g} s") from None


def _active_bob(run: DemoRun) -> DemoInstance | None:
    return next((one for one in run.instances.values() if one.member == "bob" and one.state == "active"), None)


def _everyone_ready(run: DemoRun) -> bool:
    return all(one.state != "starting" for one in run.instances.values())


def _state(run: DemoRun, one: DemoInstance) -> str:
    """The state in the group: a running process may be no member yet, or no longer."""
    if one.state in {"starting", "killed", "stopped"}:
        return one.state
    if one.member not in run.members:
        return "dropped" if one.member in run.dropped else "not added yet"
    return "no partitions" if one.state == "active" and not one.partitions else one.state


def _picture(run: DemoRun) -> Group:
    if run.last_picture is not None:
        return run.last_picture
    now = time.monotonic()  # drawn in rich's own thread, which has no event loop
    table = Table(title=f"{run.published:,} orders published, {len(run.effects):,} handled", min_width=76)
    for column in ("member", "state", "partitions"):
        table.add_column(column)
    for column in ("handled", "orders/s"):
        table.add_column(column, justify="right")
    colours = {"active": "green", "standby": "yellow", "killed": "red", "dropped": "magenta"}
    for one in run.instances.values():
        state = _state(run, one)
        table.add_row(
            one.name,
            f"[{colours.get(state, 'white')}]{state}[/]",
            " ".join(map(str, one.partitions)) if state == "active" else "-",
            f"{one.handled:,}",
            f"{one.rate(now):,.0f}",
        )
    return Group(table, *run.story)


def _print_verdict(console: Console, verdict: DeliveryVerdict) -> None:
    console.print()
    colour = "green" if verdict.clean else "red"
    console.print(f"[bold {colour}]Verdict:[/] {verdict}")
    if verdict.duplicated:
        console.print(
            f"The {len(verdict.duplicated):,} repeated orders were handled by the killed process before their acks "
            "arrived: at least once, in order."
        )


STREAM = "ORDERS"
GROUP = "billing"


def run_pipelines(console: Console, url: str) -> bool:
    """Run audit and skew and print their reports. Returns whether the audit is clean; true if it could not run."""
    from keylane.spark.pipelines.session import is_installed, spark_session

    console.print()
    if not is_installed():
        console.print(
            "Not shown: audit, hot keys and the stream as a table, on Spark. It is not installed: `make demo` installs "
            f"it in a checkout, else {install_command('spark')}",
            markup=False,
            highlight=False,
        )
        return True
    console.print("Spark looks at the same stream, and at what the members wrote down. Starting it ...")
    try:
        with spark_session("keylane demo") as spark:
            return _run_all(console, spark, url)
    except KeylaneError as error:
        console.print(f"The pipelines did not run: {error}", markup=False)
        return True


def _run_all(console: Console, spark: SparkSession, url: str) -> bool:
    from keylane.spark.address import Address
    from keylane.spark.pipelines import audit, skew
    from keylane.spark.sync_connection import shared_connection

    address = Address(url=url)
    link = shared_connection(address)
    try:
        audited = audit.run(spark, audit.Settings(stream=STREAM, group=GROUP, address=address))
        summary = audited.as_text() if not audited.verdict else "\n\n".join(audited.as_text().split("\n\n")[:2])
        _show(console, f"keylane pipeline run audit --stream {STREAM} --group {GROUP}", summary)
        if without := audited.unproven.get("unproven"):
            _explain(console, without)
        chart = CHART if find_spec("matplotlib") is not None and os.access(".", os.W_OK) else None
        load = skew.run(spark, skew.Settings(stream=STREAM, group=GROUP, address=address, top=3, chart=chart))
        drawn = f" --chart {chart}" if chart else ""
        _show(console, f"keylane pipeline run skew --stream {STREAM} --group {GROUP}{drawn}", load.as_text())
        _print_bars(console, {str(one): part.messages for one, part in sorted(load.partitions.items())})
        _print_rows(console, spark, url)
    finally:
        link.close()  # the demo's server ends before this process does
    return audited.verdict


def _print_bars(console: Console, messages: dict[str, int]) -> None:
    """The same as the chart, in the terminal."""
    table = Table(title="orders by partition", box=None, pad_edge=False)
    table.add_column("partition", justify="right")
    table.add_column("orders", justify="right")
    table.add_column("", min_width=_BAR_CELLS, no_wrap=True)
    most = max(messages.values(), default=1)
    for partition, count in messages.items():
        table.add_row(partition, f"{count:,}", "█" * max(1, round(_BAR_CELLS * count / most)), style="cyan")
    console.print()
    console.print(table)


def _print_rows(console: Console, spark: SparkSession, url: str) -> None:
    """The stream as a DataFrame, as a user would read it."""
    import keylane.spark

    keylane.spark.register(spark)
    console.print(
        f'\n>>> orders = spark.read.format("keylane").options(url=…, stream="{STREAM}", group="{GROUP}").load()',
        '>>> orders.where("key = \'customer-7\'").orderBy("sequence", ascending=False)',
        sep="\n",
        style="bold",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    orders = spark.read.format("keylane").options(url=url, stream=STREAM, group=GROUP).load()
    newest = orders.where(orders.key == f"customer-{HOT_CUSTOMER}").orderBy("sequence", ascending=False)
    table = Table(title=f"the newest {_ROWS} rows")
    for column in ("sequence", "timestamp", "partition", "key", "data"):
        table.add_column(column)
    for row in newest.limit(_ROWS).collect():
        time_of_day = f"{row['timestamp']:%H:%M:%S.%f}"
        table.add_row(str(row["sequence"]), time_of_day, str(row["partition"]), row["key"], row["data"].decode())
    console.print(table)


def _print_next(console: Console) -> None:
    console.print(
        """
Go on with your own server and stream (README has the program):
  keylane server run --port 4222
  keylane stream create ORDERS --partition-by 'orders.*' --partitions 10
  keylane pub orders.customer-1 hello --count 1000
  keylane --help""",
        markup=False,
        highlight=False,
    )


def _explain(console: Console, without: int) -> None:
    console.print(
        f"The {without:,} without a record are not lost: the process that was killed had handled them, and the last "
        f"batch of its journal ({JOURNAL_FLUSH_S:g} s) died with it. The verdict above does not need the journal and "
        "has them as handled; an audit has nothing else, so it says that it cannot prove it.",
        markup=False,
        highlight=False,
    )


def _show(console: Console, command: str, text: str) -> None:
    console.print(f"\n$ {command}", style="bold", markup=False, highlight=False)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
