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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keylane
from chaos.load import FILTER, Load
from chaos.marshal_judge import Findings, Handled, Trouble, claimed_after_s, findings, read_evidence
from chaos.marshal_worker import Orders, ground
from chaos.members import MemberProcess, RunBroken
from keylane.core.partitions import Partitioning
from keylane.jetstream.connection import Connection
from keylane.marshal import Admin, CoordinationLog
from keylane.marshal.claiming import Mode
from keylane.server import NatsServer
from tests.peers import tether
from tests.peers.store import REPOSITORY

Say = Callable[[str], None]

STREAM, LOG, GROUP = "ORDERS", "marshal", "billing"
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
    on: str = "jetstream"


@dataclass(frozen=True, slots=True)
class Outcome:
    settings: Settings
    sent: int
    kills: int
    freezes: int
    claimed_after_s: float
    """From when all consumers had begun until every partition had an owner."""
    found: Findings

    @property
    def clean(self) -> bool:
        return self.found.clean

    def as_json(self) -> dict[str, Any]:
        settings = {name: getattr(self.settings, name) for name in self.settings.__dataclass_fields__}
        found = {name: getattr(self.found, name) for name in self.found.__dataclass_fields__}
        told = {name: getattr(self, name) for name in ("sent", "kills", "freezes", "claimed_after_s")}
        return {"scenario": "marshal", "clean": self.clean, "settings": settings} | told | found


async def run(settings: Settings, say: Say) -> Outcome:
    """Start consumers, load and faults; wait until all is read; stop; judge."""
    with tempfile.TemporaryDirectory(prefix="chaos marshal ") as directory, NatsServer.start() as server:
        async with (
            await keylane.connect(server.url) as connection,
            ground(settings.on, server.url, LOG, settings.interval_s) as (log, source),
        ):
            await create(connection, settings.partitions)
            fleet = Fleet(settings, server.url, Path(directory), say)
            try:
                await fleet.start_all()
                after_s = await all_claimed(fleet, log, settings)
                say(f"all {settings.partitions} partitions are claimed after {after_s:.1f} s")
                async with _load(connection, settings.rate) as load:
                    await fleet.make_trouble(load)
                say(f"{len(load.keys):,} messages are stored; waiting until they are read")
                await _drained(fleet, Admin(log, heartbeat_interval_s=settings.interval_s), source, settings)
                await fleet.stop_all()
            finally:
                await fleet.kill_all()
            return await _judged(settings, fleet, load, log, after_s)


class Fleet:
    """The consumers of a run, and what is done to them."""

    def __init__(self, settings: Settings, url: str, directory: Path, say: Say) -> None:
        self.troubles: list[Trouble] = []
        self.started: list[MemberProcess] = []
        self._settings = settings
        self._url = url
        self._directory = directory
        self._say = say
        self._chance = random.Random(settings.seed)  # noqa: S311 - repeatable, guards nothing
        self._alive: dict[str, MemberProcess] = {}

    async def start_all(self) -> None:
        for number in range(self._settings.consumers):
            await self._start(f"c{number}")
        for one in self.started:
            await one.ready()

    async def make_trouble(self, load: Load) -> None:
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
        """Kill as many at once and start nobody in their place; returns their client ids."""
        victims = self._chance.sample(sorted(self._alive), count)
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
            url=self._url,
            topic=STREAM,
            log=LOG,
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


async def create(connection: Connection, partitions: int) -> None:
    partitioning = Partitioning(FILTER, (1,), partitions)
    await connection.api.request(
        f"STREAM.CREATE.{STREAM}",
        {
            "name": STREAM,
            "subjects": [FILTER],
            "subject_transform": {"src": FILTER, "dest": partitioning.destination},
            "allow_direct": True,
        },
    )


@asynccontextmanager
async def _load(connection: Connection, rate: float) -> AsyncIterator[Load]:
    load = Load(connection, rate)
    try:
        yield load
    finally:
        await load.stop()


