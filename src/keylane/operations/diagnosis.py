"""Collects the facts of a diagnosis with a bounded number of requests, each with the connection's deadline.

Reads only. Whatever cannot be read is a fact too: `unread` (a permission is missing) or `unchecked`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, TypeVar

from nats.js.api import StreamConfig

from keylane.core.diagnosis_facts import (
    DiagnosedConsumer,
    DiagnosedFleet,
    DiagnosedGroup,
    DiagnosedServer,
    DiagnosedStream,
    DoctorFacts,
    Finding,
    Unchecked,
    Unread,
)
from keylane.core.diagnosis_rules import diagnose
from keylane.core.fleet_generations import partitions_of
from keylane.core.fleet_names import partition_consumer
from keylane.core.fleet_partitions import (
    HashedPartitions,
    ListedPartitions,
    Partition,
    partitions_from_entries,
    source_from_wire,
)
from keylane.core.fleet_records import (
    SPEC,
    TABLE,
    FleetClaim,
    FleetSpec,
    HistoryEntry,
    PartitionTable,
    from_json,
)
from keylane.core.name_suggestions import name_missing
from keylane.core.partitions import Partitioning, parse_transform
from keylane.core.subjects import overlaps
from keylane.errors import (
    BrokenFleetRecord,
    BrokenGroupRecord,
    InvalidInput,
    KeylaneError,
    NoSuchGroup,
    PermissionDenied,
)
from keylane.fleet import list_fleets
from keylane.fleet.store import FLEET_BUCKET
from keylane.fleet.stream_copy import copy_name
from keylane.groups import ElasticConfig, GroupName, can_store, list_groups
from keylane.groups.store import read_group
from keylane.jetstream import Bucket, Connection, ConsumerInfo, consumers, existing_stream, missing_features, streams
from keylane.operations.fleet_leases import live_workers
from keylane.operations.server_status import server_clock, sync_intervals
from keylane.priority import Unpinned, advisories
from keylane.spark.compatibility import installed_misfit

T = TypeVar("T")

_AT_ONCE = 8
_NANOSECONDS = 1_000_000_000
_RECENT_MS = 600_000
_COPY_MARK = "keylane_fleet"
_BUCKETS = tuple(f"KV_{name}" for name in ("static-consumer-groups", "elastic-consumer-groups", FLEET_BUCKET))


async def findings(
    connection: Connection, stream: str | None = None, group: str | None = None, *, watch_s: float = 0.0
) -> tuple[DoctorFacts, tuple[Finding, ...]]:
    """Look at the account, at one stream, or at one group or fleet of it; what is wrong, the worst first."""
    facts = await collect(connection, stream, watch_s=watch_s)
    if group is None:
        return facts, diagnose(facts)
    names = {one.group for one in facts.groups} | {one.fleet for one in facts.fleets}
    if group not in names and not facts.unread:
        raise NoSuchGroup(name_missing(f"stream {stream!r} has no group and no fleet {group!r}", group, names))
    near = {"server", str(stream), f"{stream}/{group}", f"{stream}-{group}", *_BUCKETS}
    return facts, tuple(one for one in diagnose(facts) if one.where in near)


async def collect(connection: Connection, stream: str | None = None, *, watch_s: float = 0.0) -> DoctorFacts:
    """The facts of an account, or of one stream."""
    if stream is not None:
        with contextlib.suppress(PermissionDenied):
            await existing_stream(connection, stream)
    return await _Look(connection, stream).at_all(watch_s)


class _Look:
    """One look at an account. Keeps what it could not see."""

    def __init__(self, connection: Connection, stream: str | None) -> None:
        self._connection = connection
        self._stream = stream
        self._unread: dict[str, Unread] = {}
        self._unchecked: list[Unchecked] = []
        self._timeouts: Counter[tuple[str, str]] = Counter()
        self._limit = asyncio.Semaphore(_AT_ONCE)

    async def at_all(self, watch_s: float) -> DoctorFacts:
        async with asyncio.TaskGroup() as tasks:
            if watch_s:
                tasks.create_task(self._try("whether pins flap", self._watch_pins(watch_s)))
            server = await self._server()
            found = await self._streams()
            groups = await self._groups()
            fleets = await self._fleets()
            read = sorted(({one.reads for one in groups} | {one.reads for one in fleets}) & found.keys())
            listed = await asyncio.gather(*(self._consumers(name) for name in read))
            others = await asyncio.to_thread(spark_findings) if self._stream is None else ()
        by_stream = {name: one for name, one in zip(read, listed, strict=True) if one is not None}
        self._judge_watch(by_stream, watch_s)
        return DoctorFacts(
            server=replace(server, is_clustered=server.is_clustered or any(one.replicas > 1 for one in found.values())),
            streams=found,
            consumers=by_stream,
            groups=tuple(groups),
            fleets=tuple(fleets),
            pin_timeouts=dict(self._timeouts),
            watched_s=watch_s,
            unread=tuple(self._unread.values()),
            unchecked=tuple(self._unchecked),
            others=others,
        )

    async def _try(self, what: str, work: Awaitable[T]) -> T | None:
        """The result; None if it cannot be had, which is noted."""
        try:
            async with self._limit:
                return await work
        except PermissionDenied as error:
            self._unread[error.subject] = Unread(error.subject, str(error))
            self._unchecked.append(Unchecked(what, f"this user may not use {error.subject}"))
        except KeylaneError as error:
            self._unchecked.append(Unchecked(what, str(error)))
        return None

    # ---- the server -----------------------------------------------------------------------------------------

    async def _server(self) -> DiagnosedServer:
        clock = await self._try("the server's clock", server_clock(self._connection, self._connection.api.timeout_s))
        sync = await self._try("how often the server syncs to disk", sync_intervals(self._connection))
        version = self._connection.server_version
        return DiagnosedServer(
            version=version,
            is_clustered=clock is not None and clock.cluster is not None,
            missing_features=missing_features(version),
            clock_ahead_s=clock.ahead_s if clock is not None else None,
            clock_error_s=clock.error_s if clock is not None else 0.0,
            sync_s=sync,
        )

    # ---- streams and their consumers ------------------------------------------------------------------------

    async def _streams(self) -> dict[str, DiagnosedStream]:
        async def listed() -> list[dict[str, Any]]:
            return [one async for one in streams.list_json(self._connection)]

        wires = await self._try("streams", listed())
        if wires is None and self._stream is not None:
            alone = await self._try("the stream", streams.info_json(self._connection, self._stream))
            wires = [alone] if alone is not None else []
        found = (stream_facts(wire) for wire in wires or ())
        return {one.name: one for one in found if self._is_near(one)}

    def _is_near(self, stream: DiagnosedStream) -> bool:
        if self._stream is None or stream.name in (self._stream, *_BUCKETS) or self._stream in stream.sources:
            return True
        return (stream.fleet_copy_of or "").startswith(f"{self._stream}/")

    async def _consumers(self, stream: str) -> tuple[DiagnosedConsumer, ...] | None:
        async def listed() -> tuple[DiagnosedConsumer, ...]:
            return tuple([consumer_facts(one) async for one in consumers.list_all(self._connection, stream)])

        return await self._try(f"consumers of stream {stream}", listed())

    # ---- groups and fleets ----------------------------------------------------------------------------------

    async def _groups(self) -> list[DiagnosedGroup]:
        names = await self._try("groups", list_groups(self._connection, self._stream))
        looked = [await self._try(f"group {one.group}", self._group(one)) for one in names or ()]
        return [one for one in looked if one is not None]

    async def _group(self, name: GroupName) -> DiagnosedGroup | None:
        try:
            stored = await read_group(self._connection, name.kind, name.stream, name.group)
        except BrokenGroupRecord as broken:
            return DiagnosedGroup(stream=name.stream, group=name.group, kind=name.kind, problem=str(broken))
        if stored is None:
            return None  # deleted since it was listed
        config = stored.config
        return DiagnosedGroup(
            stream=name.stream,
            group=name.group,
            kind=name.kind,
            partitions=config.partitions,
            filters=config.group_filters,
            transforms=_queue_transforms(config) if isinstance(config, ElasticConfig) else (),
            plan=config.plan,
        )

    async def _fleets(self) -> list[DiagnosedFleet]:
        names = await self._try("fleets", list_fleets(self._connection, self._stream))
        looked = [await self._try(f"fleet {fleet}", self._fleet(stream, fleet)) for stream, fleet in names or ()]
        return [one for one in looked if one is not None]

    async def _fleet(self, stream: str, fleet: str) -> DiagnosedFleet:
        prefix = f"{stream}.{fleet}."
        found = await Bucket(self._connection, FLEET_BUCKET).get_matching(f"{prefix}>")
        values = {one.key.removeprefix(prefix): one.value for one in found if one.value is not None}
        try:
            records = {key: from_json(key, value) for key, value in values.items()}
            spec = records[SPEC]
            assert isinstance(spec, FleetSpec)
            workers = await live_workers(self._connection, stream, fleet, spec.lease_s)
            return fleet_facts(stream, fleet, records, workers, _now_ms())
        except (BrokenFleetRecord, InvalidInput) as broken:
            return DiagnosedFleet(stream=stream, fleet=fleet, reads=stream, problem=str(broken))

    # ---- pins -----------------------------------------------------------------------------------------------

    async def _watch_pins(self, watch_s: float) -> None:
        """Count the pins that time out."""
        async with advisories(self._connection, self._stream) as events:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(watch_s):
                    async for event in events:
                        if isinstance(event, Unpinned) and event.reason == "timeout":
                            self._timeouts[event.stream, event.consumer] += 1

    def _judge_watch(self, found: dict[str, tuple[DiagnosedConsumer, ...]], watch_s: float) -> None:
        longest = max((one.pin_timeout_s for each in found.values() for one in each), default=0.0)
        if longest and watch_s < 2 * longest:
            self._unchecked.append(
                Unchecked("whether pins flap", f"nobody watched long enough: `--watch {3 * longest:.0f}` does")
            )


def spark_findings() -> tuple[Finding, ...]:
    """Whether Spark and Java of this machine fit together; nothing is said where Spark is not installed."""
    if find_spec("pyspark") is None:
        return ()
    problem = installed_misfit()
    if problem is None:
        return ()
    return (
        Finding(
            rule="spark-fit",
            severity="warning",
            where="this machine",
            what=problem,
            why="pipelines and programs on Spark do not start here",
            fix="`pip install 'keylane[spark]'` brings a Spark and a Java that fit; JAVA_HOME chooses another Java",
        ),
    )


# ---- from the wire to facts -----------------------------------------------------------------------------------


def stream_facts(wire: dict[str, Any]) -> DiagnosedStream:
    """A stream as the server shows it in JSON."""
    config, state = wire["config"], wire["state"]
    transform = config.get("subject_transform") or {}
    pair = (transform.get("src") or ">", transform["dest"]) if transform.get("dest") else None
    numbering, problem = _numbering(pair)
    sources = [*(config.get("sources") or ()), *([config["mirror"]] if config.get("mirror") else [])]
    return DiagnosedStream(
        name=config["name"],
        subjects=tuple(config.get("subjects") or ()),
        transform=pair,
        numbering=numbering,
        transform_problem=problem,
        carries_numbers=_carries_numbers(config),
        sources=tuple(one["name"] for one in sources),
        source_numberings=tuple(
            (one.get("src") or ">", one.get("dest", ""))
            for each in sources
            for one in each.get("subject_transforms") or ()
        ),
        retention=config.get("retention", "limits"),
        storage=config.get("storage", "file"),
        replicas=config.get("num_replicas", 1),
        discard=config.get("discard", "old"),
        max_messages=config.get("max_msgs", -1),
        max_bytes=config.get("max_bytes", -1),
        max_age_s=config.get("max_age", 0) / _NANOSECONDS,
        max_per_subject=config.get("max_msgs_per_subject", -1),
        duplicate_window_s=config.get("duplicate_window", 0) / _NANOSECONDS,
        max_consumers=config.get("max_consumers", -1),
        consumers=state.get("consumer_count", 0),
        messages=state.get("messages", 0),
        bytes=state.get("bytes", 0),
        distinct_subjects=state.get("num_subjects", 0),
        allows_rollup=config.get("allow_rollup_hdrs", False),
        allows_schedules=config.get("allow_msg_schedules", False),
        is_async=config.get("persist_mode") == "async",
        fleet_copy_of=(config.get("metadata") or {}).get(_COPY_MARK),
    )


def _numbering(pair: tuple[str, str] | None) -> tuple[Partitioning | None, str | None]:
    try:
        return (parse_transform(*pair) if pair is not None else None), None
    except InvalidInput as problem:
        return None, str(problem)


def _carries_numbers(config: dict[str, Any]) -> bool | None:
    if not config.get("sources") and not config.get("mirror") and not config.get("subject_transform"):
        return any(overlaps(one, "0.>") for one in config.get("subjects") or ())
    return can_store(StreamConfig.from_response(copy.deepcopy(config)), "0.>")  # nats-py changes what it is given


def consumer_facts(info: ConsumerInfo) -> DiagnosedConsumer:
    config = info.config
    is_pinned = config.priority_policy == "pinned_client"
    return DiagnosedConsumer(
        stream=info.stream,
        name=info.name,
        filters=config.filter_subjects or ((config.filter_subject,) if config.filter_subject else ()),
        pin_group=(config.priority_groups or ("",))[0] if is_pinned else None,
        pin_timeout_s=(config.priority_timeout_s or 0.0) if is_pinned else 0.0,
        is_pinned=any(one.pinned_client_id for one in info.priority_groups),
        waiting=info.num_waiting,
        pending=info.num_pending,
        ack_pending=info.num_ack_pending,
        redelivered=info.num_redelivered,
        ack_wait_s=config.ack_wait_s or 30.0,
        replicas=config.num_replicas or 0,
    )


def _queue_transforms(config: ElasticConfig) -> tuple[tuple[str, str], ...]:
    whole = ((">", f"{{{{Partition({config.partitions})}}}}.>"),)
    return tuple((one.filter, one.destination) for one in config.partitioning) or whole


def fleet_facts(
    stream: str, fleet: str, records: dict[str, Any], workers: frozenset[int], now_ms: int
) -> DiagnosedFleet:
    """A fleet by its records. `workers`: those that live; what others claim, they claimed before they died."""
    spec = records.get(SPEC)
    assert isinstance(spec, FleetSpec)
    source = source_from_wire(spec.source)
    table = records.get(TABLE)
    generations = table.generations if isinstance(table, PartitionTable) else ()
    partitions = _partitions(source, table if isinstance(table, PartitionTable) else None)
    is_copied = isinstance(source, HashedPartitions) and source.copy is not None
    claims = [one for one in records.values() if isinstance(one, FleetClaim) and one.held and one.worker in workers]
    recent = [
        one
        for one in records.values()
        if isinstance(one, HistoryEntry) and one.cause in ("emergency", "leader") and now_ms - one.at_ms < _RECENT_MS
    ]
    is_partition = spec.layout == "partition"
    numbers = None
    if isinstance(source, HashedPartitions):
        numbers = generations[0].partitions if generations else source.partitioning.partitions
    return DiagnosedFleet(
        stream=stream,
        fleet=fleet,
        layout=spec.layout,
        is_replicated=spec.state == "replicated",
        reads=copy_name(stream, fleet) if is_copied else stream,
        numbers=numbers,
        partitions=tuple(one.id for one in partitions),
        consumers=frozenset(partition_consumer(fleet, one.id) for one in partitions) if is_partition else frozenset(),
        owned=frozenset(one.partition for one in claims),
        workers=workers,
        lease_s=spec.lease_s,
        emergencies=len(recent),
        is_changing=isinstance(table, PartitionTable) and (bool(table.target) or len(generations) > 1),
    )


def _partitions(source: object, table: PartitionTable | None) -> Sequence[Partition]:
    match source:
        case HashedPartitions():
            if table is not None and table.generations:
                return [one for each in table.generations for one in partitions_of(source, each)]
            return source.resolve().partitions
        case ListedPartitions():
            return source.resolve().partitions
    return partitions_from_entries(table.entries) if table is not None and table.entries else ()


def _now_ms() -> int:
    return int(time.time() * 1000)
