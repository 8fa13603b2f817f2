"""The present state of what a configuration file names, and the steps of a plan on a server.

Reads each resource with its version, and does a step only on the version that it was planned for: records by
compare-and-set; the configuration of a stream, for which servers have none, is read and compared just before.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from keylane.core.configuration_difference import ConfigurationPlan, PlannedStep, PresentResource, difference
from keylane.core.configuration_file import (
    ResourceKey,
    WantedResource,
    normal_mapping,
    normal_source,
    read_configuration,
    wire_of_source,
)
from keylane.core.fleet_names import partition_consumer, worker_in
from keylane.core.fleet_partitions import HashedPartitions, source_from_wire
from keylane.core.fleet_records import SPEC, FleetSpec, read_spec, to_json
from keylane.core.fleet_state import choose_state
from keylane.core.partitions import PartitionBy, Partitioning, parse_transform
from keylane.core.plans import Plan
from keylane.errors import ApiError, InvalidInput, NotFound, RevisionConflict
from keylane.fleet.collisions import refuse_collisions
from keylane.fleet.membership import check_stream
from keylane.fleet.partition_table import FleetPartitions
from keylane.fleet.store import FLEET_BUCKET
from keylane.fleet.stream_copy import copy_name, ensure_copy
from keylane.groups import (
    ElasticConfig,
    StaticConfig,
    create_elastic,
    create_static,
    list_groups,
    queue_stream,
    set_mapping,
)
from keylane.groups import delete as delete_group
from keylane.groups.consumer_spec import key_of_group
from keylane.groups.store import StoredGroup, bucket_of, read_group
from keylane.jetstream import Bucket, Connection, consumers, existing_stream, parse_time, streams
from keylane.operations.fleet_leases import live_workers
from keylane.processing.dead_letters import dead_letter_stream, ensure_dead_letter_stream

_NANOSECONDS = 1_000_000_000
_EXISTS_DIFFERENTLY = 10058
_DUPLICATE_WINDOW_S = 120.0
_RETENTIONS = {"limits": "limits", "interest": "interest", "work": "workqueue"}

# Field of a file -> field of the server, and how a value is written there and read from there.
_LIMITS: dict[str, str] = {
    "max_messages": "max_msgs",
    "max_bytes": "max_bytes",
    "max_messages_per_subject": "max_msgs_per_subject",
    "max_message_size": "max_msg_size",
    "max_consumers": "max_consumers",
}
_DURATIONS: dict[str, str] = {"max_age": "max_age", "duplicate_window": "duplicate_window"}
_PLAIN: dict[str, tuple[str, Any]] = {
    "storage": ("storage", "file"),
    "replicas": ("num_replicas", 1),
    "discard": ("discard", "old"),
    "compression": ("compression", "none"),
    "description": ("description", ""),
}


def read_configuration_file(path: Path) -> dict[ResourceKey, WantedResource]:
    """What a TOML file wants. Raises `InvalidInput`."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"configuration {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"configuration {str(path)!r} is not TOML: {error}") from error
    try:
        wanted = read_configuration(tables)
    except InvalidInput as problem:
        raise InvalidInput(f"configuration {str(path)!r}: {problem}") from None
    if not wanted:
        raise InvalidInput(f"configuration {str(path)!r} names no stream: begin with [streams.ORDERS]")
    return wanted


async def make_plan(connection: Connection, wanted: Mapping[ResourceKey, WantedResource]) -> ConfigurationPlan:
    """What differs between the server and the file now."""
    present = {key: found for key in wanted if (found := await _present(connection, key)) is not None}
    for key, resource in wanted.items():
        if key.kind == "stream" and resource.fields is None and key in present:  # its readers must go too
            present |= {one: found async for one, found in _readers(connection, key.stream) if one not in present}
    return difference(present, wanted)


async def perform(
    connection: Connection,
    plan: ConfigurationPlan,
    wanted: Mapping[ResourceKey, WantedResource],
    done: Callable[[PlannedStep], None],
) -> None:
    """Do all steps in order. Raises `RevisionConflict` at the first one that no longer fits, and does no more."""
    for step in plan.steps:
        there = await _present(connection, step.key)
        if (there.version if there is not None else "") != step.version:
            raise _conflict(step.key)
        fields = wanted[step.key].fields or {}
        match step.action:
            case "create":
                await _create(connection, step.key, fields)
            case "change":
                await _change(connection, step, fields)
            case "delete":
                await _delete(connection, step.key)
        done(step)


