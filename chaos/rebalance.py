"""Planned changes of membership under load: is anything lost, handled twice or out of order, and who waits how long?

An elastic group of 10 partitions; five members, each in a process of its own; every few seconds one of them is added
or dropped. The verdict is on what the members wrote down, the times are from there too.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import keylane
from chaos import timing
from chaos.evidence import Handled, Happening, explained, merged, read, verdict
from chaos.load import FILTER, Load, load
from chaos.members import Group, Members, Peer, RunBroken, members
from chaos.timing import Change
from keylane import groups
from keylane.groups.admin import PlanName
from keylane.jetstream import Connection, streams
from keylane.server import NatsServer
from keylane.testing import Verdict
from tests.peers.go import program

Say = Callable[[str], None]
Storage = Literal["memory", "file"]

PARTITIONS = 10
NAMES = ("a", "b", "c", "d", "e")
FEWEST = 2
STREAM, GROUP = "ORDERS", "billing"
QUEUE = f"{STREAM}-{GROUP}"
RATES: dict[Storage, float] = {"memory": 5000.0, "file": 1500.0}
_FIRST_MESSAGES_S = 30.0
_STANDSTILL_S = 20.0
_DRAIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run."""

    seconds: float
    seed: int
    rate: float
    storage: Storage = "memory"
    peer: Peer = "keylane"
    plan: PlanName = "balanced"
    every_s: float = 3.0
    work_s: float = 0.0
    """How long each message takes to handle."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed."""

    settings: Settings
    verdict: Verdict
    explained: list[str]
    changes: list[Change]
    waits: list[timing.Wait]
    gaps: list[timing.Gap]
    publisher_gap_s: float
    drain_s: float

    @property
    def spotless(self) -> bool:
        """0 lost, 0 duplicated, 0 out of order."""
        return self.verdict.clean and not self.verdict.duplicated

    def as_json(self) -> dict[str, Any]:
        by_verb = {
            verb: timing.summary([one.seconds for one in self.waits if one.verb == verb]) for verb in ("add", "drop")
        }
        return {
            "scenario": "rebalance",
            **asdict(self.settings),
            "clean": self.spotless,
            "sent": self.verdict.sent,
            "lost": len(self.verdict.lost),
            "duplicated": len(self.verdict.duplicated),
            "out_of_order": len(self.verdict.out_of_order),
            "unknown": len(self.verdict.unknown),
            "explained": self.explained,
            "changes": [{"verb": one.verb, "member": one.member, "moved": sorted(one.moved)} for one in self.changes],
            "first_message_ms": {"all": timing.summary([one.seconds for one in self.waits]), **by_verb},
            "gap_ms": {
                "members_that_kept_everything": timing.summary([one.seconds for one in self.gaps if one.untouched]),
                "partitions_kept_by_the_others": timing.summary(
                    [one.seconds for one in self.gaps if not one.untouched]
                ),
                "publisher": round(self.publisher_gap_s * 1000, 1),
            },
            "drain_s": round(self.drain_s, 2),
        }


async def run(settings: Settings, say: Say) -> Outcome:
    """Start everything, make the changes, end everything, judge."""
    if settings.peer == "go":
        program("pcgroups-peer", say)
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory, NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            present = await _create(connection, settings)
            group = Group(server.url, STREAM, GROUP)
            async with members(group, Path(directory), work_s=settings.work_s) as running:
                for name in NAMES:
                    await running.start(name, settings.peer)
                await asyncio.gather(*(one.ready() for one in running.started))
                async with load(connection, settings.rate) as source:
                    await _everyone_is_at_work(running, present)
                    say(f"{settings.peer}: {len(NAMES)} members joined, {', '.join(present)} at work")
                    start_s = time.monotonic()
                    changes = await _make_changes(connection, settings, running, source, say)
                    await source.stop()
                    end_s = time.monotonic()
                await _drained(connection, source, running)
                drain_s = time.monotonic() - end_s
                await running.stop()
                logs = [read(one.evidence, one.member, PARTITIONS) for one in running.started]
    return judged(settings, source, merged(logs), changes, (start_s, end_s, drain_s))


async def _create(connection: Connection, settings: Settings) -> list[str]:
    """The stream and the group; returns the members it starts with."""
    await streams.create(
        connection,
        streams.StreamConfig(name=STREAM, subjects=[FILTER], storage=streams.StorageType(settings.storage)),
    )
    present = list(NAMES[:3])
    await groups.create_elastic(
        connection,
        STREAM,
        GROUP,
        partitions=PARTITIONS,
        partition_by=FILTER,
        members=present,
        dialect="go-0.1" if settings.peer == "go" else "present",
    )
    return present


