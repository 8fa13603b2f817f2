"""The copy of a stream that carries no partition numbers: a stream of the fleet's own that sources it and numbers it.

Limits retention, on file always: a copy in memory would be gone after a restart of the server and would source
everything again. Bounded where the fleet says so: a full copy refuses what is new, and the server goes on copying when
the leader has trimmed it.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NamedTuple

from keylane.core.fleet_copy import ConsumerPosition, handled_floor, trim_before
from keylane.core.fleet_names import partition_consumer
from keylane.core.fleet_partitions import HashedPartitions
from keylane.errors import FleetError, NotFound
from keylane.fleet.partition_table import FleetPartitions
from keylane.jetstream import Connection, RetentionPolicy, StreamConfig, consumers, parse_headers, streams

_log = logging.getLogger("keylane.fleet")

_TRIM_S = 1.0
_MARK = "keylane_fleet"
_GAP = 1_000_000
"""A copy that is made again counts from here on above the old one: no consumer takes new messages for old ones."""


class CopyStart(NamedTuple):
    """Where a copy that was lost begins again."""

    source: int
    """The first sequence of the source that may not be handled yet."""
    sequence: int
    """The last sequence of the copy."""


def copy_name(stream: str, fleet: str) -> str:
    return f"{stream}-{fleet}"


def copy_config(
    config: StreamConfig, fleet: str, source: HashedPartitions, start: CopyStart | None = None
) -> dict[str, Any]:
    assert source.copy is not None
    stream = config.name or ""
    origin: dict[str, Any] = {
        "name": stream,
        "subject_transforms": [{"src": source.partitioning.filter, "dest": source.partitioning.destination}],
    }
    made: dict[str, Any] = {
        "name": copy_name(stream, fleet),
        "retention": "limits",
        "discard": "new",
        "storage": "file",
        "num_replicas": config.num_replicas or 1,
        "max_msgs": source.copy.max_messages or -1,
        "max_bytes": source.copy.max_bytes or -1,
        "allow_direct": True,
        "metadata": {_MARK: f"{stream}/{fleet}"},
    }
    if start is not None:
        origin["opt_start_seq"] = start.source
        made["first_seq"] = start.sequence + _GAP
    return made | {"sources": [origin]}


async def ensure_copy(
    connection: Connection, config: StreamConfig, fleet: str, source: HashedPartitions, *, is_new: bool
) -> str:
    """Create the copy if the fleet is new; returns its name.

    Raises `FleetError` if the name is taken, or if the copy is gone.
    """
    stream = config.name or ""
    if config.retention != RetentionPolicy.LIMITS:
        raise FleetError(
            f"stream {stream!r} has {config.retention} retention, and nobody would delete what is copied from it: give "
            f"it a subject transform from {source.partitioning.filter!r} to {source.partitioning.destination!r} instead"
        )
    wanted = copy_config(config, fleet, source)
    name = wanted["name"]
    try:
        found = (await streams.info_json(connection, name))["config"]
    except NotFound:
        if not is_new:
            raise FleetError(
                f"stream {name!r}, the copy that fleet {fleet!r} reads, is gone, and with it how far it was handled. A "
                "worker that still runs makes it again; without one, join under another name, or delete the fleet's "
                "records to handle the whole stream again"
            ) from None
        await streams.create_json(connection, wanted)
        return str(name)
    if (found.get("metadata") or {}).get(_MARK) != wanted["metadata"][_MARK]:
        raise FleetError(f"fleet {fleet!r} needs the stream name {name!r}, which is taken: choose another name")
    return str(name)


class CopyKeeper:
    """Deletes from the copy what every partition has handled, and makes a copy again that was deleted."""

    def __init__(self, connection: Connection, config: StreamConfig, fleet: str, partitions: FleetPartitions) -> None:
        self._connection = connection
        self._config = config
        self._fleet = fleet
        self._partitions = partitions
        self._name = copy_name(config.name or "", fleet)
        self._start: CopyStart | None = None
        self._seen = (0, 0)

    def watch(self, changed: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def tend(self) -> float:
        try:
            await self._trim()
        except NotFound:
            await self._make_again()
        return _TRIM_S

    async def _trim(self) -> None:
        state = await streams.state(self._connection, self._name)  # before the consumers: see core/fleet_copy.py
        found = {info.name: info async for info in consumers.list_all(self._connection, self._name)}
        infos = [found.get(partition_consumer(self._fleet, one.id)) for one in self._partitions.current]
        floor = handled_floor(
            state.last_sequence,
            (
                ConsumerPosition(info.ack_floor, not info.num_pending and not info.num_ack_pending)
                if info is not None
                else None
                for info in infos
            ),
        )
        if not state.messages or self._seen == (floor, state.last_sequence):
            return
        before = trim_before(state.last_sequence, floor)
        source = await self._source_of(before)
        self._start = CopyStart(source + (floor >= before), state.last_sequence)
        if before > state.first_sequence:
            await streams.purge(self._connection, self._name, before_sequence=before)
        self._seen = (floor, state.last_sequence)

    async def _source_of(self, sequence: int) -> int:
        """The sequence of the original of a message of the copy, or of the next one."""
        found = await streams.get_message(self._connection, self._name, sequence=sequence, next_by_subject=">")
        headers = parse_headers(base64.b64decode(found.get("hdrs", "")))
        return int(headers["Nats-Stream-Source"].split(" ")[1])

    async def _make_again(self) -> None:
        """Only what may not be handled yet is copied again: it repeats what was handled since the last look."""
        source = self._partitions.source
        assert isinstance(source, HashedPartitions)
        if self._start is None:
            raise FleetError(
                f"stream {self._name!r}, the copy that fleet {self._fleet!r} reads, is gone, and this leader does not "
                "know how far it was handled: stop the workers, delete the fleet's records, and start them again to "
                "handle the whole stream"
            )
        _log.warning(
            "stream %r is gone: it is made again from sequence %d of its source", self._name, self._start.source
        )
        await streams.create_json(self._connection, copy_config(self._config, self._fleet, source, self._start))
