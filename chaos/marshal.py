"""Do Marshal consumers share partitions safely while they are killed? Processes, one log, and a judge at the end.

Consumers claim the partitions of a topic under load; half of them could have all. At random moments one is killed with
SIGKILL, or frozen for longer than its claims hold; another takes its place, under the same client id or a new one.
`chaos/marshal_judge.py` says what the evidence and the whole log show.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.marshal_judge import Findings, Handled, Start, Trouble, claims_in, findings, read_evidence, start_of
from chaos.marshal_stage import On, RunningLoad, Sent, Stage, open_stage
from chaos.marshal_worker import Orders
from chaos.members import MemberProcess, RunBroken
from keylane.core.claim_facts import LogRecord
from keylane.marshal import Admin
from keylane.marshal.options import Mode
from tests.peers import tether
from tests.peers.store import REPOSITORY

Say = Callable[[str], None]

GROUP = "billing"
KINDS = ("kill", "freeze")
_DRAIN_S = 120.0
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    seconds: float = 60.0
    seed: int = 1
    consumers: int = 8
    partitions: int = 64
    interval_s: float = 1.0
    every_s: float = 3.0
    rate: float = 1000.0
    mode: Mode = "at_least_once"
    batch: int = 100
    work_s: float = 0.0
    faults: tuple[str, ...] = ("kill",)
    on: On = "jetstream"


@dataclass(frozen=True, slots=True)
class Outcome:
    settings: Settings
    sent: int
    kills: int
    freezes: int
    start: Start
    found: Findings

    @property
    def clean(self) -> bool:
        return self.found.clean

    def as_json(self) -> dict[str, Any]:
        settings = {name: getattr(self.settings, name) for name in self.settings.__dataclass_fields__}
        found = {name: getattr(self.found, name) for name in self.found.__dataclass_fields__}
        told = {name: getattr(self, name) for name in ("sent", "kills", "freezes")} | self.start._asdict()
        return {"scenario": "marshal", "clean": self.clean, "settings": settings} | told | found


async def run(settings: Settings, say: Say, *, bootstrap: str | None = None) -> Outcome:
    """Start consumers, load and faults; wait until all is read; stop; judge. `bootstrap`: of a Kafka that runs."""
    async with open_stage(
        settings.on, partitions=settings.partitions, interval_s=settings.interval_s, bootstrap=bootstrap
    ) as stage:
        with tempfile.TemporaryDirectory(prefix="chaos marshal ") as directory:
            fleet = Fleet(settings, stage, Path(directory), say)
            try:
                await fleet.start_all()
                start = await all_claimed(fleet, stage, settings)
                say(f"all {settings.partitions} partitions are claimed {start.after_spawn_s:.1f} s after the start")
                async with stage.load(settings.rate) as load:
                    await fleet.make_trouble(load)
                say(f"{len(load.sent):,} messages are stored; waiting until they are read")
                await _drained(fleet, stage, settings)
                await fleet.stop_all()
            finally:
                await fleet.kill_all()
            return await _judged(settings, fleet, load.sent, start, stage)


class Fleet:
    """The consumers of a run, and what is done to them."""

    def __init__(self, settings: Settings, stage: Stage, directory: Path, say: Say) -> None:
        self.troubles: list[Trouble] = []
        self.started: list[MemberProcess] = []
        self.spawned_ns = 0
        """When the first process was asked for."""
        self._settings = settings
        self._stage = stage
        self._directory = directory
        self._say = say
        self._chance = random.Random(settings.seed)  # noqa: S311 - repeatable, guards nothing
        self._alive: dict[str, MemberProcess] = {}

    async def start_all(self) -> None:
        self.spawned_ns = time.monotonic_ns()
        for number in range(self._settings.consumers):
            await self._start(f"c{number}")
        for one in self.started:
            await one.ready()

    async def make_trouble(self, load: RunningLoad) -> None:
        """One fault every `every_s`, give or take a half, until the time is up."""
        end = time.monotonic() + self._settings.seconds
        while self._settings.faults:
            pause_s = self._settings.every_s * self._chance.uniform(0.5, 1.5)
            if time.monotonic() + pause_s > end:
                break
            await asyncio.sleep(pause_s)
            load.check()
            self.check()
            client = self._chance.choice(sorted(self._alive))
            await (self._kill if self._chance.choice(self._settings.faults) == "kill" else self._freeze)(client)
        await asyncio.sleep(max(end - time.monotonic(), 0.0))

    async def _kill(self, client: str) -> None:
        process = self._alive.pop(client)
        wall_ms = time.time_ns() // 1_000_000
        await process.kill()
        at_ns = time.monotonic_ns()  # not sooner: until the signal takes effect it goes on
        self.troubles.append(Trouble(process.name, "kill", at_ns, wall_ms, at_ns))
        same = self._chance.random() < 0.5
        self._say(f"{process.name} killed; its successor has {'the same' if same else 'a new'} client id")
        await self._start(client if same else f"{client}x")

    async def kill_some(self, count: int) -> set[str]:
        """Kill those with the most claims at once and start nobody in their place; returns their client ids."""
        victims = sorted(self._alive, key=lambda one: len(claims_in(self._alive[one].evidence)))[-count:]
        await asyncio.gather(*(self._alive.pop(one).kill() for one in victims))
        return set(victims)

    async def _freeze(self, client: str) -> None:
        process, frozen_s = self._alive[client], self._settings.interval_s * self._chance.uniform(0.5, 4.0)
        wall_ms = time.time_ns() // 1_000_000
        process.freeze()
        at_ns = time.monotonic_ns()
        await asyncio.sleep(frozen_s)
        until_ns = time.monotonic_ns()
        process.thaw()
        self.troubles.append(Trouble(process.name, "freeze", at_ns, wall_ms, until_ns))
        self._say(f"{process.name} stood still for {frozen_s:.1f} s")

    async def _start(self, client: str) -> None:
        settings, name = self._settings, f"{client}#{len(self.started)}"
        orders = Orders(
            on=settings.on,
            url=self._stage.url,
            topic=self._stage.topic,
            log=self._stage.log_name,
            group=GROUP,
            client=client,
            mode=settings.mode,
            interval_s=settings.interval_s,
            batch=settings.batch,
            work_s=settings.work_s,
            max_claims=math.ceil(settings.partitions / max(settings.consumers // 2, 1)),
        )
        evidence, errors = self._directory / f"{name}.evidence", self._directory / f"{name}.errors"
        with evidence.open("wb") as out, errors.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                sys.executable, tether.__file__, sys.executable, "-m", "chaos.marshal_worker", orders.as_argument(),
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, cwd=REPOSITORY,
            )  # fmt: skip
        one = MemberProcess(client, name, process, evidence, errors)
        self.started.append(one)
        self._alive[client] = one

    def check(self) -> None:
        for one in self.started:
            one.check()

    async def stop_all(self) -> None:
        await asyncio.gather(*(one.stop() for one in self._alive.values()))

    async def kill_all(self) -> None:
        await asyncio.gather(*(one.kill() for one in self.started))


async def all_claimed(fleet: Fleet, stage: Stage, settings: Settings) -> Start:
    """Wait until every partition has an owner; how long that took."""
    admin, began_s = Admin(stage.log, heartbeat_interval_s=settings.interval_s), time.monotonic()
    while True:
        world = await admin.world()
        if all(world.holds(GROUP, stage.topic, number) for number in range(settings.partitions)):
            start = start_of(fleet.spawned_ns, [one.evidence for one in fleet.started], settings.partitions)
            if start is not None:
                return start
        fleet.check()
        if time.monotonic() - began_s > _DRAIN_S:
            raise RunBroken(f"the partitions were not all claimed within {_DRAIN_S:g} s: {world!r}")
        await asyncio.sleep(_LOOK_EVERY_S)


async def whole_log(stage: Stage) -> list[LogRecord]:
    """Every record of the coordination log, partition by partition."""
    log = stage.log
    return [
        record
        for number in range(log.partitions)
        async for record in log.read(number, (await log.bounds(number)).first)
    ]


async def _drained(fleet: Fleet, stage: Stage, settings: Settings) -> None:
    """Every partition is owned and its owner's heartbeat says that all is done."""
    admin, deadline = Admin(stage.log, heartbeat_interval_s=settings.interval_s), time.monotonic() + _DRAIN_S
    while True:
        loads = await admin.loads(stage.source, GROUP, [stage.topic])
        left = sum(one.lag for one in loads)
        if not left and all(one.owner is not None for one in loads):
            break
        fleet.check()
        if time.monotonic() > deadline:
            raise RunBroken(f"{left} messages were not read within {_DRAIN_S:g} s")
        await asyncio.sleep(_LOOK_EVERY_S)
    await asyncio.sleep(settings.interval_s if settings.mode == "at_most_once" else 0.0)


