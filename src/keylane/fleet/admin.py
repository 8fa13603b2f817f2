"""Looking at fleets: who works, who owns what, and how far behind each partition is. Changes nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from keylane.core.fleet_generations import in_words
from keylane.core.fleet_names import check_fleet_name, partition_consumer
from keylane.core.fleet_partitions import HashedPartitions, Partition, source_from_wire
from keylane.core.fleet_positions import position_of
from keylane.core.fleet_records import (
    ASSIGNMENT,
    DRAINS,
    LEADER,
    SPEC,
    TABLE,
    DrainedWorkers,
    FleetAssignment,
    FleetClaim,
    FleetRecord,
    FleetSpec,
    LeaderLease,
    PartitionTable,
    WorkerLease,
    WorkerPositions,
    from_json,
    read_spec,
)
from keylane.core.name_suggestions import name_missing
from keylane.core.names import check_stream_name
from keylane.errors import KeylaneError, NoSuchFleet, NotFound
from keylane.fleet.lag import PartitionLag, partition_lag, unread_lag
from keylane.fleet.partition_table import FleetPartitions
from keylane.fleet.store import FLEET_BUCKET
from keylane.fleet.stream_copy import copy_name
from keylane.jetstream import Bucket, Connection, KvEntry, RetentionPolicy, consumers, existing_stream, streams

_log = logging.getLogger("keylane.fleet")

_LOOKS_AT_ONCE = 16

LagOf: TypeAlias = Callable[[Partition], Awaitable[PartitionLag | None]]
"""Asks for the lag of a partition; None: it is unknown."""
LagsOf: TypeAlias = Callable[[Sequence[Partition]], Awaitable[Mapping[str, PartitionLag | None]]]
"""Asks for the lags of partitions, by their ids. What is missing is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker id and who holds it, or held it last."""

    id: str
    state: str
    name: str
    host: str
    labels: tuple[str, ...]
    is_leader: bool
    is_drained: bool
    """An operator has drained it: it is to own nothing."""
    partitions: tuple[str, ...]
    """What it owns now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """A partition: who is to own it, who does, and what is not handled yet."""

    id: str
    assigned: str | None
    owner: str | None
    token: int
    lag: int | None
    """Messages that are not acked; None: unknown, as the partition has no consumer yet. In layout `worker` those above
    the recorded position."""
    in_flight: int | None
    """Delivered and not acked; None: unknown, also in layout `worker`."""
    oldest_s: float | None
    """The age of the oldest message that is not acked; None: there is none, or it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """A fleet as its records and consumers show it now."""

    stream: str
    fleet: str
    epoch: int
    version: int
    reason: str
    """Why the newest assignment was made."""
    workers: tuple[WorkerStatus, ...]
    partitions: tuple[PartitionStatus, ...]
    change: str | None = None
    """Where a change of the number of partitions stands; None: there is none."""

    @property
    def lag(self) -> int | None:
        """Of all partitions; None if that of one is unknown."""
        lags = [one.lag for one in self.partitions]
        return None if None in lags else sum(lag for lag in lags if lag is not None)


async def list_fleets(connection: Connection, stream: str | None = None) -> list[tuple[str, str]]:
    """Every fleet of the account, or of a stream, as pairs of stream and name."""
    found = await Bucket(connection, FLEET_BUCKET).get_matching(f"{stream or '*'}.*.{SPEC}")
    names = (one.key.split(".") for one in found if one.value is not None)
    return sorted((key[0], key[1]) for key in names)


async def stored_spec(connection: Connection, stream: str, fleet: str) -> FleetSpec | None:
    """What a fleet is, as its record says; None: it does not exist."""
    entry = await Bucket(connection, FLEET_BUCKET).get(f"{stream}.{fleet}.{SPEC}")
    return read_spec(entry.value) if entry is not None and entry.value is not None else None


async def required_spec(connection: Connection, stream: str, fleet: str) -> FleetSpec:
    """As `stored_spec`; a fleet that does not exist raises `NoSuchFleet`, which names those that do."""
    check_stream_name(stream)
    check_fleet_name(fleet)
    spec = await stored_spec(connection, stream, fleet)
    if spec is None:
        raise await _no_such_fleet(connection, stream, fleet)
    return spec


async def _no_such_fleet(connection: Connection, stream: str, fleet: str) -> KeylaneError:
    problem = f"stream {stream!r} has no fleet {fleet!r}"
    try:
        there = [name for _, name in await list_fleets(connection, stream)]
        if not there:
            await existing_stream(connection, stream)
    except NotFound as missing:
        return missing
    except KeylaneError as failure:
        return NoSuchFleet(f"{problem}, and the existing names cannot be listed: {failure}")
    return NoSuchFleet(name_missing(problem, fleet, there))


async def status(connection: Connection, stream: str, fleet: str) -> FleetStatus:
    """Who works, who owns what, and how far behind each partition is."""
    check_stream_name(stream)
    check_fleet_name(fleet)
    records = await _records(connection, stream, fleet)
    spec = records.get(SPEC)
    if not isinstance(spec, FleetSpec):
        raise await _no_such_fleet(connection, stream, fleet)
    if spec.layout == "worker":
        positions = [one for one in records.values() if isinstance(one, WorkerPositions)]
        lag_of = await _shared_lags(connection, stream, positions)
    else:
        lag_of = await _own_lags(connection, stream_read(spec, stream, fleet), fleet)
    limit = asyncio.Semaphore(_LOOKS_AT_ONCE)

    async def limited(partition: Partition) -> PartitionLag | None:
        async with limit:
            return await lag_of(partition)

    async def lags_of(partitions: Sequence[Partition]) -> dict[str, PartitionLag | None]:
        found = await asyncio.gather(*(limited(one) for one in partitions))
        return {one.id: lag for one, lag in zip(partitions, found, strict=True)}

    return await status_of(connection, stream, fleet, records, lags_of)


def stream_read(spec: FleetSpec, stream: str, fleet: str) -> str:
    """The stream that the workers of a fleet read: its own copy, where it has one."""
    source = source_from_wire(spec.source)
    return copy_name(stream, fleet) if isinstance(source, HashedPartitions) and source.copy is not None else stream


async def status_of(
    connection: Connection, stream: str, fleet: str, records: Mapping[str, FleetRecord], lags_of: LagsOf
) -> FleetStatus:
    """The status from the records of a fleet, which have its spec, and from the lag of each partition."""
    spec = records[SPEC]
    assert isinstance(spec, FleetSpec)
    assignment, leader, drains = records.get(ASSIGNMENT), records.get(LEADER), records.get(DRAINS)
    drained = drains.workers if isinstance(drains, DrainedWorkers) else {}
    claims = {one.partition: one for one in records.values() if isinstance(one, FleetClaim)}
    owners = assignment.owners if isinstance(assignment, FleetAssignment) else {}

    def look(partition: Partition) -> PartitionStatus:
        claim, lag = claims.get(partition.id), lags.get(partition.id)
        return PartitionStatus(
            id=partition.id,
            assigned=f"{spec.prefix}-{owners[partition.id]}" if partition.id in owners else None,
            owner=f"{spec.prefix}-{claim.worker}" if claim is not None and claim.held else None,
            token=claim.token if claim is not None else 0,
            lag=lag.messages if lag is not None else None,
            in_flight=lag.in_flight if lag is not None else None,
            oldest_s=lag.oldest_s if lag is not None else None,
        )

    known = FleetPartitions(connection, stream, fleet, source_from_wire(spec.source))
    table = records.get(TABLE)
    known.follow(table if isinstance(table, PartitionTable) else None, 0)
    lags = await lags_of(known.current)
    looked = tuple(look(one) for one in known.current)
    owned: dict[str | None, list[str]] = {}
    for one in looked:
        owned.setdefault(one.owner, []).append(one.id)
    return FleetStatus(
        stream=stream,
        fleet=fleet,
        epoch=leader.epoch if isinstance(leader, LeaderLease) else 0,
        version=assignment.version if isinstance(assignment, FleetAssignment) else 0,
        reason=assignment.reason if isinstance(assignment, FleetAssignment) else "",
        workers=tuple(
            WorkerStatus(
                id=f"{spec.prefix}-{one.worker}",
                state=one.state,
                name=one.name,
                host=one.host,
                labels=one.labels,
                is_leader=isinstance(leader, LeaderLease) and leader.state.is_held and leader.instance == one.instance,
                is_drained=drained.get(one.worker) == one.instance,
                partitions=tuple(owned.get(f"{spec.prefix}-{one.worker}", ())),
            )
            for one in sorted(
                (one for one in records.values() if isinstance(one, WorkerLease)), key=lambda one: one.worker
            )
        ),
        partitions=looked,
        change=in_words(known.table) if known.table.generations else None,
    )


async def _own_lags(connection: Connection, stream: str, fleet: str) -> LagOf:
    """Of partitions that have consumers of their own."""
    found = {info.name: info async for info in consumers.list_all(connection, stream)}

    async def lag_of(partition: Partition) -> PartitionLag | None:
        info = found.get(partition_consumer(fleet, partition.id))
        return await partition_lag(connection, partition.filter, info) if info is not None else None

    return lag_of


async def _shared_lags(connection: Connection, stream: str, positions: list[WorkerPositions]) -> LagOf:
    """Of partitions that share consumers: above what their workers have recorded within the last second or so."""
    info = await streams.info(connection, stream)
    state = await streams.state(connection, stream)
    is_queue = info.config.retention == RetentionPolicy.WORK_QUEUE

    async def lag_of(partition: Partition) -> PartitionLag | None:
        position = position_of(partition.id, positions, state.created.isoformat(), state.last_sequence)
        try:
            return await unread_lag(connection, stream, partition.filter, position, is_queue=is_queue)
        except KeylaneError as error:
            _log.warning("the lag of partition %s of stream %s is unknown: %s", partition.id, stream, error)
            return None

    return lag_of


async def _records(connection: Connection, stream: str, fleet: str) -> dict[str, FleetRecord]:
    found = await Bucket(connection, FLEET_BUCKET).get_matching(f"{stream}.{fleet}.>")
    return read_records(by_fleet(found).get((stream, fleet), {}))


def by_fleet(entries: Iterable[KvEntry]) -> dict[tuple[str, str], dict[str, bytes]]:
    """Records by stream and fleet, and then by their own names. A deleted one is left out."""
    found: dict[tuple[str, str], dict[str, bytes]] = {}
    for one in entries:
        stream, _, rest = one.key.partition(".")
        fleet, _, key = rest.partition(".")
        if one.value is not None and key:
            found.setdefault((stream, fleet), {})[key] = one.value
    return found


def read_records(stored: Mapping[str, bytes]) -> dict[str, FleetRecord]:
    """Raises `BrokenFleetRecord`."""
    return {key: from_json(key, value) for key, value in stored.items()}
