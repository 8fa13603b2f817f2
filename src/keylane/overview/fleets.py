"""Fleets, from their records and consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from keylane.core.fleet_names import partition_consumer, worker_in
from keylane.core.fleet_partitions import Partition
from keylane.core.fleet_positions import position_of
from keylane.core.fleet_records import SPEC, FleetRecord, FleetSpec, LeaseState, WorkerPositions
from keylane.core.group_summary import known_max, known_sum
from keylane.fleet.admin import LagsOf, PartitionStatus, WorkerStatus, read_records, status_of, stream_read
from keylane.fleet.lag import PartitionLag
from keylane.jetstream import ConsumerInfo, first_messages, parse_time
from keylane.overview.account_reader import AccountReader
from keylane.overview.model import GroupOverview, MemberOverview, PartitionOverview

HELD = (LeaseState.LIVE.value, LeaseState.LEAVING.value)


async def read_fleet(reader: AccountReader, stream: str, fleet: str, stored: Mapping[str, bytes]) -> GroupOverview:
    """A fleet as it stands now. `stored`: its records."""
    records = read_records(stored)
    spec = records[SPEC]
    assert isinstance(spec, FleetSpec)
    reads = stream_read(spec, stream, fleet)
    if reads not in reader.streams:
        return GroupOverview(kind="fleet", stream=stream, name=fleet, problem=f"there is no stream {reads!r}")
    infos = await reader.consumers(reads)
    is_shared = spec.layout == "worker"
    lags_of = _shared_lags(reader, reads, records) if is_shared else _own_lags(reader, reads, fleet, infos)
    status, given_up = await asyncio.gather(
        status_of(reader.connection, stream, fleet, records, lags_of), reader.given_up(stream, fleet)
    )
    partitions = {one.id: _partition(one) for one in status.partitions}
    # On a stream with limits a worker's own consumer acks what it reads by other means.
    tells_in_flight = not is_shared or reader.streams[reads]["config"]["retention"] == "workqueue"
    by_worker = _consumers_by_worker(status.workers, fleet, infos, is_shared=is_shared)
    members = tuple(
        _worker(one, partitions, by_worker[one.id], tells_in_flight=tells_in_flight)
        for one in status.workers
        if one.state in HELD
    )
    used = [info for found in by_worker.values() for info in found]
    return GroupOverview(
        kind="fleet",
        stream=stream,
        name=fleet,
        members=members,
        partitions=tuple(partitions.values()),
        lag=known_sum(one.lag for one in partitions.values()),
        lag_s=known_max(one.lag_s for one in partitions.values()),
        in_flight=known_sum(one.in_flight for one in members),
        redelivered=sum(info.num_redelivered for info in used),
        dead_letters=given_up.dead_letters if given_up is not None else None,
        parked_keys=given_up.parked_keys if given_up is not None else None,
        parked_messages=given_up.parked_messages if given_up is not None else None,
        is_paused=any(info.paused for info in used),
        change=status.change,
    )


def _own_lags(reader: AccountReader, stream: str, fleet: str, infos: Mapping[str, ConsumerInfo]) -> LagsOf:
    """Of partitions that have consumers of their own."""

    async def lags_of(partitions: Sequence[Partition]) -> dict[str, PartitionLag | None]:
        named = {one.id: infos.get(partition_consumer(fleet, one.id)) for one in partitions}
        own = {one: info for one, info in named.items() if info is not None}
        waiting = [(one.id, one.filter) for one in partitions if one.id in own and _not_acked(own[one.id])]
        oldest = await reader.oldest(stream, [(only, own[id_].ack_floor + 1) for id_, only in waiting])
        ages = {id_: one.age_s for (id_, _), one in zip(waiting, oldest, strict=True) if one is not None}
        return {id_: PartitionLag(_not_acked(one), one.num_ack_pending, ages.get(id_)) for id_, one in own.items()}

    return lags_of


def _shared_lags(reader: AccountReader, stream: str, records: Mapping[str, FleetRecord]) -> LagsOf:
    """Of partitions that share consumers: above what their workers have recorded within the last second or so."""
    wire = reader.streams[stream]
    positions = [one for one in records.values() if isinstance(one, WorkerPositions)]
    created, last = parse_time(wire["created"]).isoformat(), wire["state"]["last_seq"]

    async def lags_of(partitions: Sequence[Partition]) -> dict[str, PartitionLag | None]:
        if not wire["config"].get("allow_direct"):
            return {}
        asked = [(one.filter, position_of(one.id, positions, created, last) + 1) for one in partitions]
        found = await first_messages(reader.connection, stream, asked, counted=True)
        return {
            one.id: PartitionLag(1 + (first.more or 0), None, reader.age_s(first.time))
            if first is not None
            else PartitionLag(0, None, None)
            for one, first in zip(partitions, found, strict=True)
        }

    return lags_of


def _not_acked(info: ConsumerInfo) -> int:
    return info.num_pending + info.num_ack_pending


def _partition(status: PartitionStatus) -> PartitionOverview:
    return PartitionOverview(
        id=status.id,
        assigned=status.assigned,
        owner=status.owner,
        lag=status.lag,
        lag_s=0.0 if status.lag == 0 else status.oldest_s,
        in_flight=status.in_flight,
        token=status.token,
    )


def _consumers_by_worker(
    workers: tuple[WorkerStatus, ...], fleet: str, infos: Mapping[str, ConsumerInfo], *, is_shared: bool
) -> dict[str, list[ConsumerInfo]]:
    """The consumers of the partitions of each worker, or its own."""
    if not is_shared:
        names = {one.id: [partition_consumer(fleet, each) for each in one.partitions] for one in workers}
        return {id_: [infos[name] for name in found if name in infos] for id_, found in names.items()}
    found: dict[str, list[ConsumerInfo]] = {one.id: [] for one in workers}
    ids = {int(one.id.rpartition("-")[2]): one.id for one in workers}
    for name, info in infos.items():
        if (number := worker_in(name, fleet)) in ids:
            found[ids[number]].append(info)
    return found


def _worker(
    worker: WorkerStatus,
    partitions: Mapping[str, PartitionOverview],
    infos: list[ConsumerInfo],
    *,
    tells_in_flight: bool,
) -> MemberOverview:
    owned = [partitions[one] for one in worker.partitions]
    limits = [info.config.max_ack_pending for info in infos]
    return MemberOverview(
        name=worker.id,
        state=str(worker.state),
        is_active=worker.state == LeaseState.LIVE,
        partitions=worker.partitions,
        consumer=infos[0].name if len(infos) == 1 else None,
        host=worker.host or None,
        lag=known_sum(one.lag for one in owned),
        lag_s=known_max(one.lag_s for one in owned),
        in_flight=sum(info.num_ack_pending for info in infos) if tells_in_flight else None,
        max_in_flight=sum(one for one in limits if one is not None) or None,
        redelivered=sum(info.num_redelivered for info in infos),
        is_paused=any(info.paused for info in infos),
        is_leader=worker.is_leader,
        is_drained=worker.is_drained,
        labels=worker.labels,
    )
