"""A limit on the queue of an elastic group: when it is full the server pauses the copying, and nothing is lost.

While nobody takes messages out, the queue fills up to its limit and stays there; once members are at work, it goes on
by itself, with a pause whenever it was full (nats-server 2.15: about 2 s).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from keylane import Connection
from keylane.groups import GroupMessage
from keylane.jetstream import StreamState, streams
from tests.integration.groups.rig import Ground, flawless
from tests.waiter import until

LIMIT = 40
SENT = 90
PAYLOAD = bytes(200)
BYTES = 12_000
"""Room for some forty such messages, with their subjects and headers."""
_GOES_ON_S = 30.0
_LOOK_EVERY_S = 0.01


class Gauge:
    """The fullest that a queue was seen."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.looks = 0


@asynccontextmanager
async def gauge(connection: Connection, queue: str) -> AsyncIterator[Gauge]:
    """Look at a queue all the time while the block lasts."""
    seen = Gauge()

    async def look() -> None:
        while True:
            state = await streams.state(connection, queue)
            seen.messages, seen.bytes = max(seen.messages, state.messages), max(seen.bytes, state.bytes)
            seen.looks += 1
            await asyncio.sleep(_LOOK_EVERY_S)

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        looking.cancel()
        await asyncio.wait({looking})
        if not looking.cancelled():
            looking.result()


async def full(ground: Ground) -> StreamState:
    """Wait until the queue takes no more, twice seen with a second between: the server tried again and had to stop."""

    async def look() -> StreamState:
        return await streams.state(ground.connection, f"{ground.stream}-g")

    async def twice() -> tuple[StreamState, StreamState]:
        before = await look()
        await asyncio.sleep(1.2)
        return before, await look()

    await until(look, lambda state: state.messages > 0)
    before, _ = await until(twice, lambda pair: pair[0].messages == pair[1].messages)
    return before


@pytest.mark.parametrize("by", ["messages", pytest.param("bytes", marks=pytest.mark.long("again, by bytes"))])
async def test_a_full_queue_pauses_the_copying_and_loses_nothing(ground: Ground, by: str) -> None:
    if by == "messages":
        await ground.elastic(members=["a"], max_buffered_messages=LIMIT)
    else:
        await ground.elastic(members=["a"], max_buffered_bytes=BYTES)
    async with gauge(ground.connection, f"{ground.stream}-g") as seen:
        sent = await ground.publish((f"k{number % 5}" for number in range(SENT)), PAYLOAD)
        held = await full(ground)
        assert held.messages == LIMIT if by == "messages" else 0 < held.messages < SENT / 2
        await ground.join("a")
        await ground.evidence.all_of(sent, _GOES_ON_S)
        sent += await ground.publish((f"k{number}" for number in range(5)), PAYLOAD)
        await ground.evidence.all_of(sent, _GOES_ON_S)
    assert flawless(ground.evidence.verdict(sent))
    assert seen.looks > 10
    if by == "messages":
        assert seen.messages == LIMIT
    else:
        assert BYTES / 2 < seen.bytes <= BYTES
    pauses = [later.at - sooner.at for sooner, later in pairwise(ground.evidence.lines[:SENT])]
    assert max(pauses) > 0.5, "the server copied without a pause"


async def test_a_full_queue_holds_up_only_its_own_group(ground: Ground) -> None:
    """The source takes every message, and another group of the stream gets it."""
    await ground.elastic("small", members=["a"], max_buffered_messages=1)
    await ground.elastic("free", members=["a"])
    others: list[int] = []
    all_there = asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        others.append(message.sequence)
        if len(others) == SENT:
            all_there.set()

    await ground.join("a", handler, group="free")
    sent = await ground.publish(f"k{number % 5}" for number in range(SENT))
    async with asyncio.timeout(_GOES_ON_S):
        await all_there.wait()
    assert sorted(others) == sent
    small = await until(
        lambda: streams.state(ground.connection, f"{ground.stream}-small"), lambda state: state.last_sequence > 0
    )
    assert (small.messages, small.last_sequence) == (1, 1)
