"""An elastic group in a cluster of three, its queue replicated: members come and go, leaders move, under load."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal, TypeVar

import pytest

from keylane import groups
from keylane.errors import KeylaneError
from keylane.groups import GroupMessage
from keylane.jetstream import ConsumerConfig, Outgoing, publish_many, streams
from keylane.testing import Verdict
from tests.integration.groups.rig import Ground, active, flawless, owned
from tests.waiter import until

T = TypeVar("T")

CALM = ConsumerConfig(ack_wait_s=4.0)
"""A pin that a pause of the machine or an election does not move."""
KEYS = 40
NAMES = ("a", "b", "c", "d")
RATE = 300
SECONDS = 8.0
CHANGE_EVERY_S = 1.0
TURN_S = 0.02


@asynccontextmanager
async def load(ground: Ground) -> AsyncIterator[None]:
    """Publishes steadily while the block runs. What the server refuses while it has no leader is left out."""
    over = asyncio.Event()

    async def publish() -> None:
        chance = random.Random(7)  # noqa: S311 - the same keys in every run
        start_s, count = time.monotonic(), 0
        while not over.is_set():
            due = int((time.monotonic() - start_s) * RATE) - count
            if due > 0:
                keys = [f"k{chance.randrange(KEYS)}" for _ in range(due)]
                await publish_many(ground.connection, [Outgoing(f"{ground.stream}.{key}", b"x") for key in keys])
                count += due
            await asyncio.sleep(TURN_S)

    publishing = asyncio.create_task(publish())
    try:
        yield
    finally:
        over.set()
        await publishing


async def changes(ground: Ground, chance: random.Random) -> None:
    """Add or drop one member, again and again; at least one stays."""
    present = list((await groups.get_config(ground.connection, ground.stream, "g")).plan.members)
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        await asyncio.sleep(CHANGE_EVERY_S)
        absent = [name for name in NAMES if name not in present]
        if absent and (len(present) == 1 or chance.random() < 0.5):
            name = chance.choice(absent)
            present.append(name)
            await groups.add_members(ground.connection, ground.stream, "g", [name])
        else:
            name = chance.choice(present)
            present.remove(name)
            await groups.drop_members(ground.connection, ground.stream, "g", [name])


def busy(ground: Ground, by: str) -> Callable[[GroupMessage], Awaitable[None]]:
    """A handler that takes up to 30 ms: whenever partitions move, something is at work."""
    chance = random.Random(by)  # noqa: S311

    async def handler(message: GroupMessage) -> None:
        await asyncio.sleep(chance.uniform(0, 0.03))
        await ground.evidence.note(by, message)

    return handler


async def quiet(question: Awaitable[T]) -> T | None:
    """None while nobody answers: a leader may be away."""
    try:
        return await question
    except KeylaneError:
        return None


async def judged(ground: Ground) -> Verdict:
    """After the load: all that the stream has was handled, nothing is left in the queue."""
    state = await until(
        lambda: quiet(streams.state(ground.connection, ground.stream)), lambda state: state is not None, deadline_s=30
    )
    assert state is not None
    sent = range(1, state.last_sequence + 1)
    assert len(sent) > RATE
    await ground.evidence.all_of(sent, deadline_s=30)
    await until(
        lambda: quiet(streams.state(ground.connection, f"{ground.stream}-g")),
        lambda state: state is not None and state.last_sequence >= len(sent) and state.messages == 0,
        deadline_s=30,
    )
    return ground.evidence.verdict(sent)


async def test_members_come_and_go_under_load(cluster_ground: Ground) -> None:
    ground = cluster_ground
    await ground.elastic(partitions=8, members=["a", "b"])
    members = [await ground.join(name, busy(ground, name), settings=CALM) for name in NAMES]
    async with load(ground):
        await until(lambda: active(members[0]) and active(members[1]))
        await changes(ground, random.Random(1))  # noqa: S311
    assert flawless(await judged(ground))


@pytest.mark.long("members come and go for eight seconds, like those without standbys")
async def test_members_with_standbys_come_and_go_under_load(cluster_ground: Ground) -> None:
    """A standby sees the same changes at the same moment, and must not take the consumer from the one at work."""
    ground = cluster_ground
    await ground.elastic(partitions=8, members=["a", "b"])
    for number in (1, 2):
        for name in NAMES:
            await ground.join(name, busy(ground, f"{name}{number}"), settings=CALM)
    async with load(ground):
        await changes(ground, random.Random(2))  # noqa: S311
    assert flawless(await judged(ground))


async def test_idle_standbys_do_not_make_way_for_each_other_for_ever(cluster_ground: Ground) -> None:
    """Without messages nobody is pinned, and each instance sees the other one wait."""
    ground = cluster_ground
    await ground.elastic(partitions=8, members=["a"])
    a, b = [[await ground.join(name) for _ in range(2)] for name in ("a", "b")]
    await until(lambda: all(len(owned(one)) == 8 for one in a))
    await groups.add_members(ground.connection, ground.stream, "g", ["b"])
    await until(lambda: all(len(owned(one)) == 4 for one in a + b))
    await groups.drop_members(ground.connection, ground.stream, "g", ["b"])
    await until(lambda: all(len(owned(one)) == 8 for one in a))


# ---- leaders move ---------------------------------------------------------------------------------------------


async def leader_moves(ground: Ground, kind: Literal["STREAM", "CONSUMER"], name: str) -> None:
    """Returns when another node leads."""

    async def leader() -> str:
        """Empty while there is none."""
        answer = await quiet(ground.connection.api.request(f"{kind}.INFO.{name}", timeout_s=1.0))
        return str(answer["cluster"].get("leader", "")) if answer is not None else ""

    async def leader_after_it_was_asked() -> str:
        now = await leader()
        if now == before:
            await quiet(ground.connection.api.request(f"{kind}.LEADER.STEPDOWN.{name}", timeout_s=1.0))
        return now

    before = await until(leader, bool, deadline_s=20)
    await until(leader_after_it_was_asked, lambda now: now not in ("", before), deadline_s=20)


async def go_on(ground: Ground, *names: str) -> None:
    """Wait until each of these members has handled a good deal more."""
    goal = {name: len(ground.evidence.by(name)) + 50 for name in names}
    await ground.evidence.until(
        lambda _: all(len(ground.evidence.by(name)) > count for name, count in goal.items()), deadline_s=30
    )


async def test_the_leaders_of_consumers_move(cluster_ground: Ground) -> None:
    ground = cluster_ground
    await ground.elastic(members=["a", "b"])
    members = [await ground.join(name, busy(ground, name), settings=CALM) for name in ("a", "b")]
    async with load(ground):
        await go_on(ground, "a", "b")
        for name in ("a", "b", "a", "b"):
            await leader_moves(ground, "CONSUMER", f"{ground.stream}-g.{name}")
            await go_on(ground, "a", "b")
    assert (await judged(ground)).clean
    assert all(map(active, members))


async def test_the_leaders_of_streams_move(cluster_ground: Ground) -> None:
    ground = cluster_ground
    await ground.elastic(members=["a", "b"])
    members = [await ground.join(name, busy(ground, name), settings=CALM) for name in ("a", "b")]
    async with load(ground):
        await go_on(ground, "a", "b")
        for stream in (f"{ground.stream}-g", ground.stream, "KV_elastic-consumer-groups", f"{ground.stream}-g"):
            await leader_moves(ground, "STREAM", stream)
            await go_on(ground, "a", "b")
    assert (await judged(ground)).clean
    assert all(map(active, members))


async def test_members_move_while_leaders_move(cluster_ground: Ground) -> None:
    ground = cluster_ground
    await ground.elastic(partitions=8, members=["a", "b"])
    members = [await ground.join(name, busy(ground, name), settings=CALM) for name in ("a", "b", "c")]
    async with load(ground):
        await go_on(ground, "a", "b")
        await groups.add_members(ground.connection, ground.stream, "g", ["c"])
        await leader_moves(ground, "STREAM", f"{ground.stream}-g")
        await go_on(ground, "a", "b", "c")
        await groups.drop_members(ground.connection, ground.stream, "g", ["b"])
        await leader_moves(ground, "CONSUMER", f"{ground.stream}-g.a")
        await go_on(ground, "a", "c")
    assert (await judged(ground)).clean
    assert [active(member) for member in members] == [True, False, True]
