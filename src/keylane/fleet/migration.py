"""Moving the partitions of a stream from consumers of any program, one for each partition, to a fleet, and back.

The old program is not touched: the server pauses its consumers. A paused consumer delivers nothing, and what it has
delivered can still be acked. When nothing is in flight any more its position is exact, and the fleet's consumer begins
there. So a switch loses nothing and repeats nothing, and so does the way back.

On a work queue two consumers may not have the same filter, so the fleet's consumers cannot stand beside the old ones:
each old one is drained, kept as a record, deleted, and replaced. What was done is in the bucket `keylane-migrations`,
by compare-and-set; a step that was cut off is taken again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from keylane.core.fleet_names import check_fleet_name, partition_consumer
from keylane.core.fleet_partitions import HashedPartitions, ListedPartitions, Partition, source_from_wire
from keylane.core.fleet_records import FleetSpec
from keylane.core.migration import (
    STEPS,
    ConsumerMatch,
    MigrationState,
    OldConsumer,
    ServiceLevel,
    ServiceWindow,
    match_consumers,
    must_roll_back,
)
from keylane.core.names import check_stream_name
from keylane.errors import FleetError, InvalidInput, NoSuchFleet, NotFound
from keylane.fleet.admin import status, stored_spec
from keylane.fleet.membership import ACK_WAIT_S, MAX_ACK_PENDING, PIN_TIMEOUT_S
from keylane.fleet.partition_reader import ReaderOptions
from keylane.fleet.partition_table import FleetPartitions
from keylane.jetstream import (
    Bucket,
    Connection,
    ConsumerConfig,
    ConsumerInfo,
    RetentionPolicy,
    consumers,
    existing_stream,
)

MIGRATION_BUCKET = "keylane-migrations"

_FOR_GOOD = timedelta(days=3650)
"""A pause has an end on the server. It is ended by `resume` long before this one."""
_LOOK_S = 0.05
_AT_ONCE = 32

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPosition:
    """A partition's old consumer: its configuration, and the last sequence that it, or the fleet, has handled."""

    consumer: str
    config: Mapping[str, Any]
    handled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRecord:
    """How far a migration has come."""

    state: MigrationState = MigrationState.NONE
    since: str = ""
    """When it came to this state."""
    old: Mapping[str, OldPosition] = field(default_factory=dict)
    """By partition."""

    def to_json(self) -> bytes:
        old = {one: {"consumer": o.consumer, "config": o.config, "handled": o.handled} for one, o in self.old.items()}
        return json.dumps({"state": self.state, "since": self.since, "old": old}).encode()

    @classmethod
    def from_json(cls, value: bytes) -> MigrationRecord:
        found = json.loads(value)
        old = {one: OldPosition(**o) for one, o in found["old"].items()}
        return cls(state=MigrationState(found["state"]), since=found["since"], old=old)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionParity:
    """A partition as its old consumer and the fleet's see it."""

    partition: str
    old: str
    old_left: int
    """Messages that the old consumer has not handled."""
    fleet_left: int | None
    """Messages that the fleet would get; None: it has no consumer for the partition."""

    @property
    def holds(self) -> bool:
        """The fleet would get everything that is left."""
        return self.fleet_left is not None and self.fleet_left >= self.old_left


