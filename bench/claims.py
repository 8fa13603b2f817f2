"""Row `claims`: how soon consumers have all partitions, and how soon those of killed ones are taken over.

Eight consumers in processes of their own, 64 partitions, one log on a real server; then three are killed at once. Also
how long one claim takes that nobody disputes, from the append to the first heartbeat.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keylane
from chaos.marshal import GROUP, STREAM, Fleet, Settings, all_claimed, create
from chaos.marshal_worker import ground
from keylane.core.picking import TopicPartition
from keylane.marshal import Admin
from keylane.marshal.author import Author
from keylane.marshal.claiming import Claimer
from keylane.marshal.logbook import LogBook
from keylane.marshal.trouble import Patience
from keylane.server import NatsServer

_INTERVAL_S = 2.0
_KILLED = 3
_CLAIMS = 64
_WAIT_S = 60.0


def run(rounds: int, scale: float, say: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """`scale` is a share of the consumers and partitions."""
    settings = Settings(
        consumers=max(round(8 * scale), 4), partitions=max(round(64 * scale), 8), interval_s=_INTERVAL_S, faults=()
    )
    claimed, reclaimed, single = [], [], []
    for number in range(rounds):
        first_s, again_s, one_ms = asyncio.run(_round(settings))
        claimed.append(first_s)
        reclaimed.append(again_s)
        single.append(one_ms)
        say(f"round {number + 1}: all after {first_s:.2f} s, again after {again_s:.2f} s, one claim {one_ms:.1f} ms")
    figures = {
        "row": "claims",
        "consumers": settings.consumers,
        "partitions": settings.partitions,
        "interval_s": _INTERVAL_S,
        "claimed_after_s": statistics.median(claimed),
        "claimed_limit_s": 2 * _INTERVAL_S,
        "reclaimed_after_s": statistics.median(reclaimed),
        "slowest_reclaim_s": max(reclaimed),
        "reclaimed_limit_s": 3 * _INTERVAL_S,
        "claim_ms": statistics.median(single),
        "met": max(claimed) <= 2 * _INTERVAL_S and max(reclaimed) <= 3 * _INTERVAL_S,
    }
    text = (
        f"{settings.consumers} consumers, {settings.partitions} partitions, interval {_INTERVAL_S:g} s: all claimed "
        f"after {figures['claimed_after_s']:.2f} s (limit {2 * _INTERVAL_S:g} s); {_KILLED} killed: all claimed again "
        f"after {figures['reclaimed_after_s']:.2f} s (limit {3 * _INTERVAL_S:g} s); one undisputed claim "
        f"{figures['claim_ms']:.1f} ms: {'met' if figures['met'] else 'MISSED'}"
    )
    return figures, text


async def _round(settings: Settings) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory(prefix="bench claims ") as directory, NatsServer.start() as server:
        async with (
            await keylane.connect(server.url) as connection,
            ground(settings.on, server.url, "marshal", settings.interval_s) as (log, source),
        ):
            await create(connection, settings.partitions)
            fleet = Fleet(settings, server.url, Path(directory), lambda _: None)
            try:
                await fleet.start_all()
                first_s = await all_claimed(fleet, log, settings)
                admin = Admin(log, heartbeat_interval_s=settings.interval_s)
                dead = await fleet.kill_some(_KILLED)
                again_s = await _claimed_again(admin, settings, dead)
            finally:
                await fleet.kill_all()
        async with ground(settings.on, server.url, "alone", settings.interval_s) as (log, source):
            book = LogBook(log, settings.interval_s, lambda: Patience("the log", 5.0))
            await book.read()
            claimer = Claimer(book, Author("alone", GROUP), source, "at_least_once", Patience("the source", 5.0))
            times = []
            for number in range(_CLAIMS):
                began_s = time.perf_counter()
                assert await claimer.claim(TopicPartition(STREAM, number % settings.partitions)) is not None
                times.append(1000 * (time.perf_counter() - began_s))
    return first_s, again_s, statistics.median(times)


async def _claimed_again(admin: Admin, settings: Settings, dead: set[str]) -> float:
    """Seconds until nobody that is dead owns anything."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < _WAIT_S:
        world = await admin.world()
        claims = [world.claim_of(GROUP, STREAM, number) for number in range(settings.partitions)]
        if all(one is not None and one.owner is not None and one.owner.client not in dead for one in claims):
            return time.monotonic() - began_s
        await asyncio.sleep(0.02)
    raise AssertionError(f"partitions of {sorted(dead)} were not taken over within {_WAIT_S:g} s")
