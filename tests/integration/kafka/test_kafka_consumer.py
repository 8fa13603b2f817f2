"""Consumers on a real Kafka: the log in a topic, the messages in a topic."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, ResourceType  # type: ignore[attr-defined]  # documented there

import keylane
from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Freshness
from keylane.errors import NoSuchTopic, PermissionDenied
from keylane.jetstream import streams
from keylane.kafka import KafkaLink, open_kafka, open_kafka_log, open_kafka_source
from keylane.marshal import Admin, Appetite, Consumer, World, catch_up, open_jetstream_log
from keylane.server import NatsServer
from tests.integration.kafka.topic_rig import Unique, deny, fill, make_topic
from tests.integration.marshal.rig import Seen, in_order_per_key, kill
from tests.peers.kafka import Kafka
from tests.waiter import until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]

PARTITIONS = 6
GROUP = "billing"


@dataclass(frozen=True)
class Ground:
    """A topic and a log, for one test."""

    bootstrap: str
    topic: str
    log_name: str
    interval_s: float = 3.0

    @asynccontextmanager
    async def consumer(self, client: str, handler: Any, **options: Any) -> AsyncIterator[Consumer]:
        """With a link of its own, as another process would have."""
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(open_kafka(self.bootstrap))
            log = await stack.enter_async_context(open_kafka_log(link, self.log_name, interval_s=self.interval_s))
            source = await stack.enter_async_context(open_kafka_source(link))
            topics = options.pop("topics", [self.topic])
            options.setdefault("heartbeat_interval_s", self.interval_s)
            yield await stack.enter_async_context(Consumer(log, source, GROUP, client, topics, handler, **options))

    def fill(self, count: int, *, first: int = 0) -> None:
        fill(self.bootstrap, self.topic, PARTITIONS, count, first=first)

    async def world(self, link: KafkaLink) -> World:
        async with open_kafka_log(link, self.log_name, interval_s=self.interval_s) as log:
            world = World(self.interval_s, log.partitions, first_offset=log.first_offset)
            await catch_up(log, world)
            return world


@pytest.fixture
async def ground(kafka: Kafka, link: KafkaLink, unique: Unique) -> Ground:
    topic = unique("orders")
    await make_topic(link, topic, PARTITIONS)
    return Ground(kafka.bootstrap, topic, unique("__marshal"))


def all_of(ground: Ground) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(ground.topic, number) for number in range(PARTITIONS))


@pytest.mark.parametrize("mode", ["at_least_once", "at_most_once"])
async def test_three_consumers_share_a_topic(ground: Ground, mode: str) -> None:
    ground.fill(600)
    seen = [Seen() for _ in range(3)]
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(ground.consumer(f"c{number}", one, mode=mode, max_claims=2, batch_size=50))
            for number, one in enumerate(seen)
        ]
        await until(lambda: sum(len(one.messages) for one in seen) >= 600)
        assert [len(one.partitions) for one in members] == [2, 2, 2], "no more than max_claims"
    every = sum((one.times for one in seen), start=Counter[tuple[int, int]]())
    assert len(every) == 600
    assert set(every.values()) == {1}
    assert all(in_order_per_key(one.messages) for one in seen)


async def test_a_release_hands_over_at_once(ground: Ground, link: KafkaLink) -> None:
    """The next one goes on where the first stopped; offsets are committed under the group's name."""
    seen = Seen()
    ground.fill(120)
    slow = replace(ground, interval_s=60.0)
    async with slow.consumer("anna", seen, pick=Appetite(greedy=True)):
        await seen.until(lambda one: len(one.messages) == 120)
    world = await slow.world(link)
    assert {claim.owner for claim in world.claims()} == {None}
    assert [world.claim_of(GROUP, *where).offset for where in all_of(ground)] == [20] * PARTITIONS  # type: ignore[union-attr]
    ground.fill(60, first=120)
    began_s = time.monotonic()
    async with slow.consumer("bert", seen, pick=Appetite(greedy=True)):
        await seen.until(lambda one: len(one.messages) == 180)
    assert time.monotonic() - began_s < 60.0, "nobody waits for a claim to run out"
    assert set(seen.times.values()) == {1}


@pytest.mark.parametrize("interval_s", [1.0, 60.0])
async def test_offsets_are_committed_for_other_tools(ground: Ground, link: KafkaLink, interval_s: float) -> None:
    """After each heartbeat; with a long interval the first commit is that of the place where it began."""
    seen = Seen()
    ground.fill(60)
    of_this = replace(ground, interval_s=interval_s)
    async with of_this.consumer("anna", seen, pick=Appetite(greedy=True)), open_kafka_source(link) as source:
        await seen.until(lambda one: len(one.messages) == 60)
        wanted = 10 if interval_s == 1.0 else 0
        await until(
            lambda: asyncio.gather(*(source.committed(GROUP, *one) for one in all_of(ground))),
            lambda now: now == [wanted] * PARTITIONS,
        )


