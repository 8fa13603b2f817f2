"""A real broker takes and gives messages, and a cluster survives the loss of a broker."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.peers.kafka import Kafka

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]

MESSAGES = 100
TIMEOUT_S = 60.0


def create_topic(bootstrap: str, topic: str, *, partitions: int, copies: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    created = admin.create_topics([NewTopic(topic, num_partitions=partitions, replication_factor=copies)])
    created[topic].result(TIMEOUT_S)


def produce(bootstrap: str, topic: str, numbers: range) -> None:
    failures: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})  # else retries reorder
    for number in numbers:
        producer.produce(
            topic,
            key=f"key{number % 10}",
            value=str(number),
            on_delivery=lambda error, _message: failures.append(error) if error else None,
        )
    assert producer.flush(TIMEOUT_S) == 0
    assert failures == []


def consume(bootstrap: str, topic: str, count: int) -> list[Message]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    taken: list[Message] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while len(taken) < count and time.monotonic() < deadline:
            taken.extend(consumer.consume(count - len(taken), timeout=1.0))
    finally:
        consumer.close()
    assert [message.error() for message in taken if message.error()] == []
    return taken


def values(messages: list[Message]) -> list[int]:
    return [int(message.value() or b"") for message in messages]


def test_broker_gives_back_what_it_was_given(kafka: Kafka, unique: Callable[..., str]) -> None:
    topic = unique("topic")
    create_topic(kafka.bootstrap, topic, partitions=4)
    produce(kafka.bootstrap, topic, range(MESSAGES))
    messages = consume(kafka.bootstrap, topic, MESSAGES)

    assert sorted(values(messages)) == list(range(MESSAGES))
    for key in range(10):
        mine = [message for message in messages if message.key() == f"key{key}".encode()]
        assert values(mine) == list(range(key, MESSAGES, 10))


@pytest.mark.long("starts a cluster of three brokers")
def test_cluster_goes_on_without_one_broker(unique: Callable[..., str]) -> None:
    topic = unique("topic")
    with Kafka.start(brokers=3) as cluster:
        create_topic(cluster.bootstrap, topic, partitions=3, copies=3)
        produce(cluster.bootstrap, topic, range(50))
        cluster.brokers[0].kill()
        produce(cluster.bootstrap, topic, range(50, MESSAGES))
        assert sorted(values(consume(cluster.bootstrap, topic, MESSAGES))) == list(range(MESSAGES))
        cluster.brokers[0].start()
        admin, deadline = AdminClient({"bootstrap.servers": cluster.bootstrap}), time.monotonic() + TIMEOUT_S
        while sorted(known := admin.list_topics(timeout=TIMEOUT_S).brokers) != [1, 2, 3]:
            assert time.monotonic() < deadline, known
            time.sleep(0.1)  # brokers hear of it one after the other
