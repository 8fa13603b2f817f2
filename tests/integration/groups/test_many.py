"""A large group, 1,000 partitions and 50 members: making it, joining it, changing it and looking at it."""

from __future__ import annotations

import time

import pytest

from keylane import groups
from keylane.cli.groups.snapshot import read_snapshot
from keylane.groups import Member
from keylane.groups.config import Kind
from keylane.jetstream import ConsumerConfig
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import Ground, flawless, owned
from tests.waiter import until

PARTITIONS = 1000
MEMBERS = [f"worker-{number:02}" for number in range(50)]
KEYS = [f"k{number}" for number in range(2000)]
CALM = ConsumerConfig(ack_wait_s=20.0)
_LONGEST_S = 40.0


async def join_all(place: Ground, members: list[str]) -> dict[str, Member]:
    """All of them on one connection."""
    client = await place.client()
    return {one: await place.join(one, connection=client, settings=CALM, max_ack_pending=100) for one in members}


async def follow(joined: dict[str, Member], config: groups.ElasticConfig | groups.StaticConfig) -> None:
    """Wait until everybody has what the plan gives it."""
    plan = config.plan
    await until(
        lambda: all(owned(one) == plan.partitions_of(name) for name, one in joined.items()), deadline_s=_LONGEST_S
    )


async def seen_quickly(place: Ground, kind: Kind) -> None:
    """`info`, without the start of its process: well within a second, and everybody is in it.

    The best of several looks counts: the members are at work in this process too.
    """
    took_s = []
    for _ in range(5):
        began = time.perf_counter()
        sight = await read_snapshot(place.connection, kind, place.stream, "g")
        took_s.append(time.perf_counter() - began)
    config = await groups.get_config(place.connection, place.stream, "g")
    assert [(one.member, one.partitions) for one in sight.members] == list(config.plan.shares)
    assert {one.covered for one in sight.members} == {partitions for _, partitions in config.plan.shares}
    assert not sight.unowned
    assert min(took_s) < 1, took_s


@pytest.mark.alone("measures a request")
@pytest.mark.timeout(120)
async def test_a_large_elastic_group(ground: Ground) -> None:
    await ground.elastic(partitions=PARTITIONS, members=MEMBERS)
    newcomer = "worker-99"
    joined = await join_all(ground, [*MEMBERS, newcomer])
    await follow(joined, await groups.get_config(ground.connection, ground.stream, "g"))
    sent = await ground.publish(KEYS)
    await ground.evidence.all_of(sent, _LONGEST_S)
    await seen_quickly(ground, "elastic")

    async def active_ones() -> list[str]:
        return await groups.active_members(ground.connection, ground.stream, "g")

    assert await until(active_ones, lambda found: len(found) == len(MEMBERS)) == MEMBERS

    sent += await ground.publish(KEYS)
    wider = await groups.add_members(ground.connection, ground.stream, "g", [newcomer], plan="sticky")
    assert len(wider.plan.partitions_of(newcomer)) == PARTITIONS // (len(MEMBERS) + 1)
    await follow(joined, wider)
    sent += await ground.publish(KEYS)
    narrower = await groups.drop_members(ground.connection, ground.stream, "g", MEMBERS[:3], plan="sticky")
    await follow(joined, narrower)
    sent += await ground.publish(KEYS)
    await ground.evidence.all_of(sent, _LONGEST_S)
    await seen_quickly(ground, "elastic")
    assert flawless(ground.evidence.verdict(sent))
    assert {line.partition for line in ground.evidence.by(newcomer)} <= set(wider.plan.partitions_of(newcomer)) | set(
        narrower.plan.partitions_of(newcomer)
    )


@pytest.mark.alone("measures a request")
async def test_a_large_static_group(make: MakeGround) -> None:
    place = await make(partitions=PARTITIONS)
    config = await place.static(partitions=PARTITIONS, members=MEMBERS)
    await follow(await join_all(place, MEMBERS), config)
    sent = await place.publish(KEYS)
    await place.evidence.all_of(sent, _LONGEST_S)
    assert flawless(place.evidence.verdict(sent))
    await seen_quickly(place, "static")
    for line in place.evidence.lines:
        assert line.by == config.plan.owner_of(line.partition)
