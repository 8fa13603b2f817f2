"""Row `fleet-cost`: what thousands of partitions cost that have nothing to do.

Workers join a fleet on a file stream, in one process and on a connection each. Measured: the time until every partition
has its owner, the memory of the servers, the CPU of servers and workers in an idle window, and the time that a moved
partition takes when one more worker joins. The claims in the bucket and what the workers say are sampled throughout: no
partition may have two owners, and none may be without one while nothing changes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import keylane
from bench.contest import cpu_seconds
from keylane import Connection, fleet
from keylane.core.fleet_records import FleetClaim, claim_key, from_json
from keylane.fleet import Worker, hashed
from keylane.fleet.store import FLEET_BUCKET
from keylane.groups import GroupMessage
from keylane.jetstream import Bucket, streams
from keylane.server import NatsCluster, NatsServer

PARTITIONS, WORKERS = 2000, 25
STREAM, FLEET = "ORDERS", "cost"
IDLE_S = 20.0
_SETTLED_S = 40.0
"""What a partition that was just taken over is looked at for is over by then."""
_SAMPLE_S = 0.25
_PAUSE_PER_LOOK = 4
"""Pauses between looks are so many times as long as a look takes: it reads all claims, which must not be the load."""
_LONGEST_S = 240.0
GO_MEMORY_MIB = 0.79
GO_MOVE_MS = "40 to 80"


@dataclass(slots=True)
class Samples:
    """What was seen of the owners, by two ways that do not know each other."""

    looks: int = 0
    two_owners: int = 0
    without_owner: int = 0
    """Of looks while nothing changed."""
    claims: dict[str, int] = field(default_factory=dict)


def run(
    rounds: int,
    scale: float,
    say: Callable[[str], None],
    *,
    partitions: int = PARTITIONS,
    workers: int = WORKERS,
    cluster: bool = False,
    idle_s: float = IDLE_S,
    settled_s: float = _SETTLED_S,
) -> tuple[dict[str, Any], str]:
    """One round: it measures a state, not a contest."""
    del rounds
    partitions, workers = max(round(partitions * scale), 8), max(round(workers * min(scale, 1.0)), 2)
    with _servers(cluster) as (urls, pids):
        waits_s = (settled_s, idle_s)
        figures = asyncio.run(_measure(urls, pids, partitions=partitions, workers=workers, waits_s=waits_s, say=say))
    figures = {"row": "fleet-cost", "partitions": partitions, "workers": workers, "cluster": cluster, **figures}
    limit = 10.0 if cluster else 5.0
    figures["met"] = (
        figures["two_owners"] == figures["without_owner"] == 0
        and figures["servers_idle_percent"] < limit
        and figures["worker_idle_percent"] < 3.0
    )
    return figures, _in_words(figures, limit)


@contextmanager
def _servers(cluster: bool) -> Iterator[tuple[list[str], list[int]]]:
    if cluster:
        with NatsCluster.start() as nodes:
            yield nodes.urls, [node.pid for node in nodes.nodes]
    else:
        with NatsServer.start() as server:
            yield [server.url], [server.pid]


async def _measure(
    urls: list[str],
    pids: Sequence[int],
    *,
    partitions: int,
    workers: int,
    waits_s: tuple[float, float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    async with AsyncExitStack() as open_, await keylane.connect(urls) as connection:

        async def join(number: int) -> Worker:
            return await _join(await open_.enter_async_context(keylane.connect(urls)), partitions, number)

        await _create(connection, partitions, replicas=3 if len(urls) > 1 else 1)
        memory = sum(map(_resident_mib, pids))
        began, cpu, own = time.monotonic(), _cpu(pids), time.process_time()
        joined = [await join(number) for number in range(workers)]
        samples = Samples()
        await _all_owned(connection, joined, partitions, samples)
        owned_s = time.monotonic() - began
        start = {"servers": _cpu(pids) - cpu, "workers": time.process_time() - own}
        say(f"all {partitions:,} owned after {owned_s:.1f} s; {start['servers']:.1f} s of the servers' CPU")
        await asyncio.sleep(waits_s[0])
        look = partial(_look, connection, joined, partitions, samples)
        servers, worker = await _idle(look, pids, samples, waits_s[1])
        worker /= len(joined)
        say(f"idle: servers {servers:.1f} % of a core, a worker {worker:.2f} %")
        grown = sum(map(_resident_mib, pids)) - memory
        move_ms, moved = await _one_more(connection, join, joined, partitions, samples)
        say(f"one more worker: {moved} partitions moved, {move_ms:.0f} ms each")
        await asyncio.gather(*(one.stop(timeout_s=30) for one in joined))
    return {
        "owned_after_s": round(owned_s, 2),
        "start_cpu_s": {name: round(value, 2) for name, value in start.items()},
        "server_mib_a_partition": round(grown / partitions, 3),
        "servers_idle_percent": round(servers, 2),
        "worker_idle_percent": round(worker, 3),
        "moved": moved,
        "move_ms": round(move_ms, 1),
        "looks": samples.looks,
        "two_owners": samples.two_owners,
        "without_owner": samples.without_owner,
    }


async def _create(connection: Connection, partitions: int, *, replicas: int) -> None:
    await streams.create_json(
        connection,
        {
            "name": STREAM,
            "subjects": ["orders.*"],
            "storage": "file",
            "num_replicas": replicas,
            "allow_direct": True,
            "max_consumers": partitions + 100,
            "subject_transform": {
                "src": "orders.*",
                "dest": f"{{{{partition({partitions},1)}}}}.orders.{{{{wildcard(1)}}}}",
            },
        },
    )


async def _join(connection: Connection, partitions: int, number: int) -> Worker:
    async def handle(_: GroupMessage) -> None:
        """Nothing is published."""

    return await fleet.join(
        connection,
        STREAM,
        FLEET,
        handle,
        partitions=hashed(partitions, "orders.*"),
        name=f"worker-{number}",
    )


async def _look(connection: Connection, joined: Sequence[Worker], partitions: int, samples: Samples) -> bool:
    """Whether every partition has an owner, by both ways. Notes those with two."""
    said = Counter(one for worker in joined for one in worker.partitions)
    prefix = f"{STREAM}.{FLEET}."
    found = await Bucket(connection, FLEET_BUCKET).get_matching(f"{prefix}{claim_key('*')}")
    records = [from_json(one.key.removeprefix(prefix), one.value) for one in found if one.value is not None]
    claims = {one.partition: one.worker for one in records if isinstance(one, FleetClaim) and one.held}
    samples.looks += 1
    samples.two_owners += sum(count > 1 for count in said.values())
    samples.claims = claims
    return len(said) == len(claims) == partitions


async def _all_owned(connection: Connection, joined: Sequence[Worker], partitions: int, samples: Samples) -> None:
    deadline, began = time.monotonic() + _LONGEST_S, time.monotonic()
    while not await _look(connection, joined, partitions, samples):
        now = time.monotonic()
        if now > deadline:
            raise SystemExit(f"after {_LONGEST_S:g} s only {len(samples.claims):,} of {partitions:,} are claimed")
        await asyncio.sleep(max(_SAMPLE_S, _PAUSE_PER_LOOK * (now - began)))
        began = time.monotonic()


async def _idle(
    look: Callable[[], Awaitable[bool]], pids: Sequence[int], samples: Samples, idle_s: float
) -> tuple[float, float]:
    """Percent of a core that the servers and this process take. Looks before and after: they are not idle work."""
    samples.without_owner += not await look()
    cpu, own, began = _cpu(pids), time.process_time(), time.monotonic()
    await asyncio.sleep(idle_s)
    took_s = time.monotonic() - began
    servers, workers = 100 * (_cpu(pids) - cpu) / took_s, 100 * (time.process_time() - own) / took_s
    for _ in range(10):
        samples.without_owner += not await look()
        await asyncio.sleep(_SAMPLE_S)
    return servers, workers


async def _one_more(
    connection: Connection,
    join: Callable[[int], Awaitable[Worker]],
    joined: list[Worker],
    partitions: int,
    samples: Samples,
) -> tuple[float, int]:
    """Milliseconds a moved partition, from the first release to the last claim, and how many moved."""
    written: dict[str, list[float]] = {}
    bucket, prefix = Bucket(connection, FLEET_BUCKET), f"{STREAM}.{FLEET}."

    def note(key: str, _value: bytes | None) -> None:
        written.setdefault(key, []).append(time.monotonic())

    async with bucket.hints(f"{prefix}{claim_key('*')}", note):
        joined.append(await join(len(joined)))
        deadline = time.monotonic() + _LONGEST_S
        while not (await _look(connection, joined, partitions, samples) and joined[-1].partitions):
            if time.monotonic() > deadline:
                raise SystemExit("the worker that joined got nothing")
            await asyncio.sleep(_SAMPLE_S)
    began, ended = min(min(times) for times in written.values()), max(max(times) for times in written.values())
    return 1000 * (ended - began) / len(written), len(written)


def _cpu(pids: Sequence[int]) -> float:
    return sum(map(cpu_seconds, pids))


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _in_words(figures: dict[str, Any], limit: float) -> str:
    where = "three servers" if figures["cluster"] else "one server"
    return (
        f"{figures['partitions']:,} partitions, {figures['workers']} workers, {where}: all owned after "
        f"{figures['owned_after_s']:.1f} s; idle: servers {figures['servers_idle_percent']:.1f} % of a core (limit "
        f"{limit:g} %), a worker {figures['worker_idle_percent']:.2f} % (limit 3 %); "
        f"{figures['server_mib_a_partition']:.2f} MiB of server memory a partition (the Go project {GO_MEMORY_MIB}); "
        f"one more worker: {figures['moved']} moved in {figures['move_ms']:.0f} ms each (the Go project {GO_MOVE_MS}); "
        f"two owners: {figures['two_owners']}, without one: {figures['without_owner']} in {figures['looks']} looks: "
        f"{'met' if figures['met'] else 'MISSED'}"
    )
