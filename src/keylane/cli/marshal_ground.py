"""Opens what a `keylane marshal` command works on: a coordination log, and the source beside it.

Owns the choice between JetStream and Kafka, and that a look never makes a log that is not there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from keylane.cli.connecting import ConnectionOptions
from keylane.core.claim_records import Placing
from keylane.errors import CoordinationLogError, NotFound
from keylane.jetstream import streams
from keylane.marshal.admin import Admin
from keylane.marshal.jetstream_log import open_jetstream_log
from keylane.marshal.log import CoordinationLog
from keylane.marshal.source import Source
from keylane.marshal.stream_source import StreamSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which log, as given on the command line."""

    link: ConnectionOptions
    log: str | None
    interval_s: float
    placing: Placing = "topic_partition"
    may_make: bool = False


@dataclass(frozen=True, slots=True)
class Ground:
    log: CoordinationLog
    source: Source
    where: Where

    @property
    def admin(self) -> Admin:
        return Admin(self.log, heartbeat_interval_s=self.where.interval_s, placing=self.where.placing)


@asynccontextmanager
async def open_ground(where: Where, **hooks: Any) -> AsyncIterator[Ground]:
    """For as long as the block lasts."""
    name = where.log or "marshal"
    async with await where.link.connect(**hooks) as connection:
        if not where.may_make:
            try:
                await streams.info(connection, name)
            except NotFound as error:
                raise CoordinationLogError(
                    f"there is no coordination log {name!r}: name it with --log; a consumer makes it when it starts"
                ) from error
        async with open_jetstream_log(connection, name, interval_s=where.interval_s) as log:
            yield Ground(log, StreamSource(connection), where)
