"""Creates and deletes groups, and refuses a group that would share a name or a stream with another one.

Problems of a new group are reported at once: an error if no member could ever get a message, a warning if something
looks wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from nats.js.api import StorageType, StreamInfo, SubjectTransform

from keylane.core.names import check_group_name, check_stream_name
from keylane.core.partitions import PartitionBy, parse_transform
from keylane.core.plans import Plan
from keylane.errors import ApiError, BrokenGroupRecord, GroupConflict, InvalidInput, NotFound, RevisionConflict
from keylane.groups import consumer_spec
from keylane.groups.config import Dialect, ElasticConfig, GroupConfig, Kind, StaticConfig, check_group_filters
from keylane.groups.store import bucket_of, read_any, read_group
from keylane.groups.stream_subjects import check_filters_match, check_partition_numbers
from keylane.jetstream import Connection, KvEntry, change, consumers, existing_stream, streams
from keylane.processing.delayed_retries import delete_retries

_log = logging.getLogger("keylane.groups")

Mappings = Mapping[str, Iterable[int]]

_STREAM_EXISTS_DIFFERENTLY = 10058
_SHOWN = 5


async def create_static(
    connection: Connection,
    stream: str,
    group: str,
    *,
    partitions: int,
    filters: Sequence[str] = (),
    members: Sequence[str] = (),
    mappings: Mappings | None = None,
    dialect: Dialect = "present",
    stop_go_members: bool = False,
) -> StaticConfig:
    """Create a group on a stream whose subjects begin with a partition number. The same group may exist already.

    Members in Go cannot join a group with mappings and two or more filters: pass `stop_go_members` to create it
    nevertheless.
    """
    check_names(stream, group)
    config = StaticConfig(
        partitions=partitions,
        filters=tuple(_no_text(filters, "filters")),
        members=tuple(_no_text(members, "members")),
        mappings=plan_of(mappings),
        dialect=dialect,
    )
    config.check()
    if not config.plan.members:
        raise InvalidInput("a static group never changes, so it needs its members, or mappings, from the start")
    source = await existing_stream(connection, stream)
    _check_partition_count(source.config.subject_transform, partitions, stream)
    if await read_group(connection, "elastic", stream, group) is not None:
        raise GroupConflict(f"stream {stream!r} has an elastic group {group!r}: choose another name")
    await _refuse_shared_durables(connection, stream, group, config)
    if await read_group(connection, "static", stream, group) is None:
        check_group_filters(len(config.filters))
        config.check_consumers()
        refuse_to_stop_go_members(group, config, stop_go_members)
        await check_partition_numbers(connection, group, config, source)
    stored = await _write_record(connection, stream, group, config, source.config.num_replicas or 1)
    assert isinstance(stored, StaticConfig)
    warn_of_idle_members(stream, group, stored)
    return stored


async def create_elastic(
    connection: Connection,
    stream: str,
    group: str,
    *,
    partitions: int,
    partition_by: PartitionBy | str | Sequence[PartitionBy | str] = (),
    max_buffered_messages: int = 0,
    max_buffered_bytes: int = 0,
    members: Sequence[str] = (),
    dialect: Dialect = "present",
) -> ElasticConfig:
    """Create a group on any stream. `partition_by` has the filters and the part of their subjects that is the key.

    Without filters every subject is taken and hashed whole (server 2.12); so is a filter without a `*`. The group may
    exist with the same configuration and any members; the result is its configuration.

    >>> by = PartitionBy("orders.*.*", key=[2])
    >>> await create_elastic(connection, "ORDERS", "billing", partitions=10, partition_by=by, members=["alice", "bob"])
    """
    check_names(stream, group)
    chosen = [partition_by] if isinstance(partition_by, PartitionBy | str) else partition_by
    partitioning = tuple(PartitionBy.of(one).over(partitions) for one in chosen)
    config = ElasticConfig(
        partitions=partitions,
        partitioning=partitioning,
        max_buffered_messages=max_buffered_messages,
        max_buffered_bytes=max_buffered_bytes,
        members=tuple(_no_text(members, "members")),
        dialect=dialect,
    )
    config.check()
    if not partitioning or not all(one.wildcards for one in partitioning):
        connection.require("whole_subject_hash")
    source = await existing_stream(connection, stream)
    if await read_group(connection, "static", stream, group) is not None:
        raise GroupConflict(f"stream {stream!r} has a static group {group!r}: choose another name")
    stored = await read_group(connection, "elastic", stream, group)
    if stored is not None:
        _refuse_difference(stream, group, stored.config, config)
    else:
        check_group_filters(len(config.partitioning))
        config.check_consumers()
        await check_filters_match(connection, group, config, source)
    await _make_queue(connection, stream, group, config, source)
    written = await _write_record(connection, stream, group, config, source.config.num_replicas or 1)
    assert isinstance(written, ElasticConfig)
    warn_of_idle_members(stream, group, written)
    if not written.plan.members and written.members_needed > 1:
        _log.warning(
            "group %r of stream %r: its %s partitions need at least %s members; add them in one step",
            group,
            stream,
            f"{partitions:,}",
            f"{written.members_needed:,}",
        )
    return written


async def delete(
    connection: Connection, stream: str, group: str, *, kind: Kind | None = None, force: bool = False
) -> None:
    """Delete a group: its record first, which ends its members, then its consumers or its queue.

    A record that cannot be read is deleted only with `force`. The consumers of a static group remain then, because
    its members are unknown.
    """
    check_names(stream, group)
    config: StaticConfig | ElasticConfig | None = None
    try:
        config = (await read_any(connection, stream, group, kind)).config
    except BrokenGroupRecord as broken:
        if not force:
            raise
        if kind is None:
            raise InvalidInput(
                "the record cannot be read: say with kind= whether the group is static or elastic"
            ) from (broken)
    kind = config.kind if config is not None else kind
    assert kind is not None
    bucket = bucket_of(connection, kind)
    key = consumer_spec.key_of_group(stream, group)

    async def remove(entry: KvEntry | None) -> None:
        if entry is not None and entry.value is not None:
            await bucket.delete(key, revision=entry.revision)

    await change(lambda: bucket.get(key), remove)
    if isinstance(config, StaticConfig):
        for member in config.plan.members:
            name = consumer_spec.consumer_name(config, group, member)
            await _unless_missing(consumers.delete(connection, stream, name))
    elif kind == "static":
        await _warn_of_consumers(connection, stream, group)
    elif await _sources(connection, consumer_spec.queue_stream(stream, group)) == [stream]:
        await _unless_missing(streams.delete(connection, consumer_spec.queue_stream(stream, group)))
    await delete_retries(connection, stream, group)


async def _warn_of_consumers(connection: Connection, stream: str, group: str) -> None:
    left = [name for name in await consumers.names(connection, stream) if name.startswith(f"{group}-")]
    if left:
        _log.warning(
            "the record of group %r did not say who its members are, so their consumers on stream %r are still there, "
            "among these: %s. Delete those that no other group uses",
            group,
            stream,
            ", ".join(left),
        )


def check_names(stream: str, group: str) -> None:
    check_stream_name(stream)
    check_group_name(group)


def plan_of(mappings: Mappings | None) -> Plan | None:
    return Plan.from_mappings(list(mappings.items())) if mappings is not None else None


def refuse_to_stop_go_members(group: str, config: GroupConfig, yes: bool) -> None:
    """Raise `InvalidInput` if this configuration would stop members in Go and `yes` is false."""
    if config.stops_go_members and not yes:
        raise InvalidInput(
            f"group {group!r} has {len(config.group_filters)} filters: with a mapping its members in Go stop, as the "
            "server refuses their consumers (error 10138). If it has none, say so with stop_go_members=True; else "
            "leave the shares to plan='balanced'"
        )


def warn_of_idle_members(stream: str, group: str, config: GroupConfig) -> None:
    """Log which members own nothing."""
    idle = config.plan.idle
    if not idle:
        return
    _log.warning(
        "group %r of stream %r has %s members for %s partitions: %s %s no partition and only wait%s for another member "
        "to be dropped. More than %s cannot work at once; that number is fixed when a group is created",
        group,
        stream,
        f"{len(config.plan.members):,}",
        f"{config.partitions:,}",
        ", ".join(idle[:_SHOWN]) + (f" and {len(idle) - _SHOWN} more" if len(idle) > _SHOWN else ""),
        "owns" if len(idle) == 1 else "own",
        "s" if len(idle) == 1 else "",
        f"{config.partitions:,}",
    )


# ---- what must not be shared ----------------------------------------------------------------------------


def _check_partition_count(transform: SubjectTransform | None, partitions: int, stream: str) -> None:
    if transform is None or not transform.dest:
        return
    known = parse_transform(transform.src or ">", transform.dest)
    if known is not None and known.partitions != partitions:
        raise InvalidInput(
            f"partitions is {partitions}, but the transform of stream {stream!r} makes {known.partitions} "
            "partitions: they must be equal, or some partitions have no owner"
        )


async def _refuse_shared_durables(connection: Connection, stream: str, group: str, config: StaticConfig) -> None:
    """`a` + `b-c` and `a-b` + `c` would be one durable consumer."""
    ours = {consumer_spec.consumer_name(config, group, member): member for member in config.plan.members}
    for key in await bucket_of(connection, "static").keys(stream):
        other = key.partition(".")[2]
        theirs = await read_group(connection, "static", stream, other) if other != group else None
        for member in theirs.config.plan.members if theirs is not None else ():
            name = consumer_spec.consumer_name(config, other, member)
            if name in ours:
                raise GroupConflict(
                    f"member {ours[name]!r} of group {group!r} and member {member!r} of group {other!r} would share "
                    f"the consumer {name!r}: rename the group or the member"
                )


def _refuse_difference(stream: str, group: str, there: GroupConfig, here: GroupConfig) -> None:
    """Raise `GroupConflict` if the configurations differ in more than the members of an elastic group."""
    if isinstance(there, StaticConfig) and isinstance(here, StaticConfig) and there.same_group(here):
        return
    coming_and_going = ("members", "mappings") if isinstance(here, ElasticConfig) else ()
    for one in fields(here):
        if not one.compare or one.name in coming_and_going:
            continue
        mine, other = getattr(here, one.name), getattr(there, one.name)
        if mine != other:
            raise GroupConflict(
                f"stream {stream!r} has a group {group!r} with another configuration ({one.name} is {other!r} there "
                f"and {mine!r} here): delete it first, or choose another name"
            )


async def _write_record(
    connection: Connection, stream: str, group: str, config: StaticConfig | ElasticConfig, replicas: int
) -> StaticConfig | ElasticConfig:
    """Write the record, and return the configuration that is stored: ours, or the same one that existed."""
    bucket = bucket_of(connection, config.kind)
    await bucket.ensure(replicas=replicas)
    key = consumer_spec.key_of_group(stream, group)
    entry = await bucket.get(key)
    if entry is None or entry.value is None:
        try:
            await bucket.put(key, config.to_json(), revision=entry.revision if entry is not None else 0)
        except RevisionConflict:
            _log.info("group %s was made by somebody else at this moment", key)
        else:
            return config
    stored = await read_any(connection, stream, group, config.kind)
    _refuse_difference(stream, group, stored.config, config)
    return stored.config


# ---- the work queue of an elastic group -----------------------------------------------------------------


async def _make_queue(
    connection: Connection, stream: str, group: str, config: ElasticConfig, source: StreamInfo
) -> None:
    """Create the queue, unless the group has it already."""
    queue = consumer_spec.queue_stream(stream, group)
    sources = await _sources(connection, queue)
    if sources is not None and sources != [stream]:
        # `a` + `b-c` and `a-b` + `c` would be one queue stream.
        raise GroupConflict(
            f"group {group!r} on stream {stream!r} needs the stream name {queue!r}, which is taken"
            + (f" by a group on stream {sources[0]!r}" if sources else "")
            + ": choose another group name"
        )
    if sources is not None and await read_group(connection, "elastic", stream, group) is not None:
        return
    try:
        await streams.create_json(connection, _queue_config(queue, stream, config, source))
    except ApiError as error:
        if error.err_code != _STREAM_EXISTS_DIFFERENTLY:
            raise
        raise GroupConflict(
            f"group {group!r} on stream {stream!r} needs the stream {queue!r}, which is there with other settings: "
            "delete that stream first, or choose another group name"
        ) from error


def _queue_config(queue: str, stream: str, config: ElasticConfig, source: StreamInfo) -> dict[str, Any]:
    transforms = [{"src": one.filter, "dest": one.destination} for one in config.partitioning] or [
        {"src": ">", "dest": f"{{{{Partition({config.partitions})}}}}.>"}
    ]
    return {
        "name": queue,
        "retention": "workqueue",
        "discard": "new",
        "storage": StorageType(source.config.storage or "file").value,
        "num_replicas": source.config.num_replicas or 1,
        "max_msgs": config.max_buffered_messages or -1,
        "max_bytes": config.max_buffered_bytes or -1,
        "allow_direct": True,
        "sources": [{"name": stream, "subject_transforms": transforms}],
    }


async def _sources(connection: Connection, queue: str) -> list[str] | None:
    """The streams that this one copies from; None if it does not exist."""
    try:
        info = await streams.info(connection, queue)
    except NotFound:
        return None
    return [source.name for source in info.config.sources or ()]


# ---- small things ---------------------------------------------------------------------------------------


def _no_text(values: Sequence[str], what: str) -> Sequence[str]:
    if isinstance(values, str):
        raise InvalidInput(f"{what} is {values!r}, one text: give a list")
    return values


async def _unless_missing(call: Awaitable[None]) -> None:
    try:
        await call
    except NotFound as error:
        _log.debug("was gone already: %s", error)
