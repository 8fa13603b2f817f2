"""Faults under load: is anything lost or out of order, and has every repeat a reason?

An elastic group of 10 partitions on a server with file storage; members with two instances each, every instance a
process of its own; handlers that fail at random. Every second one fault: an instance is killed, frozen or stopped, a
member dropped or added, the server restarted. The verdict is on what the instances wrote down before they acked.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import keylane
from chaos import causes, faults
from chaos.audit import Audited, audited
from chaos.causes import Causes, Pair
from chaos.evidence import MOST_EXPLAINED, Fails, Handled, Happening, Log, explained, merged, verdict
from chaos.faults import KINDS, Fault, Kind
from chaos.load import FILTER, ID, Load, load
from chaos.members import Group, Members, RunBroken, members
from chaos.stage import Stage
from chaos.worker import gives_up
from keylane import groups
from keylane.dead_letters import list_dead_letters
from keylane.errors import KeylaneError
from keylane.jetstream import Connection, read_all, streams
from keylane.server import NatsServer
from keylane.testing import Verdict

Say = Callable[[str], None]
Storage = Literal["memory", "file"]
Sink = Literal["none", "postgres"]

PARTITIONS = 10
MEMBERS = ("a", "b", "c", "d")
PRESENT = MEMBERS[:3]
INSTANCES = tuple(f"{member}{number}" for member in MEMBERS for number in (1, 2))
STREAM, GROUP = "ORDERS", "billing"
QUEUE = f"{STREAM}-{GROUP}"
MAX_TRIES = 3
RATES: dict[Sink, float] = {"none": 2000.0, "postgres": 200.0}
_FIRST_MESSAGES_S = 60.0
_STANDSTILL_S = 30.0
_DRAIN_S = 300.0
_LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run."""

    seconds: float = 180.0
    seed: int = 1
    rate: float = RATES["none"]
    storage: Storage = "file"
    faults: tuple[Kind, ...] = KINDS
    every_s: float = 1.0
    work_s: float = 0.001
    """How long each message takes to handle."""
    failing: float = 0.03
    """The share of tries that fail."""
    odd: float = 0.005
    """The share of failures that end the member: what is raised is no Exception."""
    poison: int = 1000
    """One message in so many fails always; 0: none."""
    sink: Sink = "none"
    """postgres: effects are rows, written exactly once."""
    keep: str | None = None
    """A directory for the evidence and the logs, which are removed otherwise."""
    audit: bool = False
    """Members write a journal, and its audit is held against the verdict."""


