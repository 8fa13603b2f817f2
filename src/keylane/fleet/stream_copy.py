"""The copy of a stream that carries no partition numbers: a stream of the fleet's own that sources it and numbers it.

Limits retention, on file always: a copy in memory would be gone after a restart of the server and would source
everything again. Bounded where the fleet says so: a full copy refuses what is new, and the server goes on copying when
the leader has trimmed it.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from keylane.core.fleet_copy import ConsumerPosition, handled_floor, trim_before
from keylane.core.fleet_names import partition_consumer
from keylane.core.fleet_partitions import HashedPartitions
from keylane.core.partitions import Partitioning
from keylane.errors import FleetError, NotFound
from keylane.fleet.partition_table import FleetPartitions
from keylane.jetstream import Connection, RetentionPolicy, StreamConfig, consumers, parse_headers, streams

_log = logging.getLogger("keylane.fleet")

_TRIM_S = 1.0
_MARK = "keylane_fleet"
_FROM = "keylane_copies_from"
_REST_S = 0.25
_LOOKS = 20
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
        made["first_seq"] = start.sequence + _GAP
    return made | {"sources": [_origin(stream, source.partitioning, start.source if start is not None else 0)]}


def _origin(stream: str, numbering: Partitioning, first: int) -> dict[str, Any]:
    """The source of a copy. `first`: its first sequence to copy; 0: all."""
    transforms = [{"src": numbering.filter, "dest": numbering.destination}]
    return {"name": stream, "subject_transforms": transforms, **({"opt_start_seq": first} if first else {})}


class CopyOrigin:
    """How a copy numbers what it copies, and how that is changed while it is read.

    The server takes a source with another transform for a new one, and would copy everything again. So the copy is
    without a source for a moment: then its newest message says where it stopped, and it goes on from there.
    """

    def __init__(self, connection: Connection, stream: str, fleet: str, source: HashedPartitions) -> None:
        self._connection = connection
        self._stream = stream
        self._partitioning = source.partitioning
        self.name = copy_name(stream, fleet)

    async def renumber(self, partitions: int, may_change: Callable[[], bool]) -> None:
        """Number what is copied from now on for so many partitions. What was cut off is taken up again."""
        config = (await streams.info_json(self._connection, self.name))["config"]
        if config.get("sources"):
            begun = str(config["sources"][0].get("opt_start_seq", 0))
            stopped = {**config, "sources": None, "metadata": {**(config.get("metadata") or {}), _FROM: begun}}
            if not may_change():
                return
            await streams.update_json(self._connection, stopped)
        wire = await self._at_rest()
        first = int((wire["config"].get("metadata") or {}).get(_FROM, 0))
        if wire["state"]["messages"]:
            first = await source_of(self._connection, self.name, wire["state"]["last_seq"]) + 1
        numbering = replace(self._partitioning, partitions=partitions)
        changed = {**wire["config"], "subjects": [], "sources": [_origin(self._stream, numbering, first)]}
        if may_change():
            await streams.update_json(self._connection, changed)

    async def _at_rest(self) -> dict[str, Any]:
        """The copy, once nothing is on its way into it any more: a cluster may store what it had begun to."""
        wire: dict[str, Any] = await streams.info_json(self._connection, self.name)
        for _ in range(_LOOKS):
            before = wire["state"]["last_seq"]
            await asyncio.sleep(_REST_S)
            wire = await streams.info_json(self._connection, self.name)
            is_copying = wire.get("sources") or wire["config"].get("sources")
            if not is_copying and wire["state"]["last_seq"] == before:
                return wire
        raise FleetError(f"stream {self.name!r} still copies: its partitions are not numbered anew yet")


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


async def source_of(connection: Connection, name: str, sequence: int) -> int:
    """The sequence of the original of a message of the copy, or of the next one."""
    found = await streams.get_message(connection, name, sequence=sequence, next_by_subject=">")
    headers = parse_headers(base64.b64decode(found.get("hdrs", "")))
    return int(headers["Nats-Stream-Source"].split(" ")[1])


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
            await self._go_on_copying()
        except NotFound:
            await self._make_again()
        return _TRIM_S

    async def _go_on_copying(self) -> None:
        """A leader that was replaced while it changed the numbers may have left the copy without a source."""
        table, source = self._partitions.table, self._partitions.source
        assert isinstance(source, HashedPartitions)
        if not table.target and not (await streams.info_json(self._connection, self._name))["config"].get("sources"):
            origin = CopyOrigin(self._connection, self._config.name or "", self._fleet, source)
            await origin.renumber(table.generations[-1].partitions, lambda: not self._partitions.table.target)

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
        source = await source_of(self._connection, self._name, before)
        self._start = CopyStart(source + (floor >= before), state.last_sequence)
        if before > state.first_sequence:
            await streams.purge(self._connection, self._name, before_sequence=before)
        self._seen = (floor, state.last_sequence)

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
        numbering = replace(source.partitioning, partitions=self._partitions.table.generations[-1].partitions)
        present = replace(source, partitioning=numbering)
        await streams.create_json(self._connection, copy_config(self._config, self._fleet, present, self._start))
