"""Row `exporter`: what `keylane exporter` takes for an account with 1,000 partitions and 50 members that fall behind.

An elastic group, then a fleet: real members, in one process and on a connection each, whose handlers do not end, and
messages that wait in every partition, so that every age is asked for. Measured on the command as a process: the time of
a scrape, and the server's CPU for it above what it takes anyway, as a share of a core at a scrape every 15 s.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import keylane
from bench.contest import cpu_seconds
from keylane import Connection, fleet, groups
from keylane.groups import GroupMessage
from keylane.jetstream import Outgoing, publish_many, streams
from keylane.overview import GroupOverview, overview
from keylane.server import NatsServer

PARTITIONS, MEMBERS = 1000, 50
SCRAPES = 20
EVERY_S = 15.0
LIMIT_S, LIMIT_PERCENT = 1.0, 2.0
_KEYS_A_PARTITION = 4
_IDLE_S = 10.0
_READY_S = 240.0

Kind = Literal["elastic", "fleet"]


def run(
    rounds: int,
    scale: float,
    say: Callable[[str], None],
    *,
    partitions: int = PARTITIONS,
    members: int = MEMBERS,
    idle_s: float = _IDLE_S,
) -> tuple[dict[str, Any], str]:
    """One round: it measures a state, not a contest."""
    del rounds
    partitions, members = max(round(partitions * scale), 8), max(round(members * min(scale, 1.0)), 2)
    kinds: tuple[Kind, ...] = ("elastic", "fleet")
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        with NatsServer.start() as server:
            found[kind] = asyncio.run(_measure(server, kind, partitions, members, idle_s))
        say(_in_words(kind, found[kind]))
    met = all(one["scrape_s"] < LIMIT_S and one["server_percent"] < LIMIT_PERCENT for one in found.values())
    figures = {"row": "exporter", "partitions": partitions, "members": members, **found, "met": met}
    text = f"{partitions:,} partitions, {members} members, messages wait in all: "
    text += "; ".join(_in_words(kind, one) for kind, one in found.items())
    return figures, f"{text}: {'met' if met else 'MISSED'}"


async def _measure(server: NatsServer, kind: Kind, partitions: int, members: int, idle_s: float) -> dict[str, Any]:
    over = asyncio.Event()

    async def handle(_: GroupMessage) -> None:
        await over.wait()

    async with AsyncExitStack() as open_, await keylane.connect(server.url) as connection:
        await _create(connection, kind, partitions, members)
        for number in range(members):
            client = await open_.enter_async_context(keylane.connect(server.url))
            if kind == "elastic":
                await open_.enter_async_context(groups.join(client, "ORDERS", "billing", f"m{number}", handle))
            else:
                by_hash = fleet.hashed(partitions, "orders.*")
                await open_.enter_async_context(
                    fleet.join(client, "ORDERS", "billing", handle, partitions=by_hash, lease_s=15)
                )
        open_.callback(over.set)
        keys = [f"orders.k{number}" for number in range(partitions * _KEYS_A_PARTITION)]
        await publish_many(connection, [Outgoing(subject, bytes(128)) for subject in keys])
        seen = await _ready(connection, len(keys))
        pid, began = server.pid, cpu_seconds(server.pid)
        await asyncio.sleep(idle_s)
        idle = (cpu_seconds(pid) - began) / idle_s
        async with _exporter(server.url) as (exporter, port):
            await _scrape(port)
            own = cpu_seconds(exporter)
            cpu, start, times, page = cpu_seconds(pid), time.monotonic(), [], b""
            for _ in range(SCRAPES):
                began = time.monotonic()
                page = await _scrape(port)
                times.append(time.monotonic() - began)
                await asyncio.sleep(0.2)
            own = cpu_seconds(exporter) - own
            used = cpu_seconds(pid) - cpu - idle * (time.monotonic() - start)
    return {
        "lag": seen.lag,
        "scrape_s": round(statistics.median(times), 3),
        "slowest_s": round(max(times), 3),
        "samples": sum(not line.startswith(b"#") for line in page.splitlines()),
        "exporter_ms_a_scrape": round(1000 * own / SCRAPES, 1),
        "server_ms_a_scrape": round(1000 * used / SCRAPES, 1),
        "server_percent": round(100 * used / SCRAPES / EVERY_S, 2),
        "server_idle_percent": round(100 * idle, 1),
    }


async def _create(connection: Connection, kind: Kind, partitions: int, members: int) -> None:
    config: dict[str, Any] = {"name": "ORDERS", "subjects": ["orders.*"], "storage": "file", "allow_direct": True}
    if kind == "fleet":
        config["subject_transform"] = {
            "src": "orders.*",
            "dest": f"{{{{partition({partitions},1)}}}}.orders.{{{{wildcard(1)}}}}",
        }
    await streams.create_json(connection, config)
    if kind == "elastic":
        names = [f"m{number}" for number in range(members)]
        await groups.create_elastic(
            connection, "ORDERS", "billing", partitions=partitions, partition_by="orders.*", members=names
        )


async def _ready(connection: Connection, messages: int) -> GroupOverview:
    """Every partition has its owner, and every message waits."""
    deadline = time.monotonic() + _READY_S
    while True:
        [group] = (await overview(connection)).groups
        if not group.unowned and group.lag == messages:
            return group
        if time.monotonic() > deadline:
            raise SystemExit(f"not ready after {_READY_S:g} s: {group.summary}")
        await asyncio.sleep(2)


@asynccontextmanager
async def _exporter(url: str) -> AsyncIterator[tuple[int, int]]:
    """The command as a process; yields its process id and its port."""
    command = [sys.executable, "-c", "from keylane.cli.main import main; main()", "exporter"]
    process = await asyncio.create_subprocess_exec(
        *command, "-s", url, "--port", "0", "--host", "127.0.0.1", "--interval", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        yield process.pid, int(line.rpartition(":")[2].partition("/")[0])
    finally:
        process.terminate()
        await process.wait()


async def _scrape(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    return answer.partition(b"\r\n\r\n")[2]


def _in_words(kind: str, one: dict[str, Any]) -> str:
    return (
        f"{kind}: a scrape takes {one['scrape_s']:.2f} s ({one['slowest_s']:.2f} at most, limit {LIMIT_S:g}) for "
        f"{one['samples']:,} samples, {one['exporter_ms_a_scrape']:.0f} ms of its own CPU and "
        f"{one['server_ms_a_scrape']:.0f} ms of the server's, "
        f"{one['server_percent']:.2f} % of a core every {EVERY_S:g} s (limit {LIMIT_PERCENT:g})"
    )
