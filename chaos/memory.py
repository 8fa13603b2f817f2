"""Does a member's memory stay flat? One member handles millions of messages, and its resident memory is looked at.

An elastic group of 10 partitions in memory storage, a handler that does nothing. The source keeps its newest messages
only; the publisher waits when the member falls behind, so that none of them goes before it is copied.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keylane
from chaos.load import FILTER, KEYS, PREFIX
from chaos.members import Group, MemberProcess, RunBroken, members
from keylane import groups
from keylane.jetstream import Connection, PublishAck, open_publisher, streams
from keylane.server import NatsServer

Say = Callable[[str], None]

STREAM, GROUP = "ORDERS", "billing"
QUEUE = f"{STREAM}-{GROUP}"
PARTITIONS = 10
WARM_UP = 0.25
MOST_GROWTH_BYTES = 10 * 1024 * 1024
_KEPT = 200_000
_AHEAD = 50_000
_SAMPLES = 200
_STANDSTILL_S = 60.0
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    handled: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed; sizes after the warm-up."""

    messages: int
    seconds: float
    samples: list[Sample]

    @property
    def warm(self) -> list[Sample]:
        return [one for one in self.samples if one.handled >= WARM_UP * self.messages]

    @property
    def growth_bytes(self) -> int:
        """From the end of the warm-up to the end."""
        return self.warm[-1].resident_bytes - self.warm[0].resident_bytes

    @property
    def peak_bytes(self) -> int:
        return max(one.resident_bytes for one in self.warm)

    @property
    def clean(self) -> bool:
        """Neither the end nor the peak is far above the start."""
        return self.peak_bytes - self.warm[0].resident_bytes < MOST_GROWTH_BYTES

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": "memory",
            "clean": self.clean,
            "messages": self.messages,
            "seconds": round(self.seconds, 1),
            "rate": round(self.messages / self.seconds),
            "first_bytes": self.warm[0].resident_bytes,
            "last_bytes": self.warm[-1].resident_bytes,
            "peak_bytes": self.peak_bytes,
            "growth_bytes": self.growth_bytes,
            "samples": [asdict(one) for one in self.samples],
        }


async def run(messages: int, say: Say) -> Outcome:
    """Publish, let one member handle, and look at it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory, NatsServer.start() as server:
        async with (
            await keylane.connect(server.url) as connection,
            members(Group(server.url, STREAM, GROUP), Path(directory), options=["--silent"]) as running,
        ):
            await _create(connection)
            member = await running.start("a")
            await member.ready()
            started_s = time.monotonic()
            samples = await _publish(connection, messages, member, say)
            seconds = time.monotonic() - started_s
            await running.stop()
    return Outcome(messages, seconds, samples)


async def _create(connection: Connection) -> None:
    await streams.create(
        connection,
        streams.StreamConfig(
            name=STREAM, subjects=[FILTER], storage=streams.StorageType.MEMORY, max_msgs=_KEPT, num_replicas=1
        ),
    )
    await groups.create_elastic(connection, STREAM, GROUP, partitions=PARTITIONS, partition_by=FILTER, members=["a"])


async def _publish(connection: Connection, messages: int, member: MemberProcess, say: Say) -> list[Sample]:
    samples: list[Sample] = []
    pending: deque[asyncio.Future[PublishAck]] = deque()
    step = max(1, messages // _SAMPLES)
    async with open_publisher(connection) as publisher:
        for number in range(messages):
            pending.append(await publisher.send(f"{PREFIX}k{number % KEYS}", b"%d" % number))
            while pending[0].done():
                pending.popleft().result()
                if not pending:
                    break
            if (number + 1) % step == 0:
                samples.append(await _handled_up_to(connection, number + 1 - _AHEAD, member))
                if len(samples) % (_SAMPLES // 10) == 0:
                    say(f"{samples[-1].handled:>9,} handled, {samples[-1].resident_bytes / 1e6:.1f} MB")
    for one in pending:
        one.result()
    samples.append(await _handled_up_to(connection, messages, member))
    return samples


async def _handled_up_to(connection: Connection, count: int, member: MemberProcess) -> Sample:
    """Wait until so many are handled, and look at the process."""
    moved_s, before = time.monotonic(), -1
    while True:
        member.check()
        state = await streams.state(connection, QUEUE)
        handled = state.last_sequence - state.messages
        if handled >= count:
            return Sample(handled, member.resident_bytes)
        if handled != before:
            moved_s, before = time.monotonic(), handled
        if time.monotonic() - moved_s > _STANDSTILL_S:
            raise RunBroken(f"{handled} of {count} messages are handled, and nothing moves")
        await asyncio.sleep(_PAUSE_S)


def as_text(outcome: Outcome) -> str:
    """For a terminal."""
    first, last = outcome.warm[0], outcome.warm[-1]
    rows = {
        "messages": f"{outcome.messages:,} in {outcome.seconds:.0f} s",
        f"after {first.handled:,}": f"{first.resident_bytes / 1e6:.1f} MB",
        f"after {last.handled:,}": f"{last.resident_bytes / 1e6:.1f} MB",
        "peak between": f"{outcome.peak_bytes / 1e6:.1f} MB",
        "verdict": "flat" if outcome.clean else f"NOT FLAT: more than {MOST_GROWTH_BYTES / 1e6:.0f} MB of growth",
    }
    return "\n".join(f"{name:<20} {value}" for name, value in rows.items())
