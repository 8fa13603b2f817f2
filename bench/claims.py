"""Row `claims`: how soon consumers have all partitions, and how soon those of killed ones are taken over.

Eight consumers in processes of their own, 64 partitions, one log, on a real nats-server and on a real Kafka; then three
are killed at once with SIGKILL. The start is when the first process is asked for, so all that eight Pythons need to
start on this machine counts. Times are from what the consumers themselves wrote down. Also how long one claim takes
that nobody disputes, from the append to the first heartbeat.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

from chaos.log_check import two_fresh_owners
from chaos.marshal import GROUP, Fleet, Settings, all_claimed, whole_log
from chaos.marshal_judge import Start, claims_in
from chaos.marshal_stage import On, Stage, open_stage
from chaos.marshal_worker import ground
from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import overlaps
from keylane.core.world import replay
from keylane.marshal.claim_attempts import Claimer
from keylane.marshal.log_view import ClientIdentity, LogView
from keylane.retrying import Backoff
from tests.peers.kafka import Kafka

INTERVAL_S = 2.0
_KILLED = 3 / 8
"""Of the consumers. Any half of them may own all partitions."""
_CLAIMS = 64
_WAIT_INTERVALS = 20
_NS = 1_000_000_000


class Round(NamedTuple):
    start: Start
    reclaimed_s: float
    claim_ms: float
    two_owners: int
    """Places of the log with two owners: by the rules, and by a reading that does not know them."""


def run(
    rounds: int,
    scale: float,
    say: Callable[[str], None],
    *,
    on: Sequence[On] = get_args(On),
    interval_s: float = INTERVAL_S,
    bootstrap: str | None = None,
) -> tuple[dict[str, Any], str]:
    """`scale` is a share of the consumers and partitions. `bootstrap`: of a Kafka that runs."""
    settings = [
        Settings(
            consumers=max(round(8 * scale), 4),
            partitions=max(round(64 * scale), 8),
            interval_s=interval_s,
            faults=(),
            on=one,
        )
        for one in on
    ]
    figures: dict[str, Any] = {"row": "claims", "interval_s": interval_s, "met": True}
    lines = []
    for one in settings:
        with _broker(one.on, bootstrap) as brokers:
            found = [_said(asyncio.run(_round(one, brokers)), one, say) for _ in range(rounds)]
        figures[one.on] = told = _figures(one, found)
        figures["met"] &= told["met"]
        lines.append(_in_words(one, told))
    return figures, "\n".join(lines)


@contextmanager
def _broker(on: On, bootstrap: str | None) -> Iterator[str | None]:
    """One Kafka for all rounds: a JVM that has just started is slow for a while."""
    if on != "kafka" or bootstrap is not None:
        yield bootstrap
        return
    with Kafka.start() as kafka:
        yield kafka.bootstrap


def _said(one: Round, settings: Settings, say: Callable[[str], None]) -> Round:
    say(
        f"{settings.on}: all after {one.start.after_spawn_s:.2f} s ({one.start.after_ready_s:.2f} s after the last "
        f"consumer had begun), again after {one.reclaimed_s:.2f} s, one claim {one.claim_ms:.1f} ms"
    )
    return one


def _figures(settings: Settings, found: Sequence[Round]) -> dict[str, Any]:
    """The slowest round counts for the limits."""
    slowest_start_s = max(one.start.after_spawn_s for one in found)
    slowest_again_s = max(one.reclaimed_s for one in found)
    wrong = sum(one.start.claimed_twice + one.two_owners for one in found)
    return {
        "consumers": settings.consumers,
        "killed": _killed(settings),
        "partitions": settings.partitions,
        "claimed_after_s": statistics.median(one.start.after_spawn_s for one in found),
        "claimed_after_ready_s": statistics.median(one.start.after_ready_s for one in found),
        "slowest_claimed_s": slowest_start_s,
        "claimed_limit_s": 2 * settings.interval_s,
        "reclaimed_after_s": statistics.median(one.reclaimed_s for one in found),
        "slowest_reclaim_s": slowest_again_s,
        "reclaimed_limit_s": 3 * settings.interval_s,
        "claim_ms": statistics.median(one.claim_ms for one in found),
        "two_owners": wrong,
        "met": not wrong and slowest_start_s <= 2 * settings.interval_s and slowest_again_s <= 3 * settings.interval_s,
    }


def _in_words(settings: Settings, told: dict[str, Any]) -> str:
    first, again = told["claimed_limit_s"], told["reclaimed_limit_s"]
    return (
        f"{settings.on}: {settings.consumers} consumers, {settings.partitions} partitions, interval "
        f"{settings.interval_s:g} s: all claimed {told['claimed_after_s']:.2f} s after the start, slowest "
        f"{told['slowest_claimed_s']:.2f} s (limit {first:g} s); {told['killed']} killed: all claimed "
        f"again after {told['reclaimed_after_s']:.2f} s, slowest {told['slowest_reclaim_s']:.2f} s (limit "
        f"{again:g} s); two owners: {told['two_owners']}; one undisputed claim "
        f"{told['claim_ms']:.1f} ms: {'met' if told['met'] else 'MISSED'}"
    )


def _killed(settings: Settings) -> int:
    return max(int(_KILLED * settings.consumers), 1)


async def _round(settings: Settings, bootstrap: str | None) -> Round:
    async with open_stage(
        settings.on, partitions=settings.partitions, interval_s=settings.interval_s, bootstrap=bootstrap
    ) as stage:
        claim_ms = await _alone(stage, settings)
        with tempfile.TemporaryDirectory(prefix="bench claims ") as directory:
            fleet = Fleet(settings, stage, Path(directory), lambda _: None)
            try:
                await fleet.start_all()
                start = await all_claimed(fleet, stage, settings)
                killed_ns = time.monotonic_ns()
                dead = await fleet.kill_some(_killed(settings))
                again_s = await _claimed_again(fleet, settings, dead, killed_ns)
            finally:
                await fleet.kill_all()
        records = await whole_log(stage)
        world = replay(
            records,
            settings.interval_s,
            stage.log.partitions,
            first_offset=stage.log.first_offset,
            keep_history=True,
        )
        found = len(list(overlaps(world.tenures()))) + len(two_fresh_owners(records, settings.interval_s))
        return Round(start, again_s, claim_ms, found)


async def _claimed_again(fleet: Fleet, settings: Settings, dead: set[str], killed_ns: int) -> float:
    """Seconds from the kill until somebody who lives has every partition of the dead."""
    owners: dict[int, tuple[int, str]] = {}
    for one in fleet.started:
        for partition, at_ns in claims_in(one.evidence):
            owners[partition] = max(owners.get(partition, (0, "")), (at_ns, one.member))
    orphans = {partition for partition, (_, owner) in owners.items() if owner in dead}
    assert orphans, "the killed ones owned nothing"
    deadline = time.monotonic() + _WAIT_INTERVALS * settings.interval_s
    while time.monotonic() < deadline:
        again: dict[int, int] = {}
        for one in fleet.started:
            for partition, at_ns in claims_in(one.evidence):
                if one.member not in dead and partition in orphans and at_ns > killed_ns:
                    again[partition] = min(at_ns, again.get(partition, at_ns))
        if again.keys() == orphans:
            return (max(again.values()) - killed_ns) / _NS
        fleet.check()
        await asyncio.sleep(0.1)
    raise AssertionError(f"partitions of {sorted(dead)} were not taken over: {sorted(orphans - again.keys())}")


async def _alone(stage: Stage, settings: Settings) -> float:
    """Milliseconds for one claim, in a log of its own."""
    async with ground(stage.on, stage.url, f"{stage.log_name}-alone", settings.interval_s) as (log, source):
        view = LogView(log, ClientIdentity("alone", GROUP), settings.interval_s, lambda: Backoff("the log", 5.0))
        await view.read()
        claimer = Claimer(view, source, "at_least_once", Backoff("the source", 5.0), batch_size=1)
        times = []
        for number in range(min(_CLAIMS, settings.partitions)):
            began_s = time.perf_counter()
            assert await claimer.claim(TopicPartition(stage.topic, number)) is not None
            times.append(1000 * (time.perf_counter() - began_s))
    return statistics.median(times)
