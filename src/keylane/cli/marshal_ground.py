"""Opens what a `keylane marshal` command works on: a coordination log, and the source beside it.

Owns the choice between JetStream and Kafka, and that a look never makes a log that is not there. Of the two client
libraries only the one in use is loaded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane.cli.connecting import ConnectionOptions
from keylane.core.claim_records import Placing
from keylane.errors import CoordinationLogError, ExtraMissing, InvalidInput, NoSuchTopic, NotFound
from keylane.marshal.admin import Admin
from keylane.marshal.log import DEFAULT_INTERVAL_S, CoordinationLog
from keylane.marshal.source import Source

if TYPE_CHECKING:
    from keylane.kafka import KafkaAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which log, as given on the command line."""

    link: ConnectionOptions
    kafka: str | None
    kafka_config: Path | None
    log: str | None
    interval_s: float | None
    """None: what the log says, or 10 s where it says nothing."""
    placing: Placing = "topic_partition"
    may_make: bool = False


@dataclass(frozen=True, slots=True)
class Ground:
    log: CoordinationLog
    source: Source
    where: Where

    @property
    def admin(self) -> Admin:
        return Admin(self.log, placing=self.where.placing)


def open_ground(where: Where, **hooks: Any) -> AbstractAsyncContextManager[Ground]:
    """For as long as the block lasts."""
    if where.kafka is None and where.kafka_config is None:
        return _on_jetstream(where, **hooks)
    for spec in fields(ConnectionOptions):
        if spec.name != "timeout" and getattr(where.link, spec.name) is not None:
            raise InvalidInput(f"--{spec.name} is for NATS and --kafka for Kafka: give one of the two")
    return _on_kafka(where)


@asynccontextmanager
async def _on_jetstream(where: Where, **hooks: Any) -> AsyncIterator[Ground]:
    from keylane.jetstream import streams
    from keylane.marshal.jetstream_log import open_jetstream_log
    from keylane.marshal.stream_source import StreamSource

    name = where.log or "marshal"
    async with await where.link.connect(**hooks) as connection:
        if not where.may_make:
            try:
                await streams.info(connection, name)
            except NotFound as error:
                raise _no_log(name) from error
        async with open_jetstream_log(connection, name, interval_s=where.interval_s) as log:
            yield Ground(log, StreamSource(connection), where)


@asynccontextmanager
async def _on_kafka(where: Where) -> AsyncIterator[Ground]:
    import logging

    address = _address(where)

    from keylane.kafka import open_kafka, open_kafka_log, open_kafka_source
    from keylane.kafka.topic import DEFAULT_TOPIC, check_topic_name, describe

    # A command says in its own words what happens; a log line would break into its screen.
    logging.getLogger("keylane").addHandler(logging.NullHandler())
    name = check_topic_name(where.log or DEFAULT_TOPIC)
    async with open_kafka(address, timeout_s=where.link.timeout) as link:
        if not where.may_make:
            try:
                await describe(link, name)
            except NoSuchTopic as error:
                raise _no_log(name) from error
        interval_s = DEFAULT_INTERVAL_S if where.interval_s is None else where.interval_s
        async with open_kafka_log(link, name, interval_s=interval_s) as log, open_kafka_source(link) as source:
            yield Ground(log, source, where)


def _address(where: Where) -> KafkaAddress:
    try:
        from keylane.kafka.client import KafkaAddress
        from keylane.kafka.properties import read_properties
    except ModuleNotFoundError as error:
        raise ExtraMissing('--kafka needs confluent-kafka: pip install "keylane[kafka]"') from error
    if where.kafka_config is not None:
        return read_properties(where.kafka_config, where.kafka)
    return KafkaAddress(where.kafka or "")


def _no_log(name: str) -> CoordinationLogError:
    return CoordinationLogError(
        f"there is no coordination log {name!r}: name it with --log; a consumer makes it when it starts"
    )
