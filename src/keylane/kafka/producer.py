"""Produces to Kafka so that a returned offset means that the record is stored, exactly once.

Owns: an idempotent producer with acks of all in-sync replicas, and the thread that polls for delivery reports. Records
of one producer in one partition stay in order: a record with an unknown outcome cannot arrive after a later one, since
the producer's epoch grows with every such loss, and a broker that has seen the new epoch rejects the old one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from keylane.errors import BrokerUnavailable, KeylaneError, OutcomeUnknown
from keylane.kafka.client import KafkaLink, Setting, translate

_log = logging.getLogger("keylane.kafka")

_TICK_S = 0.1
_FLUSH_S = 2.0
_NOT_WRITTEN = frozenset(
    {
        KafkaError._QUEUE_FULL,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_REQUIRED_ACKS,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.POLICY_VIOLATION,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)


class RecordPosition(NamedTuple):
    """Where a record is."""

    partition: int
    offset: int


class _PolledProducer:
    """One producer and the thread that polls for its delivery reports."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keylane-kafka-writer", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Blocks: records in flight get a moment; then they are purged."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.producer.poll(_TICK_S)
        if self.producer.flush(_FLUSH_S):
            self.producer.purge()
            self.producer.flush(_FLUSH_S)


class RecordProducer:
    """Appends records. Made by `open_producer`."""

    def __init__(self, link: KafkaLink, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._settings: Mapping[str, Setting] = {
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 0,
            "message.timeout.ms": max(int(timeout_s * 1000), 1),
        }
        self._loop = asyncio.get_running_loop()
        self._current = _PolledProducer(link.new_producer(self._settings))
        self._ending: set[asyncio.Future[None]] = set()

    async def append(self, topic: str, partition: int, value: bytes, key: bytes | None = None) -> RecordPosition:
        """Write a record; it is stored when this returns. `OutcomeUnknown`: it may be stored now or later."""
        doing, polled = f"writing to {topic}/{partition}", self._current
        answer: asyncio.Future[RecordPosition] = self._loop.create_future()

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            where = RecordPosition(message.partition() or 0, -1 if (at := message.offset()) is None else at)
            self._loop.call_soon_threadsafe(self._settle, answer, error, where, doing)

        try:
            polled.producer.produce(topic, value, key, partition, on_delivery=on_delivery)
        except BufferError as full:
            raise BrokerUnavailable(f"{doing}: the producer's queue is full; the record was not written") from full
        except KafkaException as error:
            self._renew(polled, error.args[0])
            raise self._problem(error.args[0], doing) from error
        try:
            return await answer
        except KafkaException as error:
            self._renew(polled, error.args[0])
            raise self._problem(error.args[0], doing) from error

    async def close(self) -> None:
        self._end(self._current)
        await asyncio.gather(*self._ending)

    def _settle(
        self, answer: asyncio.Future[RecordPosition], error: KafkaError | None, where: RecordPosition, doing: str
    ) -> None:
        if answer.done():  # the caller was cancelled
            return
        if error is not None:
            answer.set_exception(KafkaException(error))
        elif where.offset < 0:
            answer.set_exception(OutcomeUnknown(f"{doing}: it is stored, but the broker did not say where; read"))
        else:
            answer.set_result(where)

    def _problem(self, error: KafkaError, doing: str) -> KeylaneError:
        if error.code() in _NOT_WRITTEN:
            return translate(error, doing)
        return OutcomeUnknown(f"{self._link.problem(error, doing)}; it may be stored or not")

    def _renew(self, polled: _PolledProducer, error: KafkaError) -> None:
        """Replace a producer after a fatal error: it never writes again."""
        if error.fatal() and polled is self._current:
            _log.warning("the producer had a fatal error and is replaced: %s", error)
            self._current = _PolledProducer(self._link.new_producer(self._settings))
            self._end(polled)

    def _end(self, polled: _PolledProducer) -> None:
        # Not in a task group: a replaced producer ends beside the appends; `close` waits for all of them.
        ending = asyncio.ensure_future(asyncio.to_thread(polled.end))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


@asynccontextmanager
async def open_producer(link: KafkaLink, *, timeout_s: float | None = None) -> AsyncIterator[RecordProducer]:
    """A producer for as long as the block lasts. `timeout_s`: for each record; the link's by default.

    >>> async with open_kafka("127.0.0.1:9092") as link, open_producer(link) as producer:
    ...     partition, offset = await producer.append("orders", 0, b"hello")
    """
    producer = RecordProducer(link, link.timeout_s if timeout_s is None else timeout_s)
    try:
        yield producer
    finally:
        await producer.close()
