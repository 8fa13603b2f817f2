"""Where a run of Marshal consumers takes place: a server, a topic under load, and a coordination log.

On JetStream a nats-server of its own. On Kafka a broker of its own, or one that is there already; topics have names of
their own, so runs do not meet.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import keylane
from chaos.load import FILTER, KEYS, Load
from chaos.load import load as stream_load
from chaos.members import RunBroken
from keylane.core.partitions import Partitioning
from keylane.jetstream import Connection
from keylane.marshal import CoordinationLog, Source, StreamSource, open_jetstream_log
from keylane.server import NatsServer

On: TypeAlias = Literal["jetstream", "kafka"]
Sent: TypeAlias = Mapping[tuple[int, int], str]
"""Partition and offset → key."""

_FLUSH_S = 60.0
_STEP_S = 0.004


class RunningLoad(Protocol):
    def check(self) -> None:
        """Raise what ended it early."""
        ...

    @property
    def sent(self) -> Sent:
        """All that is stored, once it has stopped."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    on: On
    url: str
    topic: str
    log_name: str
    log: CoordinationLog
    source: Source
    load: Callable[[float], AbstractAsyncContextManager[RunningLoad]]
    """A load of so many messages a second, for as long as the block lasts; then all of it is stored."""


@asynccontextmanager
async def open_stage(
    on: On, *, partitions: int, interval_s: float, bootstrap: str | None = None
) -> AsyncIterator[Stage]:
    """`bootstrap`: of a Kafka that is there; without it one is started."""
    make = _on_jetstream if on == "jetstream" else _on_kafka
    async with AsyncExitStack() as stack:
        yield await make(stack, partitions, interval_s, bootstrap)


# ---- JetStream --------------------------------------------------------------------------------------


async def _on_jetstream(stack: AsyncExitStack, partitions: int, interval_s: float, _: str | None) -> Stage:
    server = stack.enter_context(NatsServer.start())
    connection = await stack.enter_async_context(await keylane.connect(server.url))
    partitioning = Partitioning(FILTER, (1,), partitions)
    await connection.api.request(
        "STREAM.CREATE.ORDERS",
        {
            "name": "ORDERS",
            "subjects": [FILTER],
            "subject_transform": {"src": FILTER, "dest": partitioning.destination},
            "allow_direct": True,
        },
    )
    log = await stack.enter_async_context(open_jetstream_log(connection, "marshal", interval_s=interval_s))
    return Stage(
        on="jetstream",
        url=server.url,
        topic="ORDERS",
        log_name="marshal",
        log=log,
        source=StreamSource(connection),
        load=lambda rate: _stream_load(connection, rate, partitioning),
    )


class _StreamLoad:
    def __init__(self, running: Load, partitioning: Partitioning) -> None:
        self._running = running
        self._partitioning = partitioning

    def check(self) -> None:
        self._running.check()

    @property
    def sent(self) -> Sent:
        return {
            (self._partitioning.partition(f"orders.{key}"), offset): key for offset, key in self._running.keys.items()
        }


@asynccontextmanager
async def _stream_load(connection: Connection, rate: float, partitioning: Partitioning) -> AsyncIterator[RunningLoad]:
    async with stream_load(connection, rate) as running:
        yield _StreamLoad(running, partitioning)


# ---- Kafka ------------------------------------------------------------------------------------------


async def _on_kafka(stack: AsyncExitStack, partitions: int, interval_s: float, bootstrap: str | None) -> Stage:
    from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # noqa: PLC0415 - documented there

    from keylane.kafka import open_kafka, open_kafka_log, open_kafka_source  # noqa: PLC0415 - only here
    from tests.peers.kafka import Kafka  # noqa: PLC0415 - only here

    if bootstrap is None:
        bootstrap = stack.enter_context(await asyncio.to_thread(Kafka.start)).bootstrap
    name = secrets.token_hex(4)
    topic, log_name = f"orders-{name}", f"__marshal-{name}"
    link = await stack.enter_async_context(open_kafka(bootstrap))
    making = link.admin.create_topics([NewTopic(topic, partitions, 1)], request_timeout=link.timeout_s)
    await link.answer(making[topic], doing=f"making topic {topic!r}")
    log = await stack.enter_async_context(open_kafka_log(link, log_name, interval_s=interval_s))
    return Stage(
        on="kafka",
        url=bootstrap,
        topic=topic,
        log_name=log_name,
        log=log,
        source=await stack.enter_async_context(open_kafka_source(link)),
        load=lambda rate: _kafka_load(bootstrap, topic, partitions, rate),
    )


class KafkaLoad:
    """Produces in a thread of its own. A key is always in the same partition, and every partition has keys."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, rate: float) -> None:
        self._topic = topic
        self._partitions = partitions
        self._rate = rate
        self._bootstrap = bootstrap
        self._sent: dict[tuple[int, int], str] = {}
        self._failures: list[str] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafka-load", daemon=True)
        self._thread.start()

    @property
    def sent(self) -> Sent:
        return self._sent

    def check(self) -> None:
        if self._failures:
            raise RunBroken(f"messages were not stored: {self._failures[:3]}")

    def stop(self) -> None:
        """Blocks until all is stored."""
        self._stopped.set()
        self._thread.join(_FLUSH_S + 10)
        self.check()

    def _run(self) -> None:
        from confluent_kafka import KafkaError, Message, Producer  # noqa: PLC0415 - only on Kafka

        def stored(error: KafkaError | None, message: Message) -> None:
            partition, offset, key = message.partition(), message.offset(), message.key()
            if error is not None or partition is None or offset is None or key is None:
                self._failures.append(str(error))
            else:
                self._sent[partition, offset] = key.decode()

        producer = Producer({"bootstrap.servers": self._bootstrap, "enable.idempotence": True, "linger.ms": 2})
        began_s, count, keys = time.monotonic(), 0, max(KEYS, self._partitions)
        while not self._stopped.wait(_STEP_S):
            while count < (time.monotonic() - began_s) * self._rate:
                number = count % keys
                producer.produce(
                    self._topic, b"%d" % count, b"k%d" % number, number % self._partitions, on_delivery=stored
                )
                count += 1
            producer.poll(0)
        if left := producer.flush(_FLUSH_S):
            self._failures.append(f"{left} were not stored within {_FLUSH_S:g} s")


@asynccontextmanager
async def _kafka_load(bootstrap: str, topic: str, partitions: int, rate: float) -> AsyncIterator[RunningLoad]:
    running = KafkaLoad(bootstrap, topic, partitions, rate)
    try:
        yield running
    finally:
        await asyncio.to_thread(running.stop)