# ---- what is there -------------------------------------------------------------------------------------------


async def _present(connection: Connection, key: ResourceKey) -> PresentResource | None:
    match key.kind:
        case "stream":
            return await _present_stream(connection, key, key.stream)
        case "dead letters":
            return await _present_stream(connection, key, dead_letter_stream(key.stream))
        case "fleet":
            return await _present_fleet(connection, key)
        case "static" | "elastic":
            stored = await read_group(connection, key.kind, key.stream, key.name)
            return await _present_group(connection, key, stored) if stored is not None else None


async def _readers(connection: Connection, stream: str) -> AsyncIterator[tuple[ResourceKey, PresentResource]]:
    for one in await list_groups(connection, stream):
        key = ResourceKey(one.kind, stream, one.group)
        if (found := await _present(connection, key)) is not None:
            yield key, found
    for key in await _fleet_keys(connection, stream):
        if (found := await _present(connection, key)) is not None:
            yield key, found


async def _fleet_keys(connection: Connection, stream: str) -> list[ResourceKey]:
    found = await Bucket(connection, FLEET_BUCKET).get_matching(f"{stream}.*.{SPEC}")
    return [ResourceKey("fleet", stream, one.key.split(".")[1]) for one in found if one.value is not None]


async def _present_stream(connection: Connection, key: ResourceKey, name: str) -> PresentResource | None:
    try:
        wire = await streams.info_json(connection, name)
    except NotFound:
        return None
    state = wire["state"]
    fleets: list[str] = []
    numbered: list[str] = []
    if key.kind == "stream":
        numbered = [f"static group {one.group}" for one in await list_groups(connection, name) if one.kind == "static"]
        for fleet in await _fleet_keys(connection, name):
            spec = await _spec(connection, fleet)
            if spec is not None and spec.source.get("kind") == "hashed" and "copy" not in spec.source:
                fleets.append(fleet.name)
        numbered += [f"fleet {fleet}" for fleet in fleets]
    oldest_s = 0.0
    if state["messages"] and "ts" in wire:
        oldest_s = (parse_time(wire["ts"]) - parse_time(state["first_ts"])).total_seconds()
    return PresentResource(
        key=key,
        fields=stream_fields(wire["config"]),
        version=_digest(wire["config"], wire["created"]),
        messages=state["messages"],
        bytes=state["bytes"],
        oldest_s=oldest_s,
        numbered_readers=tuple(numbered),
        fleets=tuple(fleets),
    )


def stream_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """A stream's configuration on the wire as fields of a file."""
    transform = config.get("subject_transform") or {}
    numbering = _numbering(transform.get("src") or ">", transform["dest"]) if transform.get("dest") else None
    retentions = {there: here for here, there in _RETENTIONS.items()}
    return {
        "subjects": tuple(sorted(config.get("subjects") or ())),
        "partition_by": numbering.filter if numbering is not None else None,
        "key": numbering.wildcards if numbering is not None else None,
        "partitions": numbering.partitions if numbering is not None else None,
        "retention": retentions.get(config.get("retention", "limits")),
        **{name: max(config.get(there) or 0, 0) for name, there in _LIMITS.items()},
        **{name: (config.get(there) or 0) / _NANOSECONDS for name, there in _DURATIONS.items()},
        **{name: config.get(there) or default for name, (there, default) in _PLAIN.items()},
    }


def _numbering(source: str, destination: str) -> Partitioning | None:
    try:
        return parse_transform(source, destination)
    except InvalidInput:
        return None


def stream_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file as parts of a stream's configuration on the wire; only those that are given."""
    wire: dict[str, Any] = {}
    if "subjects" in fields:
        wire["subjects"] = list(fields["subjects"])
    if fields.get("partition_by"):
        by = Partitioning(fields["partition_by"], tuple(fields["key"]), fields["partitions"])
        wire["subject_transform"] = {"src": by.filter, "dest": by.destination}
    if "retention" in fields:
        wire["retention"] = _RETENTIONS[fields["retention"]]
    wire |= {there: fields[name] or -1 for name, there in _LIMITS.items() if name in fields}
    wire |= {there: round(fields[name] * _NANOSECONDS) for name, there in _DURATIONS.items() if name in fields}
    return wire | {there: fields[name] for name, (there, _) in _PLAIN.items() if name in fields}


