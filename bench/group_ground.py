"""Ground for benchmarks of groups: filled streams, and a group (or a consumer) for each run."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nats.js.api import SubjectTransform

import keylane
from keylane import groups
from keylane.core.partitions import Partitioning, partition_filters
from keylane.groups.config import Dialect
from keylane.jetstream import Connection, Outgoing, consumers, publish_many, streams

Kind = Literal["static", "elastic", "fleet"]
Storage = Literal["memory", "file"]

PARTITIONS = 10
PAYLOAD = bytes(128)
GROUP = "g"
_SOURCED_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.05
_fleets = itertools.count()


@dataclass(frozen=True, slots=True)
class Load:
    """What one contestant has to handle."""

    kind: Kind
    storage: Storage
    keys: int
    count: int
    members: int
    partitions: int = PARTITIONS

    @property
    def stream(self) -> str:
        """Its name, and the first token of its subjects."""
        name = f"bench-{self.keys}-{self.count}"
        return f"{name}-{self.partitions}" if self.kind == "fleet" else name

    @property
    def names(self) -> list[str]:
        return [f"member-{number}" for number in range(self.members)]

    @property
    def partitioning(self) -> Partitioning:
        return Partitioning(f"{self.stream}.*", (1,), self.partitions)

    def subjects(self) -> Iterable[str]:
        """Keys take turns."""
        return (f"{self.stream}.k{number % self.keys}" for number in range(self.count))

    def messages_of_partitions(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for key in range(min(self.keys, self.count)):
            turns = (self.count - key - 1) // self.keys + 1
            counts[self.partitioning.partition(f"{self.stream}.k{key}")] += turns
        return counts


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run takes place, and how many messages belong to each member."""

    url: str
    stream: str
    group: str
    """Of a run without a group: the consumer."""
    shares: dict[str, int]


async def fill(url: str, loads: Iterable[Load]) -> None:
    """A filled stream for every load."""
    async with await keylane.connect(url) as connection:
        for load in loads:
            transform = SubjectTransform(src=load.partitioning.filter, dest=load.partitioning.destination)
            config = streams.StreamConfig(
                name=load.stream,
                subjects=[load.partitioning.filter],
                storage=streams.StorageType(load.storage),
                subject_transform=None if load.kind == "elastic" else transform,
            )
            await streams.create(connection, config)
            results = await publish_many(connection, (Outgoing(one, PAYLOAD) for one in load.subjects()))
            failed = [one for one in results if isinstance(one, Exception)]
            if failed:
                raise SystemExit(f"filling the stream failed {len(failed)} times, first: {failed[0]}")


async def group(url: str, load: Load, dialect: Dialect) -> Place:
    """A new group; the queue of an elastic one holds everything when this returns."""
    async with await keylane.connect(url) as connection:
        if load.kind == "static":
            await groups.create_static(
                connection, load.stream, GROUP, partitions=PARTITIONS, members=load.names, dialect=dialect
            )
            (only,) = load.names
            return Place(url, load.stream, GROUP, {only: load.count})
        config = await groups.create_elastic(
            connection,
            load.stream,
            GROUP,
            partitions=PARTITIONS,
            partition_by=load.partitioning.by,
            members=load.names,
            dialect=dialect,
        )
        await _sourced(connection, load)
    messages = load.messages_of_partitions()
    shares = {name: sum(messages[one] for one in config.plan.partitions_of(name)) for name in load.names}
    return Place(url, load.stream, GROUP, {name: count for name, count in shares.items() if count})


async def consumer(url: str, load: Load, *, filtered: bool, max_ack_pending: int) -> Place:
    """A consumer of a static group's stream, without a group."""
    filters = tuple(partition_filters(range(PARTITIONS))) if filtered else None
    async with await keylane.connect(url) as connection:
        config = consumers.ConsumerConfig(
            durable_name=GROUP, filter_subjects=filters, max_ack_pending=max_ack_pending, ack_wait_s=30
        )
        await consumers.create(connection, load.stream, config)
    return Place(url, load.stream, GROUP, {})


async def fleet(url: str, load: Load) -> Place:
    """A name that no fleet of the stream had before: its workers create everything else."""
    return Place(url, load.stream, f"f{next(_fleets)}", {})


async def clear_fleet(place: Place) -> None:
    """Remove the consumers of a fleet; its records are few and small."""
    async with await keylane.connect(place.url) as connection:
        found = [one.name async for one in consumers.list_all(connection, place.stream)]
        for name in found:
            if name.startswith(f"{place.group}-"):
                await consumers.delete(connection, place.stream, name)


async def clear(place: Place) -> None:
    """Remove what the run was made on; the filled stream stays."""
    async with await keylane.connect(place.url) as connection:
        if place.shares:
            await groups.delete(connection, place.stream, place.group)
        else:
            await consumers.delete(connection, place.stream, place.group)


async def _sourced(connection: Connection, load: Load) -> None:
    """Wait until the server has copied everything into the queue."""
    queue = f"{load.stream}-{GROUP}"
    async with asyncio.timeout(_SOURCED_WITHIN_S):
        while True:
            if (await streams.state(connection, queue)).last_sequence >= load.count:
                return
            await asyncio.sleep(_LOOK_EVERY_S)
