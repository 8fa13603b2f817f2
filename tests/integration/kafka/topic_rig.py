"""What the tests of topics as sources share: topics, messages in them, what this user may not do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from confluent_kafka import KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented to be imported from here
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from keylane.errors import NoSuchTopic
from keylane.kafka import KafkaLink
from keylane.kafka.topic import describe
from keylane.marshal import Reader, SourceRecord
from tests.waiter import until

Unique = Callable[..., str]
WITHIN_S = 30.0


async def make_topic(link: KafkaLink, topic: str, partitions: int, *, copies: int = 1, **config: str) -> None:
    settings = {name.replace("_", "."): value for name, value in config.items()}
    made = link.admin.create_topics([NewTopic(topic, partitions, copies, config=settings)])[topic]
    await link.answer(made, doing=f"making {topic}")
    await until_known(link, topic)


async def until_known(link: KafkaLink, topic: str) -> None:
    """A topic is made when the controller has it; brokers hear of it one after the other."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            with suppress(NoSuchTopic):
                await describe(link, topic)
                return
            await asyncio.sleep(0.05)


def fill(
    bootstrap: str, topic: str, partitions: int, count: int, *, first: int = 0, keys: int = 20, timeout_s: float = 60.0
) -> None:
    """Numbers as messages, by turns into all partitions. All are stored when this returns."""
    failures: list[KafkaError] = []

    def stored(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failures.append(error)

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5})
    for number in range(first, first + count):
        producer.produce(topic, b"%d" % number, b"k%d" % (number % keys), number % partitions, on_delivery=stored)
    assert producer.flush(timeout_s) == 0
    assert failures == []


async def delete_before(link: KafkaLink, topic: str, partition: int, offset: int) -> None:
    """As if what is before had gone by age."""
    place = TopicPartition(topic, partition, offset)
    await link.answer(link.admin.delete_records([place])[place], doing="deleting records")


async def deny(link: KafkaLink, kind: ResourceType, name: str, operation: AclOperation = AclOperation.ALL) -> None:
    """Forbid something to everybody, which is ourselves."""
    rule = AclBinding(kind, name, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*", operation, AclPermissionType.DENY)
    await make_rule(link, rule)


async def make_rule(link: KafkaLink, rule: AclBinding) -> None:
    """It is in force when this returns: the controller may answer before the broker has heard of it."""
    await link.answer(link.admin.create_acls([rule])[rule], doing="making a rule")
    same = AclBindingFilter(
        rule.restype,
        rule.name,
        rule.resource_pattern_type,
        rule.principal,
        rule.host,
        rule.operation,
        rule.permission_type,
    )
    await until(lambda: link.answer(link.admin.describe_acls(same), doing="looking for a rule"), deadline_s=WITHIN_S)


async def read(reader: Reader, count: int, *, most: int = 100) -> list[SourceRecord]:
    """So many messages, or what came within the deadline."""
    found: list[SourceRecord] = []
    async with asyncio.timeout(WITHIN_S):
        while len(found) < count:
            found += await reader.next(min(most, count - len(found)), 1.0)
    return found


def numbers(records: Iterable[SourceRecord]) -> list[int]:
    return [int(record.data) for record in records]
