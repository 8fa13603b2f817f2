"""A rolling restart of README's program under load: is anything lost, repeated or out of order, and who waits how long?

Four copies of the app, or two members of a group with two instances each; every one is a process of its own. One after
the other gets SIGTERM, as a deploy does it, and is started again once it is gone. The verdict is on what the handlers
printed, and so are the times.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import keylane
from chaos import timing
from chaos.evidence import Handled, Happening, Log, explained, merged, verdict
from chaos.load import Load, load
from chaos.members import Group, MemberProcess, Members, deadline, members
from chaos.readme_program import PARTITIONS
from keylane.server import NatsCluster, NatsServer
from keylane.testing import Verdict

Say = Callable[[str], None]
Kind = Literal["app", "elastic", "static"]

MEMBERS = ("alice", "bob")
INSTANCES = tuple(f"{member}{number}" for number in (1, 2) for member in MEMBERS)
STREAM, GROUP = "ORDERS", "billing"
GAP_LIMIT_S = 0.5
_FIRST_MESSAGES_S = 60.0
_STANDSTILL_S = 20.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run."""

    seconds: float = 60.0
    seed: int = 1
    rate: float = 1000.0
    every_s: float = 3.0
    kind: Kind = "app"
    """README's app, or its program of a group of this kind."""
    cluster: bool = False
    """Three servers, and three replicas of everything."""


class Restart(NamedTuple):
    """One instance was stopped; `at_s` is the moment before its SIGTERM."""

    at_s: float
    name: str
    stop_s: float


class Gap(NamedTuple):
    """From the last message of a key in the stopped instance to the next one, in another instance."""

    key: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed."""

    settings: Settings
    verdict: Verdict
    explained: list[str]
    complaints: list[str]
    """Processes that ended with another code than 0, or wrote to standard error."""
    restarts: list[Restart]
    handovers: int
    """How many of the restarted instances were at work."""
    gaps: list[Gap]
    publisher_gap_s: float

    @property
    def spotless(self) -> bool:
        """0 lost, 0 twice, 0 out of order, and every process ended with code 0 and without a word."""
        return self.verdict.clean and not self.verdict.duplicated and not self.complaints

    @property
    def quick(self) -> bool:
        return bool(self.gaps) and timing.percentile([one.seconds for one in self.gaps], 0.95) < GAP_LIMIT_S

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": "rolling",
            **asdict(self.settings),
            "clean": self.spotless,
            "quick": self.quick,
            "sent": self.verdict.sent,
            "lost": len(self.verdict.lost),
            "duplicated": len(self.verdict.duplicated),
            "out_of_order": len(self.verdict.out_of_order),
            "unknown": len(self.verdict.unknown),
            "explained": self.explained,
            "complaints": self.complaints,
            "restarts": len(self.restarts),
            "handovers": self.handovers,
            "gap_ms": timing.summary([one.seconds for one in self.gaps]),
            "stop_ms": timing.summary([one.stop_s for one in self.restarts]),
            "publisher_gap_ms": round(self.publisher_gap_s * 1000, 1),
        }


async def run(settings: Settings, say: Say) -> Outcome:
    """Start everything, restart one instance after the other, end everything, judge."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory, _servers(cluster=settings.cluster) as url:
        program = [
            *(sys.executable, "-m", "chaos.readme_program", "--url", url, "--kind", settings.kind),
            *("--replicas", "3" if settings.cluster else "1"),
        ]
        async with (
            keylane.connect(url) as connection,
            members(Group(url, STREAM, GROUP), Path(directory), program=program) as running,
        ):
            fleet = Fleet(running)
            start_s = time.monotonic()
            first, *others = INSTANCES
            await (await fleet.start(first)).ready()  # it makes stream and group
            await asyncio.gather(*[(await fleet.start(instance)).ready() for instance in others])
            async with load(connection, settings.rate) as source:
                await fleet.everyone_is_at_work()
                say(f"{len(INSTANCES)} copies of README's program are up")
                restarts = await _roll(fleet, settings, source, say)
                await source.stop()
                await fleet.all_handled(source)
            await running.stop()
            return _judged(settings, source, fleet, restarts, start_s)


@contextmanager
def _servers(*, cluster: bool) -> Iterator[str]:
    """The URL of one server, or the URLs of three."""
    if cluster:
        with NatsCluster.start(3) as nodes:
            yield ",".join(nodes.urls)
    else:
        with NatsServer.start() as server:
            yield server.url


