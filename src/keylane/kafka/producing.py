"""Writes to Kafka so that an answer means that it is stored, once, and where.

Owns: an idempotent producer with acks of all in-sync copies, and the thread that hears its answers. Order holds for
what one writer sends to one partition: a record whose outcome was unknown cannot come in behind a later one, for the
producer's epoch grows with every such loss, and a broker that has seen the new epoch refuses the old.
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


class Stored(NamedTuple):
    """Where a record is."""

    partition: int
    offset: int


class _Line:
    """One producer and the thread that hears its answers."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keylane-kafka-writer", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Blocks: what is on its way gets a moment; then nothing of it is sent any more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.producer.poll(_TICK_S)
        if self.producer.flush(_FLUSH_S):
            self.producer.purge()
            self.producer.flush(_FLUSH_S)


class Writer:
    """Appends records. Made by `open_writer`."""

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
        self._line = _Line(link.new_producer(self._settings))
        self._ending: set[asyncio.Future[None]] = set()

    async def append(self, topic: str, partition: int, value: bytes, key: bytes | None = None) -> Stored:
        """Write a record; when this returns it is stored. `OutcomeUnknown`: it may be, or may still come to be."""
        doing, line = f"writing to {topic}/{partition}", self._line
        answer: asyncio.Future[Stored] = self._loop.create_future()

        def heard(error: KafkaError | None, message: Message) -> None:
            where = Stored(message.partition() or 0, -1 if (at := message.offset()) is None else at)
            self._loop.call_soon_threadsafe(self._settle, answer, error, where, doing)

        try:
            line.producer.produce(topic, value, key, partition, on_delivery=heard)
        except BufferError as full:
            raise BrokerUnavailable(f"{doing}: too much waits to be written; it was not") from full
        except KafkaException as error:
            self._renew(line, error.args[0])
            raise self._problem(error.args[0], doing) from error
        try:
            return await answer
        except KafkaException as error:
            self._renew(line, error.args[0])
            raise self._problem(error.args[0], doing) from error

    async def close(self) -> None:
        self._end(self._line)
        await asyncio.gather(*self._ending)

    def _settle(self, answer: asyncio.Future[Stored], error: KafkaError | None, where: Stored, doing: str) -> None:
        if answer.done():  # whoever asked has gone
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

    def _renew(self, line: _Line, error: KafkaError) -> None:
        """A producer that met a fatal error never writes again."""
        if error.fatal() and line is self._line:
            _log.warning("the producer met a fatal error and is replaced: %s", error)
            self._line = _Line(self._link.new_producer(self._settings))
            self._end(line)

    def _end(self, line: _Line) -> None:
        ending = asyncio.ensure_future(asyncio.to_thread(line.end))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


@asynccontextmanager
async def open_writer(link: KafkaLink, *, timeout_s: float | None = None) -> AsyncIterator[Writer]:
    """A writer for as long as the block lasts. `timeout_s`: for each record; the link's if not given.

    >>> async with open_kafka("127.0.0.1:9092") as link, open_writer(link) as writer:
    ...     partition, offset = await writer.append("orders", 0, b"hello")
    """
    writer = Writer(link, link.timeout_s if timeout_s is None else timeout_s)
    try:
        yield writer
    finally:
        await writer.close()
