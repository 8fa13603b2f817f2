"""Row `failover`: two instances of one member; the active one is killed, or stops cleanly. When does the other start?

keylane beside the Go reference, in the same run and under the same load. All evidence is judged: a kill may repeat
what was in flight, nothing may be lost or out of order.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import keylane
from bench.contest import Say
from chaos import timing
from chaos.evidence import Handled, Happening, explained, merged, read, verdict
from chaos.load import FILTER, Load, load
from chaos.members import Group, MemberProcess, Members, Peer, members
from keylane import groups
from keylane.groups.consumer_spec import GO_01_ACK_WAIT_S
from keylane.jetstream import Connection, streams
from keylane.server import NatsServer
from tests.peers.go import program
from tests.peers.presence import PeerMissing

PARTITIONS = 10
RATE = 500.0
STREAM, GROUP, MEMBER = "ORDERS", "billing", "a"
QUEUE = f"{STREAM}-{GROUP}"
_SETTLED_S = 1.5
_LONGEST_S = 30.0
_DRAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    peer: Peer
    ack_wait_s: float
    timeout_s: float
    """The priority_timeout that follows from the ack wait: the server cannot notice a kill sooner for sure."""


OURS = Contestant("keylane", "keylane", 0.0, 5.0)
SHORT = Contestant("keylane, ack_wait 1 s", "keylane", 1.0, 1.0)
REFERENCE = Contestant("Go pcgroups 0.1", "go", 0.0, GO_01_ACK_WAIT_S)


@dataclass(slots=True)
class Figures:
    """What one contestant showed in all rounds."""

    kill_s: list[float | None] = field(default_factory=list)
    stop_s: list[float | None] = field(default_factory=list)
    sent: int = 0
    lost: int = 0
    duplicated: int = 0
    out_of_order: int = 0
    explained: list[str] = field(default_factory=list)

    def as_json(self, contestant: Contestant) -> dict[str, object]:
        return {
            "priority_timeout_s": contestant.timeout_s,
            "kill_ms": timing.summary(self.kill_s),
            "stop_ms": timing.summary(self.stop_s),
            "sent": self.sent,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "out_of_order": self.out_of_order,
            "explained": self.explained,
        }


def run(rounds: int, scale: float, say: Say) -> tuple[dict[str, object], str]:
    """The figures as JSON and as Markdown."""
    trials = max(1, round(3 * scale))
    contestants = [OURS, SHORT]
    try:
        program("pcgroups-peer", say)
    except PeerMissing as missing:
        say(f"left out: {REFERENCE.name} ({missing})")
    else:
        contestants.append(REFERENCE)
    figures = {one: Figures() for one in contestants}
    for number in range(rounds):
        for one in contestants:
            asyncio.run(_round(one, trials, figures[one]))
            kills, stops = figures[one].kill_s[-trials:], figures[one].stop_s[-trials:]
            say(f"  round {number + 1}/{rounds}  {one.name:<24} kill {_shown(kills)}, stop {_shown(stops)}")
    answer = {one.name: mine.as_json(one) for one, mine in figures.items()}
    return {"row": "failover", "rounds": rounds, "rate": RATE, "contestants": answer}, _table(figures)


async def _round(one: Contestant, trials: int, figures: Figures) -> None:
    """Kills and stops by turns. After each the survivor is active, and a new instance waits."""
    happenings: list[Happening] = []
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="failover-") as directory, NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            await _create(connection, one)
            group = Group(server.url, STREAM, GROUP)
            async with (
                members(group, Path(directory), ack_wait_s=one.ack_wait_s) as running,
                load(connection, RATE) as source,
            ):
                active = await _instance(running, one)
                await active.handled_something_after(active.evidence.stat().st_size, _LONGEST_S)
                for _ in range(trials):
                    standby = await _instance(running, one)
                    happenings.append(Happening(time.monotonic(), "kill -9"))
                    figures.kill_s.append(await _handover(active, standby, kill=True))
                    active, standby = standby, await _instance(running, one)
                    happenings.append(Happening(time.monotonic(), "clean stop"))
                    figures.stop_s.append(await _handover(active, standby, kill=False))
                    active = standby
                await source.stop()
                await _drained(connection, source)
                await running.stop()
                logs = [
                    read(process.evidence, f"{MEMBER}#{number}", PARTITIONS)
                    for number, process in enumerate(running.started)
                ]
    _judge(source, merged(logs), happenings, start_s, figures)


async def _create(connection: Connection, one: Contestant) -> None:
    await streams.create(
        connection,
        streams.StreamConfig(name=STREAM, subjects=[FILTER], storage=streams.StorageType.MEMORY),
    )
    await groups.create_elastic(
        connection,
        STREAM,
        GROUP,
        partitions=PARTITIONS,
        partition_by=FILTER,
        members=[MEMBER],
        dialect="go-0.1" if one.peer == "go" else "present",
    )


async def _instance(running: Members, contestant: Contestant) -> MemberProcess:
    """One more instance, and time for it to join and for everything to run evenly."""
    one = await running.start(MEMBER, contestant.peer)
    await one.ready()
    await asyncio.sleep(_SETTLED_S)
    running.check()
    return one


async def _handover(active: MemberProcess, standby: MemberProcess, *, kill: bool) -> float:
    """Seconds from the signal to the standby's first message."""
    size = standby.evidence.stat().st_size
    at_s = time.monotonic()
    ending = asyncio.create_task(active.kill() if kill else active.stop())
    await standby.handled_something_after(size, _LONGEST_S)
    await ending
    first = next(one for one in read(standby.evidence, MEMBER, PARTITIONS) if one.at_s > at_s)
    return first.at_s - at_s


async def _drained(connection: Connection, source: Load) -> None:
    """Until the queue is empty; what is left there after the deadline counts as lost."""
    deadline_s = time.monotonic() + _DRAIN_S
    while time.monotonic() < deadline_s:
        state = await streams.state(connection, QUEUE)
        if state.last_sequence >= len(source.keys) and state.messages == 0:
            return
        await asyncio.sleep(0.05)


def _judge(source: Load, handled: list[Handled], happenings: list[Happening], start_s: float, figures: Figures) -> None:
    found = verdict(source.keys, handled)
    figures.sent += found.sent
    figures.lost += len(found.lost)
    figures.duplicated += len(found.duplicated)
    figures.out_of_order += len(found.out_of_order)
    figures.explained += explained(found, handled, source.keys, happenings, start_s)


def _shown(seconds: list[float | None]) -> str:
    return " ".join("never" if one is None else f"{one:.2f}" for one in seconds) + " s"


def _table(figures: dict[Contestant, Figures]) -> str:
    lines = [
        f"### Two instances of one member, {RATE:,.0f} msg/s: the standby's first message",
        "",
        "| contestant | priority timeout, s | after kill -9, ms: p50 / max | after a clean stop, ms: p50 / max "
        "| sent | lost | twice | out of order |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one, mine in figures.items():
        kill, stop = timing.summary(mine.kill_s), timing.summary(mine.stop_s)
        lines.append(
            f"| {one.name} | {one.timeout_s:g} | {kill['p50']:,.0f} / {kill['max']:,.0f} "
            f"| {stop['p50']:,.0f} / {stop['max']:,.0f} "
            f"| {mine.sent:,} | {mine.lost} | {mine.duplicated} | {mine.out_of_order} |"
        )
    return "\n".join(lines)
