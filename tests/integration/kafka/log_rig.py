"""What the tests of the coordination log on Kafka share: messages, topics by hand, waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented to be imported from here
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from keylane.core.claim_records import ClaimingPartition, Heartbeat, ReleasingPartition
from keylane.kafka import KafkaLink, KafkaLog, open_kafka_log
from keylane.kafka.topic import safe_settings, settings
from keylane.marshal import World
from tests.integration.kafka.topic_rig import until_known
from tests.peers.kafka import Broker
from tests.waiter import until

INTERVAL_S = 10.0
Unique = Callable[..., str]


def claim(who: str, partition: int = 0, *, group: str = "billing") -> ClaimingPartition:
    return ClaimingPartition("i", who, group, "orders", partition, 1)


def beat(who: str, offset: int, partition: int = 0) -> Heartbeat:
    return Heartbeat("i", who, "billing", "orders", partition, offset, 1)


def release(who: str, offset: int, partition: int = 0) -> ReleasingPartition:
    return ReleasingPartition("i", who, "billing", "orders", partition, offset, 1)


def new_world(log: KafkaLog, *, history: bool = False) -> World:
    return World(INTERVAL_S, log.partitions, first_offset=log.first_offset, keep_history=history)


@asynccontextmanager
async def a_log(
    link: KafkaLink, name: str, *, interval_s: float = INTERVAL_S, partitions: int | None = 1
) -> AsyncIterator[KafkaLog]:
    async with open_kafka_log(link, name, interval_s=interval_s, partitions=partitions) as log:
        yield log


async def create(
    link: KafkaLink, name: str, changes: Mapping[str, str] | None = None, *, partitions: int = 1, copies: int = 1
) -> None:
    """A topic as keylane would make it, but for some settings."""
    config = {**safe_settings(3600, copies), **(changes or {})}
    making = link.admin.create_topics([NewTopic(name, partitions, copies, config=config)])[name]
    await link.answer(making, doing="making a topic")
    await until_known(link, name)


async def delete(link: KafkaLink, name: str) -> None:
    """Whether it is there or not."""
    with suppress(KafkaException):
        await asyncio.wrap_future(link.admin.delete_topics([name])[name])


async def alter(link: KafkaLink, name: str, **changes: str) -> None:
    """In force when this returns: the controller may answer before the broker has heard of it."""
    wanted = {key.replace("_", "."): value for key, value in changes.items()}
    entries = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in wanted.items()]
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
    await link.answer(link.admin.incremental_alter_configs([resource])[resource], doing="changing a topic")
    await until(lambda: settings(link, name), lambda now: wanted.items() <= now.items())


async def add_partitions(link: KafkaLink, name: str, total: int) -> None:
    made = link.admin.create_partitions([NewPartitions(name, total)])[name]
    await link.answer(made, doing="adding partitions")


async def delete_records(link: KafkaLink, name: str, before: int, partition: int = 0) -> None:
    place = TopicPartition(name, partition, before)
    await link.answer(link.admin.delete_records([place])[place], doing="deleting records")


async def age_all(link: KafkaLink, log: KafkaLog) -> None:
    """Let all records go by age, and put the old limit back."""
    await alter(link, log.name, retention_ms="1")
    end = (await log.bounds(0)).end
    await until(lambda: log.bounds(0), lambda seen: seen.first >= end, deadline_s=60)
    await alter(link, log.name, retention_ms="3600000")


async def start_again(broker: Broker) -> None:
    """Without a stop of the event loop; and not in a thread that ends, for the broker would end with it."""
    broker.launch()
    await asyncio.to_thread(broker.wait_started, time.monotonic() + 90)