class Migration:
    """The migration of one fleet.

    >>> migration = await Migration.open(connection, "ORDERS", "billing", hashed(32, "orders.*"))
    >>> migration.match.obstacles
    ()
    >>> await migration.switch()
    """

    def __init__(
        self,
        connection: Connection,
        fleet: str,
        partitions: tuple[Partition, ...],
        options: ReaderOptions,
        *,
        match: ConsumerMatch,
        drain_s: float,
        force: bool,
        say: Say,
    ) -> None:
        self._connection = connection
        self._stream, self._fleet = options.stream, fleet
        self._partitions = {one.id: one for one in partitions}
        self._options = options
        self.match = match
        self._drain_s = drain_s
        self._force = force
        self._say = say
        self._bucket = Bucket(connection, MIGRATION_BUCKET)
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self.record = MigrationRecord()
        self._revision = 0

    @property
    def is_queue(self) -> bool:
        """A work queue takes one consumer for each subject: no shadow and no dual mode there."""
        return self._options.is_queue

    @classmethod
    async def open(
        cls,
        connection: Connection,
        stream: str,
        fleet: str,
        source: HashedPartitions | ListedPartitions,
        *,
        drain_s: float = 60.0,
        force: bool = False,
        say: Say = lambda line: None,
    ) -> Migration:
        """Look at the stream and its consumers. Changes nothing.

        `drain_s`: how long a step waits for messages in flight. `force`: a switch does not fail then; what does not end
        is handled again.
        """
        check_stream_name(stream)
        check_fleet_name(fleet)
        connection.require("consumer_reset")
        info = await existing_stream(connection, stream)
        partitions = source.resolve().partitions
        await _refuse_other_fleet(connection, stream, fleet, partitions)
        found = [
            OldConsumer(
                name=one.name,
                filters=one.config.filter_subjects
                or ((one.config.filter_subject,) if one.config.filter_subject else ()),
                acks=one.config.ack_policy,
                is_push=one.config.deliver_subject is not None,
            )
            async for one in consumers.list_all(connection, stream)
        ]
        match = match_consumers(partitions, found, partition_consumer(fleet, ""))
        options = ReaderOptions(
            stream=stream,
            is_queue=info.config.retention == RetentionPolicy.WORK_QUEUE,
            ack_wait_s=ACK_WAIT_S,
            max_ack_pending=MAX_ACK_PENDING,
            pin_timeout_s=PIN_TIMEOUT_S,
        )
        migration = cls(connection, fleet, partitions, options, match=match, drain_s=drain_s, force=force, say=say)
        await migration._read(replicas=info.config.num_replicas or 1)
        return migration

    # ---- steps -----------------------------------------------------------------------------------------------------

    async def shadow(self) -> None:
        """Create the fleet's consumers, paused: workers can join and be assigned, and get no message."""
        self._check("shadow")
        self._check_side_by_side("shadow mode")
        await self._remember(MigrationState.SHADOW)
        await self._each(lambda one: self._create_beside(one, paused=True))

    async def dual(self) -> None:
        """Let both deliver. Handlers on both sides must skip what the other has handled: `Deduplicator`."""
        self._check("dual")
        self._check_side_by_side("dual mode")
        await self._remember(MigrationState.DUAL)
        await self._each(lambda one: self._create_beside(one, paused=False))

    async def parity(self) -> list[PartitionParity]:
        """What each side has left, partition by partition."""

        async def look(partition: Partition) -> PartitionParity:
            old = await self._info(self._old_of(partition.id))
            mine = await self._info(self._consumer_of(partition.id))
            return PartitionParity(
                partition=partition.id,
                old=self._old_of(partition.id),
                old_left=old.num_pending + old.num_ack_pending if old is not None else 0,
                fleet_left=mine.num_pending + mine.num_ack_pending if mine is not None else None,
            )

        return await self._each(look)

    async def switch(self) -> None:
        """Hand every partition over: the old consumer is paused and drained, and the fleet's begins where it ended."""
        self._check("switch")
        if self.record.state in (MigrationState.NONE, MigrationState.ROLLED_BACK):
            self._refuse_obstacles()
        await self._remember(MigrationState.SWITCHING)
        handled = await self._each(self._take_over)
        positions = {
            one.id: replace(self.record.old[one.id], handled=sequence)
            for one, sequence in zip(self._partitions.values(), handled, strict=True)
        }
        await self._write(replace(self.record, old=positions), MigrationState.SWITCHED)

    async def rollback(self) -> None:
        """Hand every partition back. The fleet's consumers are paused, and its workers wait for messages.

        On a work queue the workers must be stopped before: their consumers are deleted.
        """
        self._check("rollback")
        if self.is_queue:
            await self._each(self._check_not_pulled)
        await self._each(self._give_back)
        await self._write(self.record, MigrationState.ROLLED_BACK)

    async def finish(self, after_s: float | None = None) -> None:
        """Delete the old consumers, not before twice their inactive threshold (or `after_s`) after the switch."""
        self._check("finish")
        thresholds = [one.config.get("inactive_threshold", 0) / 1e9 for one in self.record.old.values()]
        wait_s = after_s if after_s is not None else 2 * max(thresholds, default=0.0)
        since = datetime.fromisoformat(self.record.since)
        left_s = (since + timedelta(seconds=wait_s) - datetime.now(UTC)).total_seconds()
        if left_s > 0:
            raise FleetError(
                f"the switch was at {self.record.since}: the old consumers are kept for {wait_s:g} s after it, for a "
                f"rollback; run finish again in {left_s:.0f} s"
            )
        await self._each(lambda one: self._delete(self._old_of(one.id)))
        await self._write(self.record, MigrationState.FINISHED)

    async def watch(self, level: ServiceLevel, *, window_s: float, burn_in_s: float) -> str | None:
        """Look at the fleet for `burn_in_s`; roll back when it breaks the service level. Returns why it did."""
        windows: list[ServiceWindow] = []
        before = await self._deliveries()
        end = asyncio.get_running_loop().time() + burn_in_s
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(window_s)
            now = await self._deliveries()
            window = ServiceWindow(
                deliveries=sum(now[one][0] - before.get(one, (0, 0))[0] for one in now),
                redelivered=sum(redelivered for _, redelivered in now.values()),
                oldest_s=await self._oldest_s(len(windows) * window_s + window_s),
            )
            windows.append(window)
            before = now
            self._say(
                f"window {len(windows)}: {window.deliveries:,} deliveries, {window.redelivered:,} redelivered, "
                f"{window.breach(level) or 'within the service level'}"
            )
            if (why := must_roll_back(windows, level)) is not None:
                self._say(f"rolling back: {why}")
                await self.rollback()
                return why
        return None

    async def _oldest_s(self, watched_s: float) -> float | None:
        try:
            found = await status(self._connection, self._stream, self._fleet)
        except NoSuchFleet:
            self._say(f"no worker has joined fleet {self._fleet} yet: start its workers")
            return watched_s
        return max((one.oldest_s for one in found.partitions if one.oldest_s is not None), default=None)

    # ---- one partition ---------------------------------------------------------------------------------------------

    async def _create_beside(self, partition: Partition, *, paused: bool) -> None:
        handled = self.record.old[partition.id].handled
        await self._ensure(partition, handled + 1)
        if paused:
            await self._pause(self._consumer_of(partition.id))
        else:
            await consumers.resume(self._connection, self._stream, self._consumer_of(partition.id))

    async def _take_over(self, partition: Partition) -> int:
        """The last sequence that the old consumer has handled. What an earlier try has done is not done again."""
        old, mine = self._old_of(partition.id), self._consumer_of(partition.id)
        handled = self.record.old[partition.id].handled
        before, after = await self._info(old), await self._info(mine)
        delivers = after is not None and not after.paused
        if before is not None and not (delivers and before.paused):
            await self._pause(old)
            handled = await self._drained(old, force=self._force)
            if self.is_queue:
                await self._delete(old)
        if delivers:
            return handled
        if after is None:
            await self._ensure(partition, None if self.is_queue else handled + 1)
        else:
            await consumers.reset(self._connection, self._stream, mine, sequence=handled + 1)
            await consumers.resume(self._connection, self._stream, mine)
        return handled

    async def _give_back(self, partition: Partition) -> None:
        """The fleet's consumer stays, paused: a worker would create a missing one again."""
        old, mine = self._old_of(partition.id), self._consumer_of(partition.id)
        position = self.record.old[partition.id]
        before, after = await self._info(old), await self._info(mine)
        handled = position.handled
        delivers = after is not None and not after.paused
        if delivers:
            await self._pause(mine)
            handled = await self._drained(mine, force=True)  # handlers that fail must not keep it from going back
        if self.is_queue and after is not None:
            await self._delete(mine)
        if before is None:
            config = ConsumerConfig.from_wire(position.config)
            if not self.is_queue:
                config = replace(
                    config, deliver_policy="by_start_sequence", opt_start_seq=handled + 1, opt_start_time=None
                )
            await consumers.create(self._connection, self._stream, config)
        elif before.paused:
            if delivers:
                await consumers.reset(self._connection, self._stream, old, sequence=handled + 1)
            await consumers.resume(self._connection, self._stream, old)

    async def _check_not_pulled(self, partition: Partition) -> None:
        info = await self._info(self._consumer_of(partition.id))
        if info is not None and info.num_waiting:
            raise FleetError(
                f"a worker of fleet {self._fleet!r} reads partition {partition.id}: stop the workers before a rollback "
                "on a work queue, where their consumers must make room for the old ones"
            )

    async def _drained(self, consumer: str, *, force: bool) -> int:
        """Wait until nothing of a paused consumer is in flight; returns the last sequence that it has handled.

        `force`: go on without what does not end, which is handled again.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_s
        while True:
            info = await consumers.info(self._connection, self._stream, consumer)
            if not info.num_ack_pending:
                return max(info.ack_floor, info.delivered_sequence)
            if loop.time() > end:
                break
            await asyncio.sleep(_LOOK_S)
        if not force:
            await consumers.resume(self._connection, self._stream, consumer)
            raise FleetError(
                f"consumer {consumer!r} still has {info.num_ack_pending} messages in flight after {self._drain_s:g} s; "
                "it delivers again. Look at its program, give it more time with drain_s, or take the step with force: "
                "then they are handled again"
            )
        again = "" if self.is_queue else f", and so is what was handled above sequence {info.ack_floor}"
        self._say(f"consumer {consumer} has {info.num_ack_pending} messages in flight: they are handled again{again}")
        return info.ack_floor

    async def _ensure(self, partition: Partition, start: int | None) -> None:
        name = self._consumer_of(partition.id)
        if await self._info(name) is None:
            wanted = self._options.consumer(name, partition.filter, start)
            await consumers.create(self._connection, self._stream, wanted, action="create")

    async def _pause(self, consumer: str) -> None:
        await consumers.pause(self._connection, self._stream, consumer, datetime.now(UTC) + _FOR_GOOD)

    async def _delete(self, consumer: str) -> None:
        try:
            await consumers.delete(self._connection, self._stream, consumer)
        except NotFound:
            return  # an earlier try has deleted it

    async def _info(self, consumer: str) -> ConsumerInfo | None:
        try:
            return await consumers.info(self._connection, self._stream, consumer)
        except NotFound:
            return None

    def _consumer_of(self, partition_id: str) -> str:
        return partition_consumer(self._fleet, partition_id)

    def _old_of(self, partition_id: str) -> str:
        known = self.record.old.get(partition_id)
        return known.consumer if known is not None else self.match.old[partition_id]

    async def _each(self, work: Callable[[Partition], Awaitable[T]]) -> list[T]:
        async def one(partition: Partition) -> T:
            async with self._limit:
                return await work(partition)

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one(partition)) for partition in self._partitions.values()]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in running]

    async def _deliveries(self) -> dict[str, tuple[int, int]]:
        return {
            info.name: (info.delivered_count, info.num_redelivered)
            async for info in consumers.list_all(self._connection, self._stream)
            if info.name.startswith(partition_consumer(self._fleet, ""))
        }

    # ---- the record ------------------------------------------------------------------------------------------------

    def _check(self, step: str) -> None:
        if self.record.state not in STEPS[step]:
            possible = ", ".join(name for name, states in STEPS.items() if self.record.state in states) or "nothing"
            raise FleetError(
                f"the migration of fleet {self._fleet!r} is in state {self.record.state}: {step} cannot follow; "
                f"{possible} can"
            )

    def _check_side_by_side(self, mode: str) -> None:
        if self.is_queue:
            raise FleetError(
                f"stream {self._stream!r} is a work queue, where two consumers may not have the same subjects (error "
                f"10100): there is no {mode}; use switch, which drains one partition after the other"
            )
        self._refuse_obstacles()

    def _refuse_obstacles(self) -> None:
        if self.match.obstacles:
            raise FleetError("the partitions cannot be migrated: " + "; ".join(self.match.obstacles))

    async def _read(self, replicas: int) -> None:
        await self._bucket.ensure(replicas=replicas)
        entry = await self._bucket.get(self._key)
        if entry is None:
            return
        self._revision = entry.revision
        if entry.value is not None:
            try:
                self.record = MigrationRecord.from_json(entry.value)
            except (KeyError, TypeError, ValueError) as error:
                raise FleetError(
                    f"key {self._key!r} of bucket {MIGRATION_BUCKET!r} is no record of a migration ({error}): delete it"
                ) from error

    async def _remember(self, state: MigrationState) -> None:
        """The old consumers and their positions, before anything is changed."""
        old = dict(self.record.old) if self.record.state is not MigrationState.ROLLED_BACK else {}
        for partition, name in self.match.old.items():
            info = await consumers.info(self._connection, self._stream, name)
            if partition not in old:
                old[partition] = OldPosition(consumer=name, config=info.config.to_wire(), handled=info.ack_floor)
        lacking = [one for one in self._partitions if one not in old]
        if lacking:
            raise InvalidInput(f"partition {lacking[0]} has no old consumer: {'; '.join(self.match.obstacles)}")
        await self._write(replace(self.record, old=old), state)

    async def _write(self, record: MigrationRecord, state: MigrationState) -> None:
        record = replace(record, state=state, since=datetime.now(UTC).isoformat(timespec="seconds"))
        self._revision = await self._bucket.put(self._key, record.to_json(), revision=self._revision)
        self.record = record
        self._say(f"the migration of fleet {self._fleet} is in state {state}")

    @property
    def _key(self) -> str:
        return f"{self._stream}.{self._fleet}"


async def _refuse_other_fleet(
    connection: Connection, stream: str, fleet: str, partitions: tuple[Partition, ...]
) -> None:
    """A fleet that exists must read these partitions through consumers like those that a step creates."""
    stored = await stored_spec(connection, stream, fleet)
    if stored is None:
        return
    wanted = FleetSpec(source=stored.source, prefix=stored.prefix, pool=stored.pool, lease_s=stored.lease_s)
    if differences := wanted.differences(stored):
        raise FleetError(
            f"fleet {fleet!r} of stream {stream!r} cannot be migrated to or from, since a migration knows layout "
            f"'partition', acks='message' and state='replicated' only: {'; '.join(differences)}. Choose another name, "
            "and join with these settings"
        )
    known = FleetPartitions(connection, stream, fleet, source_from_wire(stored.source))
    await known.read()
    if {(one.id, one.filter) for one in known.current} != {(one.id, one.filter) for one in partitions}:
        raise FleetError(
            f"fleet {fleet!r} of stream {stream!r} has other partitions than the migration: {len(known.current)}, the "
            f"first of them {known.current[0].filter!r}; use those of the fleet, or choose another name"
        )
