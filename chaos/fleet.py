"""A fleet under load and under trouble: is anything lost, repeated without a cause, out of order, or done with an old
token? And who waits how long?

Real servers, real processes; workers may share a process where there are many. The verdict is on what the handlers
wrote down, and so are the times.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nats.js.api import SubjectTransform

import keylane
from chaos import causes, timing
from chaos.causes import Causes, Pair, Trouble
from chaos.evidence import MOST_EXPLAINED, Happening, explained, verdict
from chaos.fleet_faults import Action, FleetStep, Scenario, plan
from chaos.fleet_stage import FleetStage
from chaos.fleet_timing import Stale, Timeline, overlaps, stale_tokens
from chaos.load import FILTER, Load, load
from chaos.members import RunBroken, deadline
from keylane import fleet
from keylane.core.partitions import Partitioning
from keylane.errors import KeylaneError
from keylane.jetstream import Connection, streams
from keylane.server import NatsCluster, NatsServer
from keylane.testing import Verdict
from tests.integration.priority.proxy import LossyProxy

Say = Callable[[str], None]
Storage = Literal["memory", "file"]
Retention = Literal["limits", "workqueue"]

STREAM, FLEET = "ORDERS", "billing"
PASSED_ON = ("layout", "acks", "state")
PAUSE_LIMIT_S = 0.1
AFTER_LEASE_S = 1.0
_PLANNED: tuple[Scenario, ...] = ("planned", "moves")
_ONE_BY_ONE: tuple[Scenario, ...] = ("planned", "moves", "leader")
_CRASHES: tuple[Scenario, ...] = ("kill", "leader")
_PER_PROCESS = 8
_FIRST_MESSAGES_S = 90.0
_STANDSTILL_S = 40.0
"""Longer than ack_wait: what comes again only then is late, not lost."""
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run."""

    seconds: float = 60.0
    seed: int = 1
    scenario: Scenario = "mixed"
    rate: float = 2000.0
    every_s: float = 3.0
    storage: Storage = "file"
    retention: Retention = "limits"
    cluster: bool = False
    """Three servers, and three replicas of everything."""
    workers: int = 4
    partitions: int = 32
    keys: int = 200
    work_s: float = 0.002
    """How long a handler takes on average."""
    lease_s: float = 3.0
    moves: int = 0
    """The run ends as soon as so many partitions have moved; 0: it ends with its time."""
    layout: str | None = None
    acks: str | None = None
    state: str | None = None
    keep: str | None = None
    """A directory for the evidence and the logs, which are removed otherwise."""

    @property
    def processes(self) -> dict[str, int]:
        """How many workers each process has: one, or up to eight where there are many."""
        if self.workers <= _PER_PROCESS:
            return {f"w{number}": 1 for number in range(self.workers)}
        count = self.workers // _PER_PROCESS
        return {
            f"w{number}": _PER_PROCESS + (self.workers % _PER_PROCESS if number == 0 else 0) for number in range(count)
        }

    @property
    def options(self) -> dict[str, Any]:
        """Of `fleet.join`."""
        chosen = {name: getattr(self, name) for name in PASSED_ON if getattr(self, name) is not None}
        unknown = sorted(chosen.keys() - inspect.signature(fleet.join).parameters.keys())
        if unknown:
            raise RunBroken(f"fleet.join has no {', '.join(unknown)}")
        return {"lease_s": self.lease_s, **chosen}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed."""

    settings: Settings
    verdict: Verdict
    causes: Causes
    stale: list[Stale]
    overlaps: int
    findings: list[str]
    """One line for each of the first things that must not be."""
    surprises: list[str]
    steps: list[dict[str, Any]]
    lag: int | None
    """What the fleet's status says is not handled in the end."""
    pauses: list[float]
    """Of each partition that moved."""
    others: list[float]
    """The longest gap of each partition that stayed, while others moved."""
    calm: list[float]
    """The same, while nothing moved."""
    returns: list[float | None]
    """From a kill until each partition of the dead flowed again."""
    stops: list[float]
    leaders: int
    leases_lost: int
    publisher_gap_s: float
    handled_under_faults: int
    repeat_age_s: float
    """Of the oldest repeat: from its first effect to the trouble that explains it."""
    repeats: list[str] = field(default_factory=list)

    @property
    def spotless(self) -> bool:
        """What must hold for every run; a run that was planned repeats nothing at all."""
        return (
            self.verdict.clean
            and not self.causes.unexplained
            and not (self.settings.scenario in _PLANNED and self.verdict.duplicated)
            and not any(not one.is_late_start for one in self.stale)
            and not self.overlaps
            and not self.surprises
            and not self.lag
        )

    @property
    def limit_s(self) -> float:
        return self.settings.lease_s + AFTER_LEASE_S

    @property
    def quick(self) -> bool:
        """p95 of the pause of a planned move, every return after a crash. Other scenarios only tell their times."""
        if self.settings.scenario == "planned":
            return bool(self.pauses) and timing.percentile(self.pauses, 0.95) < PAUSE_LIMIT_S
        if self.settings.scenario in _CRASHES:
            return bool(self.returns) and all(one is not None and one <= self.limit_s for one in self.returns)
        return True

    @property
    def clean(self) -> bool:
        return self.spotless and self.quick

    def as_json(self) -> dict[str, Any]:
        return {
            "run": "fleet",
            **asdict(self.settings),
            "clean": self.clean,
            "spotless": self.spotless,
            "quick": self.quick,
            "sent": self.verdict.sent,
            "handled_under_faults": self.handled_under_faults,
            "lost": len(self.verdict.lost),
            "duplicated": len(self.verdict.duplicated),
            "out_of_order": len(self.verdict.out_of_order),
            "unknown": len(self.verdict.unknown),
            "explained": len(self.causes.sequences_explained),
            "unexplained": len(self.causes.sequences_unexplained),
            "causes": self.causes.by_kind(),
            "oldest_repeat_s": round(self.repeat_age_s, 3),
            "stale_tokens": sum(not one.is_late_start for one in self.stale),
            "late_starts": sum(one.is_late_start for one in self.stale),
            "overlaps": self.overlaps,
            "lag": self.lag,
            "moves": len(self.pauses),
            "pause_ms": timing.summary(self.pauses),
            "others_ms": timing.summary(self.others),
            "calm_ms": timing.summary(self.calm),
            "return_ms": timing.summary(self.returns),
            "return_limit_ms": self.limit_s * 1000,
            "stop_ms": timing.summary(self.stops),
            "leaders": self.leaders,
            "leases_lost": self.leases_lost,
            "publisher_gap_ms": round(self.publisher_gap_s * 1000, 1),
            "steps_done": dict(Counter(one["what"].split()[0] for one in self.steps)),
            "surprises": self.surprises,
            "findings": self.findings,
            "repeats": self.repeats,
            "steps": self.steps,
        }


