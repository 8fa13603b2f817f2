"""Row `feed`: reading one consumer with explicit acks, against the Go client and nats-py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import keylane
from bench.contest import Contestant, Figures, Say, python_contestant, ratios, run_contest, table
from keylane.jetstream import Outgoing, consumers, publish_many, streams
from keylane.server import NatsServer
from tests.peers.go import program
from tests.peers.presence import PeerMissing

OURS = "keylane feed"
GO = "Go Consume"
ITERATE = "keylane feed, async for"
PLAIN = "keylane feed, plain asyncio"
NATS_PY = "nats-py fetch"
NATS_PY_UVLOOP = "nats-py fetch, uvloop"
PAYLOAD = bytes(128)
KEYS = 640


@dataclass(frozen=True, slots=True)
class Setting:
    """One table: storage, how much may be unacknowledged, how many messages."""

    storage: str
    max_ack_pending: int
    count: int

    @property
    def title(self) -> str:
        return (
            f"{self.count:,} messages of {len(PAYLOAD)} B, {self.storage} storage, "
            f"max_ack_pending {self.max_ack_pending}"
        )


def settings(scale: float) -> list[Setting]:
    return [
        Setting("memory", 1000, max(1000, int(200_000 * scale))),
        Setting("file", 1000, max(1000, int(200_000 * scale))),
        Setting("memory", 1, max(1000, int(20_000 * scale))),
    ]


def run(rounds: int, scale: float, say: Say) -> tuple[dict[str, object], str]:
    """The figures as JSON and as Markdown."""
    rows: list[dict[str, object]] = []
    text: list[str] = []
    for setting in settings(scale):
        say(setting.title)
        figures = _contest(setting, rounds, say)
        compared = ratios(figures, OURS)
        rows.append(
            {
                "storage": setting.storage,
                "max_ack_pending": setting.max_ack_pending,
                "count": setting.count,
                "payload_bytes": len(PAYLOAD),
                "contestants": {name: one.as_json() for name, one in figures.items()},
                "ratios": compared,
            }
        )
        text.append(table(setting.title, figures, compared))
    return {"row": "feed", "rounds": rounds, "settings": rows}, "\n\n".join(text)


def _contest(setting: Setting, rounds: int, say: Say) -> dict[str, Figures]:
    with NatsServer.start() as server:
        contestants = _contestants(server.url, setting, say)
        asyncio.run(_prepare(server.url, setting, [one.name for one in contestants], rounds))
        return run_contest(contestants, server.pid, rounds, say)


def _contestants(url: str, setting: Setting, say: Say) -> list[Contestant]:
    def arguments(name: str, number: int) -> list[str]:
        return [
            "--url", url, "--stream", "BENCH", "--consumer", _consumer(name, number), "--count", str(setting.count)
        ]  # fmt: skip

    contestants = [
        python_contestant(OURS, "keylane_feed", lambda number: arguments(OURS, number)),
        python_contestant(ITERATE, "keylane_iterate", lambda number: arguments(ITERATE, number)),
        python_contestant(PLAIN, "keylane_feed", lambda number: [*arguments(PLAIN, number), "--plain-asyncio"]),
        python_contestant(NATS_PY, "natspy_fetch", lambda number: [*arguments(NATS_PY, number), "--plain-asyncio"]),
        python_contestant(NATS_PY_UVLOOP, "natspy_fetch", lambda number: arguments(NATS_PY_UVLOOP, number)),
    ]
    try:
        peer = program("bench-peer", say)
    except PeerMissing as missing:
        say(f"left out: {GO} ({missing})")
    else:
        contestants.append(
            Contestant(GO, lambda number: [str(peer), "consume", *arguments(GO, number), "--pull-max", "1000"])
        )
    return contestants


async def _prepare(url: str, setting: Setting, names: list[str], rounds: int) -> None:
    """The stream, filled, and a consumer for every run."""
    async with await keylane.connect(url) as connection:
        await streams.create(
            connection,
            streams.StreamConfig(name="BENCH", subjects=["bench.>"], storage=streams.StorageType(setting.storage)),
        )
        messages = (Outgoing(f"bench.{number % KEYS}", PAYLOAD) for number in range(setting.count))
        results = await publish_many(connection, messages)
        failed = [one for one in results if isinstance(one, Exception)]
        if failed:
            raise SystemExit(f"filling the stream failed {len(failed)} times, first: {failed[0]}")
        for name in names:
            for number in range(rounds):
                config = consumers.ConsumerConfig(
                    durable_name=_consumer(name, number),
                    max_ack_pending=setting.max_ack_pending,
                    ack_wait_s=30,
                )
                await consumers.create(connection, "BENCH", config)


def _consumer(name: str, number: int) -> str:
    return f"{name.replace(' ', '-').replace(',', '')}-{number}"