async def _present_group(connection: Connection, key: ResourceKey, stored: StoredGroup) -> PresentResource:
    config, messages = stored.config, 0
    fields: dict[str, Any] = {
        "partitions": config.partitions,
        "members": tuple(sorted(set(config.members))),
        "mapping": normal_mapping(config.mappings) if config.mappings is not None else None,
    }
    if isinstance(config, StaticConfig):
        fields["filters"] = config.filters
    if isinstance(config, ElasticConfig):
        fields["partition_by"] = tuple((one.filter, one.wildcards) for one in config.partitioning)
        fields["max_buffered_messages"] = config.max_buffered_messages
        fields["max_buffered_bytes"] = config.max_buffered_bytes
        with suppress(NotFound):
            messages = (await streams.state(connection, queue_stream(key.stream, key.name))).messages
    return PresentResource(key=key, fields=fields, version=_digest(*stored.version), messages=messages)


async def _spec(connection: Connection, key: ResourceKey) -> FleetSpec | None:
    entry = await Bucket(connection, FLEET_BUCKET).get(f"{key.stream}.{key.name}.{SPEC}")
    return read_spec(entry.value) if entry is not None and entry.value is not None else None


async def _present_fleet(connection: Connection, key: ResourceKey) -> PresentResource | None:
    bucket = Bucket(connection, FLEET_BUCKET)
    entry = await bucket.get(f"{key.stream}.{key.name}.{SPEC}")
    if entry is None or entry.value is None:
        return None
    spec = read_spec(entry.value)
    fields = normal_source(spec.source)
    source = source_from_wire(spec.source)
    if isinstance(source, HashedPartitions):
        known = FleetPartitions(connection, key.stream, key.name, source)
        await known.read()
        fields["partitions"] = known.table.target or known.table.generations[-1].partitions
    return PresentResource(
        key=key,
        fields=fields | {"lease_s": spec.lease_s, "layout": spec.layout, "acks": spec.acks, "state": spec.state},
        version=_digest(entry.revision, entry.written),
        workers=len(await live_workers(connection, key.stream, key.name, spec.lease_s)),
    )


def _conflict(key: ResourceKey) -> RevisionConflict:
    return RevisionConflict(f"{key} was changed by somebody else since the plan was made: plan again")


def _digest(*parts: Any) -> str:
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


# ---- what is done --------------------------------------------------------------------------------------------


async def _create(connection: Connection, key: ResourceKey, fields: Mapping[str, Any]) -> None:
    match key.kind:
        case "stream":
            await _create_stream(connection, key, fields)
        case "dead letters":
            await ensure_dead_letter_stream(connection, key.stream, like=key.stream)
            await _update_stream(connection, dead_letter_stream(key.stream), fields)
        case "static":
            mapping = fields.get("mapping")
            await create_static(
                connection,
                key.stream,
                key.name,
                partitions=fields["partitions"],
                filters=fields.get("filters", ()),
                members=fields.get("members", ()),
                mappings=dict(mapping) if mapping is not None else None,
                stop_go_members=True,  # the plan has refused it unless the file says so
            )
        case "elastic":
            await create_elastic(
                connection,
                key.stream,
                key.name,
                partitions=fields["partitions"],
                partition_by=[PartitionBy(one, key=at) for one, at in fields.get("partition_by", ())],
                max_buffered_messages=fields.get("max_buffered_messages", 0),
                max_buffered_bytes=fields.get("max_buffered_bytes", 0),
                members=fields.get("members", ()),
            )
            if fields.get("mapping") is not None:
                await set_mapping(connection, key.stream, key.name, dict(fields["mapping"]), stop_go_members=True)
        case "fleet":
            await _create_fleet(connection, key, fields)


async def _create_stream(connection: Connection, key: ResourceKey, fields: Mapping[str, Any]) -> None:
    config = {"name": key.stream, "storage": "file", "allow_direct": True, **stream_config(fields)}
    if "duplicate_window" not in fields and fields.get("max_age"):
        config["duplicate_window"] = round(min(fields["max_age"], _DUPLICATE_WINDOW_S) * _NANOSECONDS)
    try:
        await streams.create_json(connection, config)
    except ApiError as error:
        if error.err_code != _EXISTS_DIFFERENTLY:
            raise
        raise _conflict(key) from error


async def _update_stream(connection: Connection, name: str, fields: Mapping[str, Any]) -> None:
    config = (await streams.info_json(connection, name))["config"]
    await streams.update_json(connection, {**config, **stream_config(fields)})


