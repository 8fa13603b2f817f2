"""The coordination log while brokers come and go: a cluster of three, one after the other killed or frozen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from confluent_kafka import TopicCollection

from keylane.core.claim_facts import overlaps
from keylane.core.world import World
from keylane.errors import KeylaneError, OutcomeUnknown, UnsafeLog
from keylane.kafka import KafkaLink, KafkaLog, open_kafka, open_kafka_log
from keylane.kafka.topic import describe, settings
from keylane.marshal import Appetite, Consumer, MemorySource, catch_up
from keylane.retrying import Backoff
from tests.integration.kafka.log_rig import Unique, beat, claim, create, delete, start_again
from tests.integration.marshal.rig import GROUP, TOPIC, Seen, fill
from tests.peers.kafka import Broker, Kafka
from tests.waiter import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]

INTERVAL_S = 2.0
WITHIN_S = 60.0
"""How long a leader may be away before a test fails."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Kafka]:
    with Kafka.start(brokers=3) as running:
        yield running


@pytest.fixture
async def link(cluster: Kafka) -> AsyncIterator[KafkaLink]:
    async with open_kafka(cluster.bootstrap, timeout_s=5) as opened:
        yield opened


@pytest.fixture
async def log(link: KafkaLink, unique: Unique) -> AsyncIterator[KafkaLog]:
    name = unique("claims")
    try:
        async with open_kafka_log(link, name, interval_s=INTERVAL_S, partitions=1) as opened:
            yield opened
    finally:
        await delete(link, name)


async def leader_of(cluster: Kafka, link: KafkaLink, topic: str) -> Broker:
    asked = link.admin.describe_topics(TopicCollection([topic]))[topic]
    node = (await link.answer(asked, doing="looking for the leader")).partitions[0].leader.id
    [leader] = [broker for broker in cluster.brokers if broker.node == node]
    return leader


async def in_sync(link: KafkaLink, topic: str, count: int) -> None:
    """Wait until so many copies are in sync."""
    patience = Backoff("the cluster", WITHIN_S)
    async with asyncio.timeout(WITHIN_S):
        while True:
            asked = link.admin.describe_topics(TopicCollection([topic]))[topic]
            try:
                found = await link.answer(asked, doing="counting copies")
            except KeylaneError as error:
                await patience.after(error)
                continue
            if all(len(one.isr) == count for one in found.partitions):
                return
            await asyncio.sleep(0.2)


async def test_three_copies_of_which_two_confirm(link: KafkaLink, log: KafkaLog, unique: Unique) -> None:
    assert (await describe(link, log.name)).copies == 3
    assert (await settings(link, log.name))["min.insync.replicas"] == "2"
    name = unique("claims")
    await create(link, name, {"min.insync.replicas": "1"}, copies=3)
    try:
        with pytest.raises(UnsafeLog, match=r"min.insync.replicas is 1 of 3 copies: .* set it to 2"):
            async with open_kafka_log(link, name, interval_s=INTERVAL_S):
                pass
    finally:
        await delete(link, name)


async def test_the_leader_is_killed(cluster: Kafka, link: KafkaLink, log: KafkaLog) -> None:
    """Consumers wait it out: every claim holds or is taken over, nothing is lost, at no place two owners."""
    source, seen = MemorySource({TOPIC: 4}), [Seen(), Seen()]
    fill(source, 4, 20)
    troubles: list[KeylaneError] = []
    async with AsyncExitStack() as stack:
        members = []
        for number, one in enumerate(seen):
            own = await stack.enter_async_context(open_kafka(cluster.bootstrap, timeout_s=5))
            opened = await stack.enter_async_context(open_kafka_log(own, log.name, interval_s=INTERVAL_S))
            consumer = Consumer(
                opened,
                source,
                GROUP,
                f"c{number}",
                [TOPIC],
                one,
                heartbeat_interval_s=INTERVAL_S,
                pick=Appetite(greedy=True, max_claims=2),
            )
            members.append(await stack.enter_async_context(consumer))
        await until(lambda: _handled(seen) == 80 and all(len(m.partitions) == 2 for m in members))
        before = (await log.bounds(0)).end
        killed = await leader_of(cluster, link, log.name)
        await asyncio.to_thread(killed.kill)
        try:
            fill(source, 4, 20, first=20)
            await until(lambda: _handled(seen) == 160, deadline_s=WITHIN_S)
            patience = Backoff("the log", WITHIN_S, troubles.append)
            while True:  # written after the kill, by the new leader
                try:
                    end = (await log.bounds(0)).end
                except KeylaneError as error:
                    await patience.after(error)
                    continue
                if end >= before + 4:
                    break
                await asyncio.sleep(0.1)
            await until(lambda: sum(len(one.partitions) for one in members) == 4, deadline_s=WITHIN_S)
            assert (await leader_of(cluster, link, log.name)).node != killed.node
        finally:
            await start_again(killed)
    assert all(error.is_transient for error in troubles)
    world = World(INTERVAL_S, keep_history=True)
    await catch_up(log, world)
    assert list(overlaps(world.tenures())) == []
    claims = [world.claim_of(GROUP, TOPIC, number) for number in range(4)]
    assert [(one.owner, one.offset) for one in claims if one] == [(None, 40)] * 4
    await in_sync(link, log.name, 3)


def _handled(seen: list[Seen]) -> int:
    """How many messages; a takeover may repeat some."""
    return len({place for one in seen for place in one.times})


async def test_too_few_copies_are_waited_for(cluster: Kafka, link: KafkaLink, log: KafkaLog) -> None:
    """With one broker of three nothing is confirmed, and nothing that was is lost."""
    await log.append(claim("anna"), 0)
    leader = await leader_of(cluster, link, log.name)
    frozen = [broker for broker in cluster.brokers if broker is not leader][:1]
    frozen.append(next(broker for broker in cluster.brokers if broker is not leader and broker not in frozen))
    for broker in frozen:
        os.kill(broker.pid, signal.SIGSTOP)
    try:
        with pytest.raises(OutcomeUnknown) as unknown:
            await log.append(beat("anna", 1), 0)
        assert unknown.value.is_transient
    finally:
        for broker in frozen:
            os.kill(broker.pid, signal.SIGCONT)
    await in_sync(link, log.name, 3)
    patience = Backoff("the log", WITHIN_S)
    while True:
        try:
            position = await log.append(beat("anna", 2), 0)
            world = World(INTERVAL_S)
            await catch_up(log, world)
        except KeylaneError as error:
            await patience.after(error)
        else:
            break
    records = [record async for record in log.read(0, 0)]
    assert records[0].offset == 0
    assert records[-1].offset == position.offset
    beats = [record.value.rsplit(b"/", 1)[1] for record in records[1:]]
    assert beats == sorted(beats), "what was in doubt came before what was written later, or not at all"
    owned = world.claim_of("billing", "orders", 0)
    assert owned is not None
    assert owned.offset == 2