async def _judged(settings: Settings, fleet: Fleet, sent: Sent, start: Start, stage: Stage) -> Outcome:
    handled: list[Handled] = []
    instances: dict[str, str] = {}
    for one in fleet.started:
        instance, runs = read_evidence(one.evidence)
        handled += runs
        if instance is not None:
            instances[one.name] = instance
    found = findings(
        sent=sent,
        handled=handled,
        troubles=fleet.troubles,
        instances=instances,
        records=await whole_log(stage),
        interval_s=settings.interval_s,
        log_partitions=stage.log.partitions,
        first_offset=stage.log.first_offset,
        batch=settings.batch if settings.mode == "at_most_once" else None,
    )
    kinds = [one.kind for one in fleet.troubles]
    return Outcome(settings, len(sent), kinds.count("kill"), kinds.count("freeze"), start, found)


def as_text(outcome: Outcome) -> str:
    """For a terminal."""
    settings, found = outcome.settings, outcome.found
    rows = {
        "consumers": f"{settings.consumers} for {settings.partitions} partitions on {settings.on}, {settings.mode}, "
        f"interval {settings.interval_s:g} s",
        "faults": f"{outcome.kills} kills, {outcome.freezes} freezes in {settings.seconds:g} s",
        "all claimed after": f"{outcome.start.after_spawn_s:.1f} s from the start of the first process, "
        f"{outcome.start.after_ready_s:.1f} s from when all had begun",
        "slowest reclaim": f"{found.slowest_reclaim_s:.1f} s after a kill",
        "messages": f"{outcome.sent:,} sent, {found.handled:,} handled",
        "lost": str(found.lost),
        "lost with owner": f"{found.lost_with_their_owner}, at most {found.most_lost_by_one} with one consumer",
        "repeated": f"{found.repeated:,}, at most {found.most_repeated_of_one:,} of one consumer and begun within "
        f"{found.longest_window_s:.2f} s; {found.unexplained_repeats} unexplained",
        "out of order": str(found.out_of_order),
        "two owners": f"{found.two_owners} by handlers, {found.overlaps_in_log} in {found.log_records:,} log records",
        "late starts": f"{found.late_starts} by a consumer that had just been thawed",
        "verdict": "clean" if outcome.clean else "NOT CLEAN",
    }
    return "\n".join([*(f"{name:<20} {value}" for name, value in rows.items()), *found.examples])
