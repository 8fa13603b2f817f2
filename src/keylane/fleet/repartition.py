"""Another number of partitions for a hashed fleet that runs: the wish, and the leader that fulfils it.

`repartition` checks and writes the wish into the partition table. `GenerationKeeper` performs the steps of
`core/fleet_generations.py` in whichever worker leads; each is a compare-and-set, or can be repeated, so that it does
not matter who is killed when.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from keylane.core.fleet_generations import (
    ChangeFacts,
    ChangeStep,
    dropped,
    find_barrier,
    held,
    in_words,
    next_step,
    partitions_of,
    retired,
    split,
    wanted,
)
from keylane.core.fleet_names import check_fleet_name, partition_consumer
from keylane.core.fleet_partitions import HashedPartitions, Partition, source_from_wire
from keylane.core.fleet_records import SPEC, Generation, PartitionTable
from keylane.core.fleet_view import FleetView
from keylane.core.names import check_stream_name
from keylane.core.partitions import Partitioning, check_partition_count, parse_transform
from keylane.errors import FleetError, InvalidInput, NotFound
from keylane.fleet.admin import required_spec
from keylane.fleet.partition_table import FleetPartitions
from keylane.fleet.store import FLEET_BUCKET
from keylane.fleet.stream_copy import CopyOrigin, copy_name
from keylane.jetstream import Bucket, Connection, change, check_seconds, consumers, streams

_AT_ONCE = 64
_SOON_S = 0.05
_IDLE_S = 0.5
_POLL_S = 0.1
_NUMBER = re.compile(r"(\{\{\s*[Pp]artition\s*\(\s*)[0-9]+")

WAIT_S = 60.0


# ---- the wish ---------------------------------------------------------------------------------------


async def repartition(
    connection: Connection,
    stream: str,
    fleet: str,
    partitions: int,
    *,
    wait_s: float = WAIT_S,
    on_progress: Callable[[str], None] | None = None,
) -> None:
    """Give a hashed fleet another number of partitions while it runs, and wait until it has them.

    Messages that are stored keep their numbers and are handled first; then the new partitions begin. The order of every
    key is kept, nothing is lost, nothing is repeated. The workers need no restart; those that join later may bring the
    old number or the new one. If this call ends early, the workers go on: call it again to see the end.

    Raises `FleetError` if something else reads the stream by its numbers, or if it is not done after `wait_s`.

    >>> await fleet.repartition(connection, "ORDERS", "billing", 16)
    """
    check_stream_name(stream)
    check_fleet_name(fleet)
    check_partition_count(partitions)
    check_seconds(wait_s, "wait_s")
    found = await fleet_partitions(connection, stream, fleet)
    await _write_wish(connection, stream, fleet, found, partitions)
    end, said = time.monotonic() + wait_s, None
    while (where := in_words(found.table)) is not None:
        if where != said and on_progress is not None:
            on_progress(where)
        said = where
        if time.monotonic() > end:
            raise FleetError(
                f"not done after {wait_s:g} s: {where}. The workers go on with it; without any worker it waits for one"
            )
        await asyncio.sleep(_POLL_S)
        await found.read()


async def fleet_partitions(connection: Connection, stream: str, fleet: str) -> FleetPartitions:
    """The partitions of a fleet of this name, as its records show them."""
    spec = await required_spec(connection, stream, fleet)
    source = source_from_wire(spec.source)
    if not isinstance(source, HashedPartitions):
        raise FleetError(
            f"the partitions of fleet {fleet!r} are {spec.source.get('kind')}, not hashed: only numbers can be changed"
        )
    if spec.layout != "partition":
        raise FleetError(f"fleet {fleet!r} has the layout {spec.layout!r}: only the layout 'partition' can change")
    found = FleetPartitions(connection, stream, fleet, source)
    await found.read()
    return found


async def _write_wish(connection: Connection, stream: str, fleet: str, found: FleetPartitions, partitions: int) -> None:
    async def write(_: object) -> None:
        table = wanted(found.table, partitions)
        if table is found.table:
            return
        reads = _read_stream(stream, fleet, found)
        if not found.table.target and len(found.table.generations) == 1:
            await _check_transform(connection, reads, found)
        await _refuse_others(connection, reads, fleet)
        await found.write(table)

    async def read() -> None:
        await found.read()

    await change(read, write)


def _read_stream(stream: str, fleet: str, found: FleetPartitions) -> str:
    """The stream that carries the numbers."""
    is_copy = isinstance(found.source, HashedPartitions) and found.source.copy is not None
    return copy_name(stream, fleet) if is_copy else stream


async def _check_transform(connection: Connection, stream: str, found: FleetPartitions) -> None:
    present = found.table.generations[-1].partitions
    numbering = numbering_of((await streams.info_json(connection, stream))["config"])
    if numbering.partitions != present:
        raise FleetError(
            f"stream {stream!r} numbers {numbering.partitions} partitions, and the fleet has {present}: somebody has "
            f"changed its subject transform. Change it back to {present} first"
        )


async def _refuse_others(connection: Connection, stream: str, fleet: str) -> None:
    others = [one async for one in _others(connection, stream, fleet)]
    if others:
        raise FleetError(
            f"the numbers of stream {stream!r} are also used by {', '.join(others)}: another number of partitions "
            "would take their messages away. End them first"
        )


async def _others(connection: Connection, stream: str, fleet: str) -> AsyncIterator[str]:
    """Who else reads the stream by its numbers."""
    for key in await Bucket(connection, "static-consumer-groups").keys(stream):
        yield f"the static group {key.partition('.')[2]!r}"
    for entry in await Bucket(connection, FLEET_BUCKET).get_matching(f"{stream}.*.{SPEC}"):
        name = entry.key.split(".")[1]
        if name != fleet and entry.value is not None:
            yield f"the fleet {name!r}"
    async for info in consumers.list_all(connection, stream):
        if not info.name.startswith(f"{fleet}-p"):
            yield f"the consumer {info.name!r}"
    async for other in streams.list_all(connection):
        copied = [*([other.config.mirror] if other.config.mirror else []), *(other.config.sources or ())]
        if any(one.name == stream for one in copied):
            yield f"the stream {other.config.name!r}, which copies it"


# ---- the stream's numbers ---------------------------------------------------------------------------


def numbering_of(config: dict[str, Any]) -> Partitioning:
    """How a stream numbers its subjects, by its configuration as JSON."""
    [copied, *_] = config.get("sources") or [{}]
    [transform, *_] = copied.get("subject_transforms") or [config.get("subject_transform") or {}]
    known = parse_transform(transform.get("src") or ">", transform["dest"]) if transform.get("dest") else None
    if known is None:
        raise FleetError(
            f"stream {config['name']!r} has no subject transform that numbers its subjects: whoever publishes chooses "
            "the numbers, and must choose others"
        )
    return known


def renumbered(config: dict[str, Any], partitions: int) -> dict[str, Any]:
    """The configuration with another number of partitions, and everything else as it is."""
    transform = config["subject_transform"]
    destination, count = _NUMBER.subn(rf"\g<1>{partitions}", transform["dest"], count=1)
    if count != 1:
        raise InvalidInput(f"transform destination {transform['dest']!r} has no partition number to change")
    return {**config, "subject_transform": {**transform, "dest": destination}}


# ---- the leader's part ------------------------------------------------------------------------------


class GenerationKeeper:
    """Performs the change that the table asks for, step by step, while its worker leads."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        fleet: str,
        partitions: FleetPartitions,
        *,
        view: FleetView,
        is_held: Callable[[str], Awaitable[bool]],
        leads: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._stream = _read_stream(stream, fleet, partitions)
        source = partitions.source
        assert isinstance(source, HashedPartitions)
        self._copy = CopyOrigin(connection, stream, fleet, source) if source.copy is not None else None
        self._fleet = fleet
        self._partitions = partitions
        self._view = view
        self._is_held = is_held
        self._leads = leads

    def watch(self, changed: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return nullcontext()  # the worker reads the table when it changes

    async def tend(self) -> float:
        table = self._partitions.table
        if self._partitions.is_lost:
            await self._partitions.write(replace(table, version=table.version + 1))
            return _SOON_S
        step = next_step(table, await self._facts(table))
        match step:
            case ChangeStep.NOTHING:
                return _IDLE_S
            case ChangeStep.HOLD:
                await self._partitions.write(held(table, (await self._state()).last_sequence))
            case ChangeStep.UPDATE:
                await self._update(table.target)
            case ChangeStep.SPLIT:
                await self._split(table)
            case ChangeStep.RETIRE:
                await self._partitions.write(retired(table))
            case ChangeStep.DROP:
                await self._delete_consumers(table.generations[0])
                await self._partitions.write(dropped(table))
        return _SOON_S

    async def _facts(self, table: PartitionTable) -> ChangeFacts:
        front, *later = table.generations
        followed = self._view.all_follow(table.version)
        if later and front.retired:
            return ChangeFacts(owned=not followed or await self._is_owned(front))
        if later:
            return ChangeFacts(handled=await self._is_handled(front))
        if table.target and front.last is not None and followed:
            config = await self._config()
            is_stopped = self._copy is not None and not config.get("sources")  # a leader before was cut off
            return ChangeFacts(followed=True, numbered=0 if is_stopped else numbering_of(config).partitions)
        return ChangeFacts()

    # ---- what is so -------------------------------------------------------------------------------------

    async def _state(self) -> streams.StreamState:
        return await streams.state(self._connection, self._stream)

    async def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = (await streams.info_json(self._connection, self._stream))["config"]
        return config

    def _of(self, generation: Generation) -> tuple[Partition, ...]:
        source = self._partitions.source
        assert isinstance(source, HashedPartitions)
        return partitions_of(source, generation)

    async def _is_owned(self, generation: Generation) -> bool:
        """Whether a worker may still have a reader of one of its partitions."""
        return any(await _gather(self._is_held(one.id) for one in self._of(generation)))

    async def _is_handled(self, generation: Generation) -> bool:
        """Whether everything of a generation up to its last sequence is acked."""
        floors = {info.name: info.ack_floor async for info in consumers.list_all(self._connection, self._stream)}
        last = generation.last or 0

        async def is_done(partition: Partition) -> bool:
            floor = floors.get(partition_consumer(self._fleet, partition.id), 0)
            first = max(floor + 1, partition.first, 1)
            if first > last:
                return True
            try:
                found = await streams.get_message(
                    self._connection, self._stream, sequence=first, next_by_subject=partition.filter
                )
            except NotFound:
                return True
            return bool(found["seq"] > last)

        return all(await _gather(is_done(one) for one in self._of(generation)))

    # ---- what is done -----------------------------------------------------------------------------------

    async def _update(self, partitions: int) -> None:
        if self._copy is not None:
            await self._copy.renumber(partitions, self._leads)
            return
        config = renumbered(await self._config(), partitions)
        if self._leads():  # a leader that was replaced must not undo what its successor has done since
            await streams.update_json(self._connection, config)

    async def _split(self, table: PartitionTable) -> None:
        new = numbering_of(await self._config())
        old = Partitioning(new.filter, new.wildcards, table.generations[0].partitions)
        low, high = table.generations[0].last or 0, (await self._state()).last_sequence
        barrier = find_barrier(await self._subjects(low, high), old, new, low, high)
        await self._partitions.write(split(table, barrier))

    async def _subjects(self, low: int, high: int) -> list[tuple[int, str]]:
        """What is stored after one sequence and up to another, as the stream's leader has it: a replica may lag."""

        async def subject(sequence: int) -> str | None:
            try:
                found = await streams.get_message(self._connection, self._stream, sequence=sequence)
            except NotFound:
                return None
            return str(found["subject"])

        sequences = range(low + 1, high + 1)
        found = await _gather(subject(one) for one in sequences)
        return [(sequence, one) for sequence, one in zip(sequences, found, strict=True) if one is not None]

    async def _delete_consumers(self, generation: Generation) -> None:
        async def delete(partition: Partition) -> None:
            try:
                await consumers.delete(self._connection, self._stream, partition_consumer(self._fleet, partition.id))
            except NotFound:
                return  # a leader before has done it, or it was never made

        await _gather(delete(one) for one in self._of(generation))


async def _gather(calls: Iterable[Any]) -> list[Any]:
    """The results of calls, of which some run at once."""
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(call: Any) -> Any:
        async with limit:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))