class Fleet:
    """The instances that run now, and the evidence of all that ever ran."""

    def __init__(self, running: Members) -> None:
        self._running = running
        self._now: dict[str, MemberProcess] = {}
        self.logs: list[Log] = []

    async def start(self, instance: str) -> MemberProcess:
        member = instance.rstrip("0123456789")
        process = await self._running.start(member, name=f"{instance}-{len(self._running.started)}")
        self._now[instance] = process
        self.logs.append(Log(process.evidence, process.name, PARTITIONS))
        return process

    async def restart(self, instance: str) -> Restart:
        process, at_s = self._now[instance], time.monotonic()
        await process.stop()
        stop_s = time.monotonic() - at_s
        await (await self.start(instance)).ready()
        return Restart(at_s, process.name, stop_s)

    def check(self) -> None:
        self._running.check()

    def handled(self, source: Load) -> list[Handled]:
        """All evidence so far. The program prints numbers: they become the sequences that the stream gave them."""
        sequences = {number: sequence for sequence, number in source.numbers.items()}
        for log in self.logs:
            log.read_on()
        found = merged(log.handled for log in self.logs)
        return [one._replace(sequence=sequences.get(one.sequence, -one.sequence)) for one in found]

    async def everyone_is_at_work(self) -> None:
        async with deadline(_FIRST_MESSAGES_S, "not every member handled something"):
            while len({log.by.rstrip("0123456789-") for log in self.logs if log.handled}) < len(MEMBERS):
                self.check()
                await asyncio.sleep(_LOOK_EVERY_S)
                for log in self.logs:
                    log.read_on()

    async def all_handled(self, source: Load) -> None:
        """Wait for the last message. What is still missing after a standstill is lost."""
        moved_s, before = time.monotonic(), -1
        while time.monotonic() - moved_s < _STANDSTILL_S:
            self.check()
            count = len({one.sequence for one in self.handled(source)})
            if count >= len(source.keys):
                return
            if count != before:
                moved_s, before = time.monotonic(), count
            await asyncio.sleep(10 * _LOOK_EVERY_S)

    @property
    def complaints(self) -> list[str]:
        """What should not be, once all have ended."""
        return [
            f"{one.name} ended with {one.returncode}: {one.last_words}"
            for one in self._running.started
            if one.returncode != 0 or one.last_words
        ]


async def _roll(fleet: Fleet, settings: Settings, source: Load, say: Say) -> list[Restart]:
    """One instance after the other, each round in an order that the seed decides; at least one whole round."""
    chance = random.Random(settings.seed)  # noqa: S311 - the same seed makes the same run
    start_s = time.monotonic()
    restarts: list[Restart] = []
    turns: list[str] = []
    while len(restarts) < len(INSTANCES) or time.monotonic() - start_s < settings.seconds - settings.every_s:
        await asyncio.sleep(settings.every_s)
        fleet.check()
        source.check()
        turns = turns or chance.sample(INSTANCES, len(INSTANCES))
        restarts.append(await fleet.restart(turns.pop()))
        last = restarts[-1]
        say(f"{last.at_s - start_s:6.1f} s  {last.name} was stopped in {last.stop_s * 1000:.0f} ms and started again")
    await asyncio.sleep(settings.every_s)
    return restarts


def gaps(restarts: Sequence[Restart], handled: Sequence[Handled]) -> dict[str, list[Gap]]:
    """For every restarted instance: the gap of each key that it was at work on. Empty: it was a standby."""
    by_key: dict[str, list[Handled]] = defaultdict(list)
    for one in handled:
        by_key[one.key].append(one)
    found: dict[str, list[Gap]] = {one.name: [] for one in restarts}
    for key, times in by_key.items():
        for last, first in pairwise(times):
            if last.by != first.by and last.by in found:
                found[last.by].append(Gap(key, first.at_s - last.at_s))
    return found


def _judged(settings: Settings, source: Load, fleet: Fleet, restarts: list[Restart], start_s: float) -> Outcome:
    handled = fleet.handled(source)
    judgement = verdict(source.keys, handled)
    happenings = [Happening(one.at_s, f"SIGTERM to {one.name}") for one in restarts]
    by_restart = gaps(restarts, handled)
    return Outcome(
        settings=settings,
        verdict=judgement,
        explained=explained(judgement, handled, source.keys, happenings, start_s),
        complaints=fleet.complaints,
        restarts=restarts,
        handovers=sum(bool(one) for one in by_restart.values()),
        gaps=[gap for one in by_restart.values() for gap in one],
        publisher_gap_s=source.longest_gap_s,
    )


def as_text(outcome: Outcome) -> str:
    """For a terminal."""
    facts = outcome.as_json()
    return "\n".join(
        [
            f"{outcome.verdict}  ({facts['restarts']} restarts, {facts['handovers']} of an instance at work)",
            *outcome.explained,
            *outcome.complaints,
            *(
                f"{name:<36} p50 {one['p50']} ms, p95 {one['p95']} ms, max {one['max']} ms"
                for name, one in (
                    ("gap of a key at a handover", facts["gap_ms"]),
                    ("from SIGTERM to the end of a process", facts["stop_ms"]),
                )
            ),
            f"{'longest gap of the publisher itself':<36} {facts['publisher_gap_ms']} ms",
            f"{'verdict':<36} {'clean' if outcome.spotless else 'NOT CLEAN'}"
            f"{'' if outcome.quick else f', and p95 is not below {GAP_LIMIT_S:g} s'}",
        ]
    )