@pytest.mark.parametrize("died", [True, False])
async def test_a_restart_under_the_same_name_has_its_partitions_at_once(ground: Ground, died: bool) -> None:
    """An interval is a minute here: without its name it would wait for two."""
    slow, seen = replace(ground, interval_s=60.0), Seen()
    ground.fill(60)
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(open_kafka(ground.bootstrap))
        log = await stack.enter_async_context(open_kafka_log(link, ground.log_name, interval_s=60.0))
        source = await stack.enter_async_context(open_kafka_source(link))
        first = Consumer(
            log, source, GROUP, "anna", [ground.topic], seen, heartbeat_interval_s=60.0, pick=Appetite(greedy=True)
        )
        await first.start()
        await seen.until(lambda one: len(one.messages) == 60)
        await (kill(first) if died else first.stop(release=False))
    again = Seen()
    async with slow.consumer("anna", again) as second:
        await until(lambda: second.partitions == all_of(ground))
        ground.fill(6, first=60)
        await again.until(lambda one: {int(message.data) for message in one.messages} >= set(range(60, 66)))
        tokens = {message.token for message in again.messages}
    if not died:
        assert len(again.messages) == 6, "its last heartbeat said how far it was"
    assert tokens


async def test_lag_and_load_of_each_consumer(ground: Ground, link: KafkaLink) -> None:
    seen, held = Seen(), Seen()
    held.hold = asyncio.Event()
    async with (
        ground.consumer("anna", seen, max_claims=3) as anna,
        ground.consumer("bert", held, max_claims=2) as bert,
        open_kafka_log(link, ground.log_name, interval_s=ground.interval_s) as log,
        open_kafka_source(link) as source,
    ):
        await until(lambda: (len(anna.partitions), len(bert.partitions)) == (3, 2))
        ground.fill(60)
        await seen.until(lambda one: len(one.messages) == 30)
        admin = Admin(log, heartbeat_interval_s=ground.interval_s)
        async with asyncio.timeout(30):
            while True:
                loads = await admin.loads(source, GROUP, [ground.topic])
                lags = {one.owner.client if one.owner else None: one.lag for one in loads}
                fresh = {part.freshness for part in loads[0].partitions} <= {Freshness.FRESH, Freshness.UNKNOWN}
                if fresh and lags == {"anna": 0, "bert": 20, None: 10}:
                    break
                await asyncio.sleep(0.1)  # until a heartbeat has told how far anna is
        assert [len(one.partitions) for one in loads] == [3, 2, 1]
        held.hold.set()


async def test_the_log_in_jetstream_and_the_messages_in_kafka(
    ground: Ground, link: KafkaLink, nats_server: NatsServer
) -> None:
    ground.fill(120)
    seen = [Seen(), Seen()]
    async with AsyncExitStack() as stack:
        for client, one in zip(("anna", "bert"), seen, strict=True):
            connection = await stack.enter_async_context(await keylane.connect(nats_server.url))
            log = await stack.enter_async_context(
                open_jetstream_log(connection, ground.log_name.strip("_"), interval_s=3.0, max_age_s=3600)
            )
            source = await stack.enter_async_context(open_kafka_source(link))
            member = Consumer(log, source, GROUP, client, [ground.topic], one, heartbeat_interval_s=3.0, max_claims=3)
            await stack.enter_async_context(member)
        await until(lambda: sum(len(one.messages) for one in seen) >= 120)
    every = seen[0].times + seen[1].times
    assert len(every) == 120
    assert set(every.values()) == {1}
    assert all(one.messages for one in seen)
    async with await keylane.connect(nats_server.url) as connection:
        await streams.delete(connection, ground.log_name.strip("_"))


async def test_topics_that_cannot_be_consumed(ground: Ground, link: KafkaLink, unique: Unique) -> None:
    with pytest.raises(NoSuchTopic, match="looking for topic 'nowhere'"):
        async with ground.consumer("anna", Seen(), topics=["nowhere"]):
            pass
    hidden = unique("hidden")
    await make_topic(link, hidden, 1)
    await deny(link, ResourceType.TOPIC, hidden)
    with pytest.raises(PermissionDenied, match=f"looking for topic '{hidden}'"):
        async with ground.consumer("anna", Seen(), topics=[hidden]):
            pass


@pytest.mark.long("starts a cluster of three brokers and restarts one")
@pytest.mark.timeout(400)
async def test_leaders_change_and_a_broker_comes_back(unique: Unique) -> None:
    """Nothing is lost, the consumer keeps its partitions, and it ends with none of the trouble."""
    with Kafka.start(brokers=3) as cluster:
        async with open_kafka(cluster.bootstrap) as link:
            topic = unique("orders")
            await make_topic(link, topic, PARTITIONS, copies=3)
            # Long enough that a claim outlives the election of leaders on a slow machine.
            ground, seen = Ground(cluster.bootstrap, topic, unique("__marshal"), interval_s=8.0), Seen()
            async with ground.consumer("anna", seen, pick=Appetite(greedy=True)) as anna:
                ground.fill(300)
                await seen.until(lambda one: len(one.messages) == 300)
                assert anna.partitions == all_of(ground)
                dead = cluster.brokers[_leader_of(cluster, topic) - 1]
                await asyncio.to_thread(dead.kill)
                await asyncio.to_thread(ground.fill, 300, first=300)
                await seen.until(lambda one: {int(message.data) for message in one.messages} == set(range(600)), 90)
                await asyncio.to_thread(dead.start)
                await asyncio.to_thread(ground.fill, 300, first=600)
                await seen.until(lambda one: {int(message.data) for message in one.messages} == set(range(900)), 90)
                await until(lambda: anna.partitions == all_of(ground))
            assert in_order_per_key(seen.messages)
            assert {claim.owner for claim in (await ground.world(link)).claims()} == {None}


def _leader_of(cluster: Kafka, topic: str) -> int:
    """Of partition 0."""
    return (
        AdminClient({"bootstrap.servers": cluster.bootstrap})
        .list_topics(topic, timeout=30)
        .topics[topic]
        .partitions[0]
        .leader
    )