def planned_steps(settings: Settings) -> list[FleetStep]:
    """All steps of a run: the settings alone decide."""
    return plan(
        settings.scenario,
        settings.seed,
        seconds=settings.seconds,
        every_s=settings.every_s,
        processes=list(settings.processes),
        mixed=_mixture(settings),
    )


def _mixture(settings: Settings) -> tuple[Action, ...]:
    """Memory does not outlive its server, and clients of a cluster go to another node when their link is cut."""
    anything: tuple[Action, ...] = ("start", "stop", "roll", "kill", "freeze")
    if settings.cluster:
        return (*anything, "node")
    return (*anything, "cut", "server") if settings.storage == "file" else (*anything, "cut")


async def run(settings: Settings, say: Say) -> Outcome:
    """Start everything, make the trouble, end everything, judge."""
    options = settings.options
    with _directory(settings.keep) as directory, _servers(cluster=settings.cluster) as servers:
        url = servers.url if isinstance(servers, NatsServer) else ",".join(servers.urls)
        given = {
            "stream": STREAM,
            "fleet": FLEET,
            "partitions": settings.partitions,
            "work_s": settings.work_s,
            "options": options,
        }
        async with (
            keylane.connect(url) as connection,
            keylane.connect(url) as publishing,
            _proxy(servers, settings.scenario) as proxy,
        ):
            await _create(connection, settings)
            stage = FleetStage(servers, connection, directory, given, proxy=proxy, say=say)
            try:
                return await _run(settings, stage, connection, publishing, say)
            finally:
                await stage.kill()
                if settings.keep is not None and isinstance(servers, NatsServer):
                    shutil.copy(servers.log_path, directory / "server.log")


async def _run(
    settings: Settings, stage: FleetStage, connection: Connection, publishing: Connection, say: Say
) -> Outcome:
    for number, (target, workers) in enumerate(settings.processes.items()):
        await stage.start(target, workers, behind_proxy=number % 2 == 1)
    await asyncio.gather(*(one.ready() for one in stage.started))
    async with load(publishing, settings.rate, settings.keys) as source:
        await _everyone_is_at_work(stage)
        say(f"{settings.workers} workers in {len(settings.processes)} processes are at work")
        stage.start_s = time.monotonic()
        async with _looking_after(stage, source):
            await _make_trouble(stage, settings)
            end_s = time.monotonic()
            await source.stop()
            await _all_handled(stage, source, say)
    lag = await _lag(connection)
    await stage.end()
    stage.read_on()
    return judged(settings, stage, source, lag, end_s)