async def _everyone_is_at_work(running: Members, present: list[str]) -> None:
    sizes = {one: one.evidence.stat().st_size for one in running.started if one.member in present}
    await asyncio.gather(*(one.handled_something_after(size, _FIRST_MESSAGES_S) for one, size in sizes.items()))


async def _make_changes(
    connection: Connection, settings: Settings, running: Members, source: Load, say: Say
) -> list[Change]:
    chance = random.Random(settings.seed)  # noqa: S311 - the same seed makes the same run
    start_s = time.monotonic()
    changes: list[Change] = []
    due_s = settings.every_s
    while due_s <= settings.seconds - settings.every_s:
        await _rest(start_s + due_s, running, source)
        changes.append(await _change(connection, settings, chance))
        say(f"{due_s:6.1f} s  {changes[-1].verb} {changes[-1].member}: {changes[-1].after!r}")
        due_s += settings.every_s
    await _rest(start_s + settings.seconds, running, source)
    return changes


def choose(chance: random.Random, present: Sequence[str]) -> tuple[Literal["add", "drop"], str]:
    """The next change. It depends on the seed and on who is there, and on nothing else."""
    outside = [name for name in NAMES if name not in present]
    if outside and (len(present) <= FEWEST or chance.random() < 0.5):
        return "add", chance.choice(outside)
    return "drop", chance.choice(sorted(present))


async def _change(connection: Connection, settings: Settings, chance: random.Random) -> Change:
    before = (await groups.get_config(connection, STREAM, GROUP)).plan
    verb, member = choose(chance, before.members)
    act = groups.add_members if verb == "add" else groups.drop_members
    at_s = time.monotonic()
    after = (await act(connection, STREAM, GROUP, [member], plan=settings.plan)).plan
    return Change(at_s, verb, member, before, after)


async def _rest(until_s: float, running: Members, source: Load) -> None:
    """Nothing happens until then, except that a process or the load may fail."""
    while (left_s := until_s - time.monotonic()) > 0:
        running.check()
        source.check()
        await asyncio.sleep(min(left_s, 0.5))


async def _drained(connection: Connection, source: Load, running: Members) -> None:
    """Wait until the queue is empty. What still stands there after a long standstill counts as lost."""
    deadline_s = time.monotonic() + _DRAIN_S
    moved_s, before = time.monotonic(), (0, 0)
    while True:
        running.check()
        state = await streams.state(connection, QUEUE)
        if state.last_sequence >= len(source.keys) and state.messages == 0:
            return
        now_s, here = time.monotonic(), (state.messages, state.last_sequence)
        if here != before:
            moved_s, before = now_s, here
        if now_s > deadline_s:
            raise RunBroken(f"{state.messages} messages are still in the queue after {_DRAIN_S:.0f} s")
        if now_s - moved_s > _STANDSTILL_S:
            return
        await asyncio.sleep(0.05)


def judged(
    settings: Settings,
    source: Load,
    handled: list[Handled],
    changes: list[Change],
    times: tuple[float, float, float],
) -> Outcome:
    start_s, end_s, drain_s = times
    found = verdict(source.keys, handled)
    happenings = [Happening(one.at_s, f"{one.verb} {one.member}") for one in changes]
    return Outcome(
        settings=settings,
        verdict=found,
        explained=explained(found, handled, source.keys, happenings, start_s),
        changes=changes,
        waits=timing.waits(changes, handled),
        gaps=timing.gaps(changes, handled, end_s),
        publisher_gap_s=source.longest_gap_s,
        drain_s=drain_s,
    )


def as_text(outcome: Outcome) -> str:
    """For a terminal."""
    facts = outcome.as_json()
    first, gap = facts["first_message_ms"], facts["gap_ms"]
    lines = [
        f"{outcome.verdict}  ({len(outcome.changes)} changes, {len(outcome.waits)} partitions moved, "
        f"drained in {facts['drain_s']} s)",
        *outcome.explained,
    ]
    rows = {
        "first message on moved partitions": first["all"],
        "  after an add": first["add"],
        "  after a drop": first["drop"],
        "longest gap, members that kept everything": gap["members_that_kept_everything"],
        "longest gap, partitions kept by the others": gap["partitions_kept_by_the_others"],
    }
    for name, one in rows.items():
        never = f", {one['never']} never" if one["never"] else ""
        lines.append(f"{name:<44} p50 {one['p50']} ms, p95 {one['p95']} ms, max {one['max']} ms{never}")
    lines.append(f"{'longest gap of the publisher itself':<44} {gap['publisher']} ms")
    return "\n".join(lines)