@dataclass(frozen=True, slots=True)
class Seen:
    """All that there is to judge by."""

    source: Load
    stored: dict[int, int]
    """The id of every message that the stream has in the end, by its sequence."""
    logs: Logs
    stage: Stage
    dead: set[int]
    left: int
    end_s: float
    """When the load and the faults were over."""
    drain_s: float
    rows: list[Handled] | None = None
    """Of the database, if effects are rows there."""
    audited: Audited | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed."""

    settings: Settings
    verdict: Verdict
    causes: Causes
    dead_letters: int
    undeserved: list[int]
    """Dead letters that did not fail on purpose every time."""
    failed_tries: int
    crashes: int
    """Members that were ended by their handlers, on purpose."""
    uncounted: list[Fails]
    """Tries that failed on purpose and were not told as failures."""
    faults: list[dict[str, Any]]
    findings: list[str]
    """One line for each of the first things that must not be."""
    surprises: list[str]
    store: dict[str, int]
    """What the publisher was told against what the stream has."""
    left_in_queue: int
    drain_s: float
    handled_under_faults: int = 0
    """Effects before the faults were over: what was handled later was not put to the test."""
    rows_twice: int = 0
    """Messages with more than one row, if effects are rows."""
    rows_of_dead_letters: int = 0
    """Messages that have a row and are dead letters as well."""
    repeats: list[str] = field(default_factory=list)
    """One line for each of the first repeats that are explained."""
    audited: Audited | None = None

    @property
    def clean(self) -> bool:
        return (
            self.verdict.clean
            and (self.audited is None or not self.audited.disagreements)
            and not self.causes.unexplained
            and not self.rows_twice
            and not self.rows_of_dead_letters
            and not self.undeserved
            and not self.surprises
            and not self.uncounted
            and not self.left_in_queue
            and not any(self.store.values())
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": "groups",
            **asdict(self.settings),
            "clean": self.clean,
            "sent": self.verdict.sent,
            "handled_under_faults": self.handled_under_faults,
            "lost": len(self.verdict.lost),
            "duplicated": len(self.verdict.duplicated),
            "out_of_order": len(self.verdict.out_of_order),
            "unknown": len(self.verdict.unknown),
            "explained": len(self.causes.sequences_explained),
            "unexplained": len(self.causes.sequences_unexplained),
            "rows_twice": self.rows_twice,
            "rows_of_dead_letters": self.rows_of_dead_letters,
            "causes": self.causes.by_kind(),
            "dead_letters": self.dead_letters,
            "undeserved_dead_letters": len(self.undeserved),
            "failed_tries": self.failed_tries,
            "uncounted_failures": len(self.uncounted),
            "crashes": self.crashes,
            "faults_done": dict(Counter(one["kind"] for one in self.faults)),
            "surprises": self.surprises,
            "store": self.store,
            "left_in_queue": self.left_in_queue,
            "drain_s": round(self.drain_s, 2),
            "findings": self.findings,
            "repeats": self.repeats,
            "fault_log": self.faults,
            "audited": self.audited.as_json() if self.audited is not None else None,
        }


def planned(settings: Settings) -> list[Fault]:
    """All faults of a run: the settings alone decide."""
    return faults.plan(
        settings.seed,
        seconds=settings.seconds,
        every_s=settings.every_s,
        kinds=settings.faults,
        instances=INSTANCES,
        members=MEMBERS,
        present=PRESENT,
    )


async def run(settings: Settings, say: Say) -> Outcome:
    """Start everything, make the trouble, end everything, judge."""
    with _directory(settings.keep) as directory, _sink(settings.sink) as sink, NatsServer.start() as server:
        try:
            return await _run(settings, server, directory, sink, say)
        finally:
            if settings.keep is not None:
                shutil.copy(server.log_path, directory / "server.log")


async def _run(settings: Settings, server: NatsServer, directory: Path, sink: str, say: Say) -> Outcome:
    async with (
        await keylane.connect(server.url) as connection,
        await keylane.connect(server.url) as publishing,
        members(
            Group(server.url, STREAM, GROUP), directory, work_s=settings.work_s, options=_worker_options(settings, sink)
        ) as running,
    ):
        await _create(connection, settings)
        stage = Stage(server, connection, running, say)
        for instance in INSTANCES:
            await stage.raise_instance(instance)
        await asyncio.gather(*(one.ready() for one in running.started))
        logs = Logs(running)
        async with load(publishing, settings.rate) as source:
            await _everyone_is_at_work(logs)
            say(f"{len(INSTANCES)} instances of {len(MEMBERS)} members joined, {', '.join(PRESENT)} at work")
            async with _looking_after(stage, source):
                await _make_trouble(stage, planned(settings), settings.seconds)
                await source.stop()
                end_s = time.monotonic()
                dead, left = await _drained(connection, source, logs, say)
                drain_s = time.monotonic() - end_s
        await running.stop()
        logs.read_on()
        stored = {one.sequence: int(one.headers[ID]) async for one in read_all(connection, STREAM) if ID in one.headers}
        audit = None
        if settings.audit:
            say("auditing the journal")
            where = server.url, STREAM, GROUP
            audit = await audited(connection, where, stored, logs.effects(dead, None))
    return judged(settings, Seen(source, stored, logs, stage, dead, left, end_s, drain_s, _rows(sink), audit))


def _worker_options(settings: Settings, sink: str) -> list[str]:
    options = ["--seed", str(settings.seed), "--failing", str(settings.failing), "--odd", str(settings.odd)]
    if sink:
        from chaos.sink import CONCURRENCY  # noqa: PLC0415 - needs what only the run with a database has

        options += ["--sink", sink, "--concurrency", str(CONCURRENCY)]
    if gives_up():
        options += ["--poison", str(settings.poison), "--max-tries", str(MAX_TRIES)]
    if settings.audit:
        options.append("--journal")
    return options


async def _create(connection: Connection, settings: Settings) -> None:
    await streams.create(
        connection,
        streams.StreamConfig(
            name=STREAM, subjects=[FILTER], storage=streams.StorageType(settings.storage), allow_direct=True
        ),
    )
    await groups.create_elastic(
        connection, STREAM, GROUP, partitions=PARTITIONS, partition_by=FILTER, members=list(PRESENT)
    )


class Logs:
    """The evidence of all processes that were ever started."""

    def __init__(self, running: Members) -> None:
        self._running = running
        self._logs: dict[str, Log] = {}

    def read_on(self) -> int:
        """Take what is new; returns how many lines there are now."""
        for one in self._running.started:
            self._logs.setdefault(one.name, Log(one.evidence, one.name, PARTITIONS)).read_on()
        return sum(len(log.handled) + len(log.failed) for log in self._logs.values())

    @property
    def each(self) -> Iterable[Log]:
        return self._logs.values()

    @property
    def members_at_work(self) -> set[str]:
        return {one.member for one in self._running.started if self._logs[one.name].handled}

    @property
    def failed_tries(self) -> int:
        return sum(len(log.failed) for log in self._logs.values())

    def undeserved(self, dead: set[int]) -> list[int]:
        failed = (one for log in self._logs.values() for one in log.failed)
        return sorted({one.sequence for one in failed if one.sequence in dead and not one.meant})

    @property
    def linked(self) -> dict[str, list[float]]:
        return {name: log.linked for name, log in self._logs.items()}

    def effects(self, dead: Iterable[int], rows: list[Handled] | None) -> list[Handled]:
        """In the order in which they happened. Giving up is the effect that a dead letter has.

        Where effects are rows, the lines of the logs only say that a handler returned, which it also does for a message
        that was recognised.
        """
        letters = set(dead)
        given_up = [
            [
                Handled(one.at_s, one.key, one.partition, one.sequence, one.by, one.queue_sequence, one.delivered)
                for one in log.failed
                if one.tries >= MAX_TRIES and one.sequence in letters
            ]
            for log in self._logs.values()
        ]
        done = [log.handled for log in self._logs.values()] if rows is None else [sorted(rows)]
        return merged([*done, *given_up])

    def sequences(self) -> set[int]:
        return {one.sequence for log in self._logs.values() for one in log.handled}


async def _everyone_is_at_work(logs: Logs) -> None:
    try:
        async with asyncio.timeout(_FIRST_MESSAGES_S):
            while logs.read_on() == 0 or logs.members_at_work != set(PRESENT):  # noqa: ASYNC110 - files tell nobody
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError as error:
        raise RunBroken(f"only {sorted(logs.members_at_work)} handled something in {_FIRST_MESSAGES_S} s") from error


@asynccontextmanager
async def _looking_after(stage: Stage, source: Load) -> AsyncIterator[None]:
    async def look() -> None:
        while True:
            source.check()
            await stage.revive()
            await asyncio.sleep(_LOOK_EVERY_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


async def _make_trouble(stage: Stage, plan: Sequence[Fault], seconds: float) -> None:
    """Each fault at its time, however long the ones before it take; ends when all are over."""
    begin_s = time.monotonic()
    async with asyncio.TaskGroup() as doing:
        for fault in plan:
            await asyncio.sleep(max(0.0, begin_s + fault.at_s - time.monotonic()))
            doing.create_task(stage.do(fault))
        await asyncio.sleep(max(0.0, begin_s + seconds - time.monotonic()))


async def _drained(connection: Connection, source: Load, logs: Logs, say: Say) -> tuple[set[int], int]:
    """Wait until all is handled and the queue is empty; returns the dead letters and what stays in the queue.

    What is not handled after a long standstill counts as lost.
    """
    deadline_s = time.monotonic() + _DRAIN_S
    moved_s, before = time.monotonic(), (0, 0, 0)
    while True:
        lines = logs.read_on()
        try:
            state = await streams.state(connection, QUEUE)
            dead = {one.source_sequence async for one in list_dead_letters(connection, STREAM, group=GROUP)}
        except KeylaneError as error:  # the server may still be starting
            say(f"looking at the queue: {error}")
            await asyncio.sleep(_LOOK_EVERY_S)
            continue
        missing = source.keys.keys() - dead - logs.sequences()
        if not missing and state.messages == 0:
            return dead, 0
        now_s, here = time.monotonic(), (lines, state.messages, state.last_sequence)
        if here != before:
            moved_s, before = now_s, here
        if now_s - moved_s > _STANDSTILL_S or now_s > deadline_s:
            say(f"{len(missing)} messages are not handled, {state.messages} are in the queue, and nothing moves")
            return dead, state.messages
        await asyncio.sleep(4 * _LOOK_EVERY_S)


def judged(settings: Settings, seen: Seen) -> Outcome:
    stage, start_s, stored, source = seen.stage, seen.stage.start_s, seen.stored, seen.source
    effects = seen.logs.effects(seen.dead, seen.rows)
    found = verdict(stored, effects)
    troubles = [one for one in stage.troubles if one.kind != "server"]
    for one in stage.troubles:
        troubles += causes.felt(one, seen.logs.linked) if one.kind == "server" else []
    why = causes.find(found.duplicated, effects, troubles)
    uncounted = causes.uncounted(seen.logs.each, troubles)
    happenings = sorted(
        Happening(start_s + one["at_s"], f"{one['kind']} {one['target']} ({one['how']})") for one in stage.log
    )
    wrong = Verdict(found.sent, found.handled, found.lost, (), found.out_of_order, found.unknown)
    return Outcome(
        settings=settings,
        verdict=found,
        causes=why,
        dead_letters=len(seen.dead),
        undeserved=seen.logs.undeserved(seen.dead),
        failed_tries=seen.logs.failed_tries,
        crashes=stage.crashes,
        uncounted=uncounted,
        faults=stage.log,
        findings=[
            *explained(wrong, effects, source.keys, happenings, start_s),
            *(_pair_in_words("unexplained", one, start_s) for one in why.unexplained[:MOST_EXPLAINED]),
            *(f"not counted: {one.sequence} failed in {one.by}" for one in uncounted[:MOST_EXPLAINED]),
            *(f"undeserved dead letter: {one}" for one in seen.logs.undeserved(seen.dead)[:MOST_EXPLAINED]),
        ],
        surprises=stage.surprises,
        store={
            "acked_and_not_stored": len(source.numbers.items() - stored.items()),
            "stored_and_not_acked": len(stored.items() - source.numbers.items()),
            "stored_twice": len(stored) - len(set(stored.values())),
        },
        left_in_queue=seen.left,
        drain_s=seen.drain_s,
        handled_under_faults=sum(one.at_s <= seen.end_s for one in effects),
        rows_twice=len(verdict(stored, seen.rows or ()).duplicated),
        rows_of_dead_letters=len(seen.dead & {one.sequence for one in seen.rows or ()}),
        repeats=[
            f"{_pair_in_words('explained', pair, start_s)}: {trouble.kind} of {trouble.by} "
            f"{trouble.from_s - start_s:.3f} to {trouble.until_s - start_s:.3f} s"
            for pair, trouble in why.explained[:MOST_EXPLAINED]
        ],
        audited=seen.audited,
    )


def _pair_in_words(name: str, pair: Pair, start_s: float) -> str:
    first, second = pair
    return f"{name}: {first.sequence} of key {first.key} (partition {first.partition}): " + ", then ".join(
        f"{one.by} at {one.at_s - start_s:.3f} s (queue {one.queue_sequence}, delivery {one.delivered})"
        for one in (first, second)
    )


def as_text(outcome: Outcome) -> str:
    """For a terminal."""
    facts = outcome.as_json()
    rows = {
        "sent": facts["sent"],
        "under faults": f"{facts['handled_under_faults']} handled before the faults were over",
        "lost": facts["lost"],
        "out of order": facts["out_of_order"],
        "duplicated": facts["duplicated"],
        "  explained": f"{facts['explained']}  {_counts(facts['causes'])}",
        "  unexplained": facts["unexplained"],
        **({"  rows twice": facts["rows_twice"]} if outcome.settings.sink != "none" else {}),
        "dead letters": facts["dead_letters"],
        "  undeserved": facts["undeserved_dead_letters"],
        "failed tries": facts["failed_tries"],
        "  not counted": facts["uncounted_failures"],
        "crashes": facts["crashes"],
        "faults": f"{len(facts['fault_log'])}  {_counts(facts['faults_done'])}",
        "left in the queue": facts["left_in_queue"],
        "drained in": f"{facts['drain_s']} s",
        **_audit_rows(outcome.audited),
        "verdict": "clean" if outcome.clean else "NOT CLEAN",
    }
    lines = [f"{name:<18} {value}" for name, value in rows.items()]
    if any(outcome.store.values()):
        lines.append(f"{'store':<18} {_counts(outcome.store)}")
    return "\n".join([*lines, *outcome.surprises, *outcome.findings])


def _audit_rows(audited: Audited | None) -> dict[str, str]:
    if audited is None:
        return {}
    agrees = "; ".join(audited.disagreements) or f"the judge agrees ({audited.unwritten} effects were not written down)"
    return {"audit": audited.summary, "  agreement": agrees}


def _counts(numbers: dict[str, int]) -> str:
    return "(" + ", ".join(f"{name} {number}" for name, number in sorted(numbers.items())) + ")" if numbers else ""


@contextmanager
def _sink(kind: Sink) -> Iterator[str]:
    """The URL of the database that effects go to; empty: none."""
    if kind == "none":
        yield ""
        return
    from chaos.sink import database  # noqa: PLC0415 - needs what only the run with a database has

    with database() as url:
        yield url


def _rows(sink: str) -> list[Handled] | None:
    if not sink:
        return None
    from chaos.sink import rows  # noqa: PLC0415 - needs what only the run with a database has

    return rows(sink, PARTITIONS)


@contextmanager
def _directory(keep: str | None) -> Iterator[Path]:
    """A directory for the evidence: the one to keep, or one that is removed."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
            yield Path(temporary)
    else:
        path = Path(keep)
        path.mkdir(parents=True, exist_ok=True)
        yield path