async def all_claimed(fleet: Fleet, log: CoordinationLog, settings: Settings) -> float:
    admin, began_s = Admin(log, heartbeat_interval_s=settings.interval_s), time.monotonic()
    while True:
        world = await admin.world()
        if sum(world.holds(GROUP, STREAM, number) for number in range(settings.partitions)) == settings.partitions:
            return claimed_after_s(one.evidence for one in fleet.started)
        fleet.check()
        if time.monotonic() - began_s > _DRAIN_S:
            raise RunBroken(f"the partitions were not all claimed within {_DRAIN_S:g} s: {world!r}")
        await asyncio.sleep(_LOOK_EVERY_S)


async def _drained(fleet: Fleet, admin: Admin, source: Any, settings: Settings) -> None:
    """Every partition is owned and its owner's heartbeat says that all is done."""
    deadline = time.monotonic() + _DRAIN_S
    while True:
        loads = await admin.loads(source, GROUP, [STREAM])
        left = sum(one.lag for one in loads)
        if not left and all(one.owner is not None for one in loads):
            break
        fleet.check()
        if time.monotonic() > deadline:
            raise RunBroken(f"{left} messages were not read within {_DRAIN_S:g} s")
        await asyncio.sleep(_LOOK_EVERY_S)
    await asyncio.sleep(settings.interval_s if settings.mode == "at_most_once" else 0.0)


async def _judged(settings: Settings, fleet: Fleet, load: Load, log: CoordinationLog, after_s: float) -> Outcome:
    partitioning = Partitioning(FILTER, (1,), settings.partitions)
    sent = {(partitioning.partition(f"orders.{key}"), offset): key for offset, key in load.keys.items()}
    handled: list[Handled] = []
    instances: dict[str, str] = {}
    for one in fleet.started:
        instance, runs = read_evidence(one.evidence)
        handled += runs
        if instance is not None:
            instances[one.name] = instance
    records = [
        record
        for number in range(log.partitions)
        async for record in log.read(number, (await log.bounds(number)).first)
    ]
    found = findings(
        sent=sent,
        handled=handled,
        troubles=fleet.troubles,
        instances=instances,
        records=records,
        interval_s=settings.interval_s,
        log_partitions=log.partitions,
        first_offset=log.first_offset,
        at_most_once=settings.mode == "at_most_once",
    )
    kinds = [one.kind for one in fleet.troubles]
    return Outcome(settings, len(sent), kinds.count("kill"), kinds.count("freeze"), after_s, found)


def as_text(outcome: Outcome) -> str:
    """For a terminal."""
    settings, found = outcome.settings, outcome.found
    rows = {
        "consumers": f"{settings.consumers} for {settings.partitions} partitions on {settings.on}, {settings.mode}, "
        f"interval {settings.interval_s:g} s",
        "faults": f"{outcome.kills} kills, {outcome.freezes} freezes in {settings.seconds:g} s",
        "all claimed after": f"{outcome.claimed_after_s:.1f} s",
        "slowest reclaim": f"{found.slowest_reclaim_s:.1f} s after a kill",
        "messages": f"{outcome.sent:,} sent, {found.handled:,} handled",
        "lost": str(found.lost),
        "lost with owner": f"{found.lost_with_their_owner} in the last batch of a killed consumer",
        "repeated": f"{found.repeated:,}, the oldest {found.oldest_repeat_s:.2f} s before its consumer was hit; "
        f"{found.unexplained_repeats} unexplained",
        "out of order": str(found.out_of_order),
        "two owners": f"{found.two_owners} by handlers, {found.overlaps_in_log} in {found.log_records:,} log records",
        "late starts": f"{found.late_starts} by a consumer that had just been thawed",
        "verdict": "clean" if outcome.clean else "NOT CLEAN",
    }
    return "\n".join([*(f"{name:<20} {value}" for name, value in rows.items()), *found.examples])
