"""Row `app`: what the decorator of `keylane.App` and its typed payloads cost, beside a plain `fleet.join`."""

from __future__ import annotations

import asyncio
from typing import Any

import keylane
from bench.contest import Figures, Say, python_contestant, run_contest, table
from bench.contestants.app_handler import FILTER, PARTITIONS, PAYLOADS
from keylane.jetstream import Outgoing, publish_many, streams
from keylane.server import NatsServer

STREAM = "BENCH"
JOIN = "fleet.join"
BYTES = "App, bytes"
AIM = 0.85
"""The decorator may cost 15 % of the rate of a plain join."""
KEYS = 1000


def run(rounds: int, scale: float, say: Say) -> tuple[dict[str, Any], str]:
    count = max(2000, int(100_000 * scale))
    with NatsServer.start() as server:
        asyncio.run(_fill(server.url, count))
        contestants = [
            python_contestant(
                JOIN if kind == "join" else f"App, {kind}",
                "app_handler",
                lambda number, kind=kind: [server.url, STREAM, f"{kind}{number}", kind, str(count)],  # type: ignore[misc]
            )
            for kind in ("join", *PAYLOADS)
        ]
        figures = run_contest(contestants, server.pid, rounds, say)
    return _report(figures, count)


async def _fill(url: str, count: int) -> None:
    async with keylane.connect(url) as connection:
        destination = f"{{{{Partition({PARTITIONS},1)}}}}.bench.{{{{Wildcard(1)}}}}"
        await streams.create_json(
            connection,
            {
                "name": STREAM,
                "subjects": [FILTER],
                "storage": "memory",
                "subject_transform": {"src": FILTER, "dest": destination},
                "allow_direct": True,
            },
        )
        payloads = [b'{"customer": "customer-%d", "cents": %d}' % (number % KEYS, number) for number in range(count)]
        await publish_many(
            connection, [Outgoing(f"bench.k{number % KEYS}", data) for number, data in enumerate(payloads)]
        )


def _report(figures: dict[str, Figures], count: int) -> tuple[dict[str, Any], str]:
    compared = {name: round(one.rate / figures[JOIN].rate, 2) for name, one in figures.items() if name != JOIN}
    reached = compared[BYTES]
    verdict = f"App with bytes is at {reached:.2f} of a plain join (aim {AIM}: {'met' if reached >= AIM else 'missed'})"
    named = {f"{name} / {JOIN}": ratio for name, ratio in compared.items()}
    answer = {
        "row": "app",
        "count": count,
        "figures": {name: one.as_json() for name, one in figures.items()},
        "ratios": named,
        "met": reached >= AIM,
    }
    return answer, f"{table('one worker, 10 partitions, memory', figures, named)}\n\n{verdict}"