async def _create_fleet(connection: Connection, key: ResourceKey, fields: Mapping[str, Any]) -> None:
    """As its first worker would, which then finds it."""
    info = await existing_stream(connection, key.stream)
    replicas = info.config.num_replicas or 1
    bucket = Bucket(connection, FLEET_BUCKET)
    await bucket.ensure(replicas=replicas)
    source = source_from_wire(wire_of_source(fields))
    known = FleetPartitions(connection, key.stream, key.name, source)
    config, layout = info.config, fields.get("layout", "partition")
    if isinstance(source, HashedPartitions) and source.copy is not None:
        copied = await ensure_copy(connection, info.config, key.name, source, is_new=True)
        config = (await streams.info(connection, copied)).config
    check_stream(config, known)
    names = [partition_consumer(key.name, one.id) for one in known.current]
    if layout == "worker":
        names = [f"{key.name}-{number}" for number in range(FleetSpec(source={}).pool)]
    await refuse_collisions(connection, key.stream, key.name, names)
    state = "replicated" if layout == "worker" else choose_state(replicas, len(names))
    spec = FleetSpec(
        source=source.to_wire(),
        prefix=key.name,
        lease_s=fields.get("lease_s", FleetSpec(source={}).lease_s),
        layout=layout,
        acks=fields.get("acks", "message"),
        state=fields.get("state", state),
    )
    path = f"{key.stream}.{key.name}.{SPEC}"
    entry = await bucket.get(path)
    await bucket.put(path, to_json(spec), revision=entry.revision if entry is not None else 0)


async def _change(connection: Connection, step: PlannedStep, fields: Mapping[str, Any]) -> None:
    key = step.key
    match key.kind:
        case "stream":
            await _update_stream(connection, key.stream, fields)
        case "dead letters":
            await _update_stream(connection, dead_letter_stream(key.stream), fields)
        case "elastic":
            await _change_owners(connection, step, fields)
        case "static" | "fleet":
            raise AssertionError(f"{key}: the plan refuses every change of it")


async def _change_owners(connection: Connection, step: PlannedStep, fields: Mapping[str, Any]) -> None:
    key = step.key
    stored = await read_group(connection, "elastic", key.stream, key.name)
    if stored is None or _digest(*stored.version) != step.version:
        raise _conflict(key)
    assert isinstance(stored.config, ElasticConfig)
    mapping = fields.get("mapping")
    changed = stored.config.with_owners(
        members=fields.get("members", ()), mappings=Plan.from_mappings(mapping) if mapping is not None else None
    )
    await bucket_of(connection, "elastic").put(
        key_of_group(key.stream, key.name), changed.to_json(), revision=stored.revision
    )


async def _delete(connection: Connection, key: ResourceKey) -> None:
    match key.kind:
        case "stream":
            await streams.delete(connection, key.stream)
        case "dead letters":
            await streams.delete(connection, dead_letter_stream(key.stream))
        case "static" | "elastic":
            await delete_group(connection, key.stream, key.name, kind=key.kind)
        case "fleet":
            await _delete_fleet(connection, key)


async def _delete_fleet(connection: Connection, key: ResourceKey) -> None:
    """Its spec first, so that no worker joins; then its consumers or its copy, and its other records."""
    bucket = Bucket(connection, FLEET_BUCKET)
    spec = await _spec(connection, key)
    entries = await bucket.entries(f"{key.stream}.{key.name}")
    own = f"{key.stream}.{key.name}.{SPEC}"
    for entry in sorted(entries, key=lambda one: one.key != own):
        if entry.value is not None:
            await bucket.delete(entry.key, revision=entry.revision)
        if entry.key == own and spec is not None:  # the record of its partitions is still there
            await _delete_consumers(connection, key, spec)


async def _delete_consumers(connection: Connection, key: ResourceKey, spec: FleetSpec) -> None:
    if "copy" in spec.source:
        await streams.delete(connection, copy_name(key.stream, key.name))
        return
    known = FleetPartitions(connection, key.stream, key.name, source_from_wire(spec.source))
    await known.read()
    ours = {partition_consumer(key.name, one.id) for one in known.current}
    for name in await consumers.names(connection, key.stream):
        if name in ours or (spec.layout == "worker" and worker_in(name, key.name) is not None):
            await consumers.delete(connection, key.stream, name)
