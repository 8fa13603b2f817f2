"""`python -m bench fleet --load`: 25 workers with 80 subjects each, at rates that grow until they cannot keep up.

2,000 subjects are 2,000 partitions. The workers share two processes, and the publisher has the same two cores. The
order of every subject is checked on every message.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import keylane
from bench.contest import Say, cpu_seconds
from keylane.jetstream import Connection, PublishAck, open_publisher, streams
from keylane.server import NatsServer
from tests.peers import tether

WORKERS, SUBJECTS = 25, 80
RATES = (2_000, 5_000, 10_000, 15_000, 20_000, 30_000)
_PROCESSES = 2
_STEP_S = 8.0
_STREAM = "LOAD"
_PAYLOAD = bytes(120)
_BURST = 256
_ASSIGNED_WITHIN_S = 120.0
_HANDLED_WITHIN_S = 20.0
_KNEE_P99_MS = 1000.0


def run(
    scale: float, say: Say, *, rates: Sequence[int] = RATES, storage: str = "file", join: dict[str, Any] | None = None
) -> tuple[dict[str, object], str]:
    """The figures of every rate as JSON and as Markdown. `scale`: share of the subjects and of the seconds."""
    count = max(WORKERS, int(WORKERS * SUBJECTS * scale))
    subjects = [f"dc.{number}.completion" for number in range(count)]
    given = join or {}
    with NatsServer.start() as server:
        ground = _LoadGround(server, subjects, storage, given, max(2.0, _STEP_S * min(1.0, scale)))
        rows = asyncio.run(_run(ground, rates, say))
    chosen = "".join(f", {key}={value}" for key, value in given.items())
    title = f"{WORKERS} workers, {count:,} subjects, {storage} storage{chosen}"
    return {"row": "fleet-load", "title": title, "steps": rows}, _table(title, rows)


@dataclass(frozen=True, slots=True)
class _LoadGround:
    server: NatsServer
    subjects: list[str]
    storage: str
    join: dict[str, Any]
    step_s: float


async def _run(ground: _LoadGround, rates: Sequence[int], say: Say) -> list[dict[str, Any]]:
    wanted = len(ground.subjects)
    async with keylane.connect(ground.server.url) as connection:
        config = streams.StreamConfig(
            name=_STREAM,
            subjects=["dc.*.completion"],
            storage=streams.StorageType(ground.storage),
            max_consumers=4 * wanted,
        )
        await streams.create(connection, config)
        async with _workers(ground) as processes:
            begun_s = time.monotonic()
            await _assigned(processes, wanted)
            say(f"{wanted:,} partitions were assigned and owned after {time.monotonic() - begun_s:.1f} s")
            rows = []
            for rate in rates:
                rows.append(await _step(connection, ground, processes, rate))
                say(_line(rows[-1]))
                if rows[-1]["p99_ms"] > 5 * _KNEE_P99_MS or rows[-1]["lost"]:
                    break
            return rows


@asynccontextmanager
async def _workers(ground: _LoadGround) -> AsyncIterator[list[Process]]:
    processes: list[Process] = []
    try:
        for number in range(_PROCESSES):
            workers = WORKERS // _PROCESSES + (number < WORKERS % _PROCESSES)
            given = {
                "url": ground.server.url, "stream": _STREAM, "fleet": "load", "subjects": ground.subjects,
                "workers": workers, "join": ground.join,
            }  # fmt: skip
            processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    tether.__file__,
                    sys.executable,
                    "-m",
                    "bench.contestants.fleet_load",
                    json.dumps(given),
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=1 << 20,
                )
            )
        await asyncio.gather(*(_said(one) for one in processes))
        yield processes
    finally:
        for one in processes:
            if one.returncode is None:
                one.kill()
            await one.wait()


async def _asked(processes: list[Process]) -> list[dict[str, Any]]:
    for one in processes:
        assert one.stdin is not None
        one.stdin.write(b"\n")
    return await asyncio.gather(*(_said(one) for one in processes))


async def _said(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise SystemExit("a process of workers ended before it was done")
    found: dict[str, Any] = json.loads(line)
    return found


async def _assigned(processes: list[Process], wanted: int) -> None:
    async with asyncio.timeout(_ASSIGNED_WITHIN_S):
        while sum(one["owned"] for one in await _asked(processes)) < wanted:  # noqa: ASYNC110 - processes tell nobody
            await asyncio.sleep(0.2)


async def _step(connection: Connection, ground: _LoadGround, processes: list[Process], rate: int) -> dict[str, Any]:
    server = ground.server
    await _asked(processes)
    cpu, begun_s = cpu_seconds(server.pid), time.monotonic()
    sent = await _publish(connection, ground.subjects, rate, ground.step_s)
    published_s = time.monotonic() - begun_s
    parts: list[dict[str, Any]] = []
    unique, deadline_s = 0, time.monotonic() + _HANDLED_WITHIN_S
    while unique < sent and time.monotonic() < deadline_s:
        parts += await _asked(processes)
        unique = sum(one["unique"] for one in parts)
        if unique < sent:
            await asyncio.sleep(0.1)
    took_s = time.monotonic() - begun_s
    waits = sorted(wait for one in parts if one["handled"] for wait in _weighted(one))
    return {
        "rate": rate,
        "published_rate": round(sent / published_s),
        "handled_rate": round(unique / took_s),
        "p50_ms": round(waits[len(waits) // 2], 1),
        "p99_ms": round(waits[int(len(waits) * 0.99)], 1),
        "workers_cpu": round(sum(one["cpu_seconds"] for one in parts) / took_s, 2),
        "server_cpu": round((cpu_seconds(server.pid) - cpu) / took_s, 2),
        "workers_mib": round(sum(one["resident_bytes"] for one in parts[-len(processes) :]) / 2**20),
        "server_mib": round(server.monitor("varz")["mem"] / 2**20),
        "redelivered": round(_total(parts, "redelivered") / max(1, _total(parts, "handled")), 5),
        "out_of_order": sum(one["out_of_order"] for one in parts),
        "lost": sent - unique,
    }


def _total(parts: list[dict[str, Any]], name: str) -> int:
    return sum(one[name] for one in parts)


def _weighted(part: dict[str, Any]) -> list[float]:
    """About one value for every hundred messages."""
    quantiles: list[float] = part["waits_ms"]
    wanted = max(1, part["handled"] // 100)
    return [quantiles[number * (len(quantiles) - 1) // wanted] for number in range(wanted + 1)]


async def _publish(connection: Connection, subjects: list[str], rate: int, seconds: float) -> int:
    """Subjects take turns. A machine that is too slow for the rate publishes as fast as it can."""
    pending: deque[asyncio.Future[PublishAck]] = deque()
    start_s, count = time.monotonic(), 0
    async with open_publisher(connection) as publisher:
        while (passed_s := time.monotonic() - start_s) < seconds:
            for _ in range(min(_BURST, int(passed_s * rate) - count)):
                message = time.monotonic_ns().to_bytes(8, "big") + _PAYLOAD
                pending.append(await publisher.send(subjects[count % len(subjects)], message))
                count += 1
            while pending and pending[0].done():
                pending.popleft().result()
            await asyncio.sleep(0.002 if count >= int(passed_s * rate) else 0)
        for one in pending:
            await one
    return count


def _line(row: dict[str, Any]) -> str:
    return (
        f"  {row['rate']:>7,} msg/s: handled {row['handled_rate']:,}/s, p50 {row['p50_ms']} ms, "
        f"p99 {row['p99_ms']} ms, CPU workers {row['workers_cpu']} server {row['server_cpu']}, lost {row['lost']}"
    )


_COLUMNS = {
    "msg/s wanted": "rate",
    "published": "published_rate",
    "handled": "handled_rate",
    "p50 ms": "p50_ms",
    "p99 ms": "p99_ms",
    "cores: workers": "workers_cpu",
    "cores: server": "server_cpu",
    "MiB: workers": "workers_mib",
    "MiB: server": "server_mib",
    "redelivered": "redelivered",
    "out of order": "out_of_order",
    "lost": "lost",
}


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    kept = [row["rate"] for row in rows if row["p99_ms"] < _KNEE_P99_MS and not row["lost"]]
    return "\n".join(
        [
            f"### {title}",
            "",
            f"| {' | '.join(_COLUMNS)} |",
            "| " + " | ".join(["---:"] * len(_COLUMNS)) + " |",
            *(f"| {' | '.join(f'{row[name]:,}' for name in _COLUMNS.values())} |" for row in rows),
            "",
            f"- the highest rate with p99 below {_KNEE_P99_MS / 1000:g} s: **{max(kept, default=0):,} msg/s**",
        ]
    )