@contextmanager
def _directory(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        path = Path(keep)
        path.mkdir(parents=True, exist_ok=True)
        yield path
    else:
        with tempfile.TemporaryDirectory(prefix="chaos-") as made:
            yield Path(made)


@contextmanager
def _servers(*, cluster: bool) -> Iterator[NatsServer | NatsCluster]:
    if cluster:
        with NatsCluster.start(3) as nodes:
            yield nodes
    else:
        with NatsServer.start() as server:
            yield server


@asynccontextmanager
async def _proxy(servers: NatsServer | NatsCluster, scenario: Scenario) -> AsyncIterator[LossyProxy | None]:
    """Only where links are cut, and with one server: in a cluster clients learn of the other servers."""
    if scenario not in ("partition", "mixed") or isinstance(servers, NatsCluster):
        yield None
        return
    async with LossyProxy(servers.port) as proxy:
        yield proxy


async def _create(connection: Connection, settings: Settings) -> None:
    partitioning = Partitioning(FILTER, (1,), settings.partitions)
    await streams.create(
        connection,
        streams.StreamConfig(
            name=STREAM,
            subjects=[FILTER],
            storage=streams.StorageType(settings.storage),
            retention=streams.RetentionPolicy(settings.retention),
            num_replicas=3 if settings.cluster else 1,
            subject_transform=SubjectTransform(src=partitioning.filter, dest=partitioning.destination),
        ),
    )


async def _everyone_is_at_work(stage: FleetStage) -> None:
    async with deadline(_FIRST_MESSAGES_S, "not every worker handled something"):
        while not set(stage.workers_now) <= stage.at_work():
            for one in stage.started:
                one.check()
            await asyncio.sleep(_LOOK_EVERY_S)
            stage.read_on()


@asynccontextmanager
async def _looking_after(stage: FleetStage, source: Load) -> AsyncIterator[None]:
    async def look() -> None:
        while True:
            source.check()
            for target in stage.ended_by_themselves():
                await stage.start(target)
            await asyncio.sleep(_LOOK_EVERY_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


async def _make_trouble(stage: FleetStage, settings: Settings) -> None:
    """Faults strike at their time, however long the ones before take; planned steps wait for each other."""
    begin_s = time.monotonic()
    if settings.scenario in _ONE_BY_ONE:
        await _one_by_one(stage, settings, begin_s)
        return
    async with asyncio.TaskGroup() as doing:
        for step in planned_steps(settings):
            await asyncio.sleep(max(0.0, begin_s + step.at_s - time.monotonic()))
            doing.create_task(stage.do(step))
        await asyncio.sleep(max(0.0, begin_s + settings.seconds - time.monotonic()))


async def _one_by_one(stage: FleetStage, settings: Settings, begin_s: float) -> None:
    """Steps of the same moment together, `every_s` after the end of the step before; until the time is over."""
    for _, together in itertools.groupby(planned_steps(settings), key=lambda step: step.at_s):
        await asyncio.sleep(settings.every_s)
        stage.read_on()
        is_over = settings.moves and len(Timeline(stage.handled).moves()) >= settings.moves
        if is_over or time.monotonic() - begin_s > settings.seconds - settings.every_s:
            break
        async with asyncio.TaskGroup() as doing:
            for step in together:
                doing.create_task(stage.do(step))
    await asyncio.sleep(settings.every_s)


async def _all_handled(stage: FleetStage, source: Load, say: Say) -> None:
    """Wait for the last message. What is still missing after a standstill is lost."""
    moved_s, before = time.monotonic(), -1
    while True:
        stage.read_on()
        missing = source.keys.keys() - stage.sequences
        if not missing:
            return
        if len(missing) != before:
            moved_s, before = time.monotonic(), len(missing)
        if time.monotonic() - moved_s > _STANDSTILL_S:
            say(f"{len(missing)} messages are not handled, and nothing moves")
            return
        await asyncio.sleep(_LOOK_EVERY_S)


async def _lag(connection: Connection) -> int | None:
    """What the fleet itself counts as not handled. Acks may be under way for a moment."""
    lag: int | None = None
    for _ in range(20):
        with suppress(KeylaneError):
            lag = (await fleet.status(connection, STREAM, FLEET)).lag
            if not lag:
                return lag
        await asyncio.sleep(0.25)
    return lag


# ---- judging ------------------------------------------------------------------------------------------


def judged(settings: Settings, stage: FleetStage, source: Load, lag: int | None, end_s: float) -> Outcome:
    handled, troubles = stage.handled, stage.settled_troubles()
    found = verdict(source.keys, handled)
    why = causes.find(found.duplicated, handled, troubles)
    frozen = [one for one in troubles if one.kind == "freeze"]
    stale, both = stale_tokens(handled, frozen), overlaps(handled, frozen)
    line = Timeline(handled)
    moves = [one for one in line.moves() if one.before.at_s >= stage.start_s]
    start_s = stage.start_s
    happenings = [Happening(start_s + one["at_s"], one["what"]) for one in stage.log]
    wrong = Verdict(found.sent, found.handled, found.lost, (), found.out_of_order, found.unknown)
    return Outcome(
        settings=settings,
        verdict=found,
        causes=why,
        stale=stale,
        overlaps=len(both),
        findings=[
            *explained(wrong, handled, source.keys, happenings, start_s),
            *(_in_words("unexplained repeat", one, start_s) for one in why.unexplained[:MOST_EXPLAINED]),
            *(_in_words("at work at the same time", Pair(*one), start_s) for one in both[:MOST_EXPLAINED]),
            *(
                f"{'late start' if one.is_late_start else 'old token'}: {one.line.sequence} of partition "
                f"{one.line.partition} by {one.line.by} at {one.line.begun_ns / 1e9 - start_s:.3f} s with token "
                f"{one.line.token}; {one.by} had used {one.highest}"
                for one in stale[:MOST_EXPLAINED]
            ),
        ],
        surprises=stage.surprises,
        steps=stage.log,
        lag=lag,
        pauses=[one.pause_s for one in moves],
        others=line.gaps_of_others(moves),
        calm=line.calm_gaps(moves),
        returns=[wait for at_s, gone in stage.kills for wait in line.returns(at_s, set(gone)).values()],
        stops=stage.stop_s,
        leaders=sum(one.state == "leading" for one in stage.states),
        leases_lost=len(stage.leases_lost),
        publisher_gap_s=source.longest_gap_s,
        handled_under_faults=sum(one.at_s <= end_s for one in handled),
        repeat_age_s=max((_age_s(pair, trouble) for pair, trouble in why.explained), default=0.0),
        repeats=[
            f"{_in_words('repeat', pair, start_s)}: {trouble.kind} of {trouble.by} at {trouble.from_s - start_s:.3f} s"
            for pair, trouble in why.explained[:MOST_EXPLAINED]
        ],
    )


def _age_s(pair: Pair, trouble: Trouble) -> float:
    return max(0.0, trouble.from_s - pair.first.at_s)


def _in_words(what: str, pair: Pair, start_s: float) -> str:
    first, second = pair
    return (
        f"{what}: {first.sequence} of partition {first.partition} by {first.by} at {first.at_s - start_s:.3f} s (token "
        f"{first.token}), {second.sequence} by {second.by} at {second.at_s - start_s:.3f} s (token {second.token}, "
        f"delivered {second.delivered} times)"
    )


def as_text(outcome: Outcome) -> str:
    """For a terminal."""
    facts = outcome.as_json()
    done = ", ".join(f"{count} {name}" for name, count in facts["steps_done"].items())
    times: Sequence[tuple[str, str]] = (
        ("pause of a partition that moved", "pause_ms"),
        ("longest gap of the others meanwhile", "others_ms"),
        ("the same while nothing moved", "calm_ms"),
        ("from a kill until it flowed again", "return_ms"),
        ("from SIGTERM to the end of a process", "stop_ms"),
    )
    return "\n".join(
        [
            f"{outcome.verdict}  ({done})",
            f"{facts['explained']} repeats explained ({facts['causes']}), {facts['unexplained']} not; old tokens "
            f"{facts['stale_tokens']}, late starts {facts['late_starts']}, overlaps {facts['overlaps']}, lag "
            f"{facts['lag']}, leases lost {facts['leases_lost']}",
            *outcome.findings,
            *outcome.surprises,
            *(
                f"{name:<37} n {facts[key]['count']}, p50 {facts[key]['p50']} ms, p95 {facts[key]['p95']} ms, "
                f"max {facts[key]['max']} ms, never {facts[key]['never']}"
                for name, key in times
                if facts[key]["count"]
            ),
            f"{'longest gap of the publisher itself':<37} {facts['publisher_gap_ms']} ms",
            f"{'verdict':<37} {'clean' if outcome.spotless else 'NOT CLEAN'}"
            f"{'' if outcome.quick else ', and not as quick as it must be'}",
        ]
    )
