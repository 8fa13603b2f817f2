"""Opens the coordination log and the message source of a `keylane marshal` command, on JetStream or Kafka.

A command that only reads never creates a log. Only the client library in use is loaded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from keylane.cli.command import ConnectionOptions
from keylane.cli.marshal.commands import LogOptions, PlacedLogOptions
from keylane.core.claim_records import Placing
from keylane.errors import CoordinationLogError, InvalidInput, NoSuchTopic, NotFound
from keylane.extras import extra_missing
from keylane.marshal.admin import Admin
from keylane.marshal.log import DEFAULT_INTERVAL_S, CoordinationLog
from keylane.marshal.source import Source

if TYPE_CHECKING:
    from keylane.kafka import KafkaAddress


@dataclass(frozen=True, slots=True)
class OpenLog:
    log: CoordinationLog
    source: Source
    admin: Admin


def open_log(
    options: LogOptions, link: ConnectionOptions, *, may_create: bool = False
) -> AbstractAsyncContextManager[OpenLog]:
    """The log, open for as long as the block lasts."""
    if options.kafka is None and options.kafka_config is None:
        return _on_jetstream(options, link, may_create=may_create)
    for spec in fields(ConnectionOptions):
        if spec.name != "timeout" and getattr(link, spec.name) is not None:
            raise InvalidInput(f"--{spec.name} is for NATS and --kafka for Kafka: give one of the two")
    return _on_kafka(options, link.timeout, may_create=may_create)


def placing_of(options: LogOptions) -> Placing:
    return options.placing if isinstance(options, PlacedLogOptions) else "topic_partition"


@asynccontextmanager
async def _on_jetstream(options: LogOptions, link: ConnectionOptions, *, may_create: bool) -> AsyncIterator[OpenLog]:
    from keylane.jetstream import streams
    from keylane.marshal.jetstream_log import open_jetstream_log
    from keylane.marshal.stream_source import StreamSource

    name = options.log or "marshal"
    async with link.open() as connection:
        if not may_create:
            try:
                await streams.info(connection, name)
            except NotFound as error:
                raise _no_log(name) from error
        async with open_jetstream_log(connection, name, interval_s=options.interval) as log:
            yield OpenLog(log, StreamSource(connection), Admin(log, placing=placing_of(options)))


@asynccontextmanager
async def _on_kafka(options: LogOptions, timeout_s: float, *, may_create: bool) -> AsyncIterator[OpenLog]:
    import logging

    address = _address(options)

    from keylane.kafka import open_kafka, open_kafka_log, open_kafka_source
    from keylane.kafka.topic import DEFAULT_TOPIC, check_topic_name, describe

    # A command prints what happens itself; log lines would break its screen.
    logging.getLogger("keylane").addHandler(logging.NullHandler())
    name = check_topic_name(options.log or DEFAULT_TOPIC)
    async with open_kafka(address, timeout_s=timeout_s) as link:
        if not may_create:
            try:
                await describe(link, name)
            except NoSuchTopic as error:
                raise _no_log(name) from error
        interval_s = DEFAULT_INTERVAL_S if options.interval is None else options.interval
        async with open_kafka_log(link, name, interval_s=interval_s) as log, open_kafka_source(link) as source:
            yield OpenLog(log, source, Admin(log, placing=placing_of(options)))


def _address(options: LogOptions) -> KafkaAddress:
    try:
        from keylane.kafka.client import KafkaAddress, read_properties
    except ModuleNotFoundError as error:
        raise extra_missing("--kafka needs confluent-kafka", "kafka") from error
    if options.kafka_config is not None:
        return read_properties(options.kafka_config, options.kafka)
    return KafkaAddress(options.kafka or "")


def _no_log(name: str) -> CoordinationLogError:
    return CoordinationLogError(
        f"there is no coordination log {name!r}: name it with --log; a consumer creates it when it starts"
    )
