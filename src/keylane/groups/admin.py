"""Making, looking at and changing groups. Nothing here reads messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from keylane.core.names import check_group_name, check_member_name, check_stream_name
from keylane.core.partitions import Partitioning, parse_transform
from keylane.core.plans import Plan, balanced, sticky
from keylane.errors import (
    GroupConflict,
    GroupError,
    InvalidInput,
    NotAMember,
    NotFound,
    RevisionConflict,
)
from keylane.groups import shape
from keylane.groups.config import Dialect, ElasticConfig, GroupConfig, StaticConfig
from keylane.groups.store import (
    StoredGroup,
    change_elastic,
    elastic_bucket,
    read_any,
    read_elastic,
    read_static,
    static_bucket,
)
from keylane.jetstream import consumers, streams
from keylane.jetstream.connection import Connection
from keylane.jetstream.consumers import ConsumerInfo
from keylane.jetstream.kv import Bucket

PlanName = Literal["balanced", "sticky"]
Mappings = Mapping[str, Iterable[int]]


@dataclass(frozen=True, slots=True)
class GroupName:
    """A group that exists."""

    stream: str
    group: str
    kind: Literal["static", "elastic"]


# ---- make ---------------------------------------------------------------------------------------------


async def create_static(
    connection: Connection,
    stream: str,
    group: str,
    *,
    max_members: int,
    filters: Sequence[str] = (),
    members: Sequence[str] = (),
    mappings: Mappings | None = None,
    dialect: Dialect = "present",
) -> StaticConfig:
    """Create a group on a stream whose subjects begin with a partition number. The identical group is fine."""
    config = StaticConfig(
        max_members=max_members,
        filters=tuple(filters),
        members=tuple(members),
        mappings=_plan(mappings),
        dialect=dialect,
    )
    _check_names(stream, group)
    config.check()
    if not config.plan.members:
        raise InvalidInput("a static group never changes, so it needs its members, or mappings, from the start")
    info = await streams.info(connection, stream)
    _check_partition_count(info.config.subject_transform, max_members, stream)
    for other in await _groups_in(static_bucket(connection), stream):
        if other != group:
            await _check_durables(connection, stream, group, config, other)
    await _write_new(
        static_bucket(connection), stream, group, config.to_json(), info.config.num_replicas or 1,
        lambda data: StaticConfig.from_json(data, group) == config,
    )  # fmt: skip
    return config


async def create_elastic(
    connection: Connection,
    stream: str,
    group: str,
    *,
    max_members: int,
    partitioning: Sequence[tuple[str, Sequence[int]]] = (),
    max_buffered_messages: int = 0,
    max_buffered_bytes: int = 0,
    members: Sequence[str] = (),
    dialect: Dialect = "present",
) -> ElasticConfig:
    """Create a group on any stream: `partitioning` has filters with the `*` wildcards that make up the key.

    Without filters every subject is taken and hashed whole (server 2.12). The identical group is fine.

    >>> await create_elastic(connection, "ORDERS", "billing", max_members=10, partitioning=[("orders.*.*", [2])])
    """
    _check_names(stream, group)
    config = ElasticConfig(
        max_members=max_members,
        partitioning=tuple(Partitioning(one, tuple(wildcards), max_members) for one, wildcards in partitioning),
        max_buffered_messages=max_buffered_messages,
        max_buffered_bytes=max_buffered_bytes,
        members=tuple(members),
        dialect=dialect,
    )
    config.check()
    if not partitioning:
        connection.require("whole_subject_hash")
    source = await streams.info(connection, stream)
    replicas = source.config.num_replicas or 1
    await _refuse_foreign_queue(connection, stream, group)
    await _write_new(
        elastic_bucket(connection), stream, group, config.to_json(), replicas,
        lambda data: ElasticConfig.from_json(data, group).same_but_owners(config),
    )  # fmt: skip
    await _create_queue(connection, stream, group, config, replicas, str(source.config.storage or "file"))
    stored = await read_elastic(connection, stream, group)
    assert stored is not None
    assert isinstance(stored.config, ElasticConfig)
    return stored.config


async def delete(connection: Connection, stream: str, group: str) -> None:
    """Delete a group: its record first, which ends its members, then its consumers or its queue."""
    stored = await _stored(connection, stream, group)
    key = shape.key_of_group(stream, group)
    if isinstance(stored.config, StaticConfig):
        await static_bucket(connection).delete(key, revision=stored.revision)
        for member in stored.config.plan.members:
            await _ignore_missing(
                consumers.delete(connection, stream, shape.consumer_name(stored.config, group, member))
            )
    else:
        await elastic_bucket(connection).delete(key, revision=stored.revision)
        await _ignore_missing(streams.delete(connection, shape.queue_stream(stream, group)))


# ---- look ---------------------------------------------------------------------------------------------


async def get_config(connection: Connection, stream: str, group: str) -> StaticConfig | ElasticConfig:
    return (await _stored(connection, stream, group)).config


async def list_groups(connection: Connection, stream: str) -> list[GroupName]:
    """The groups of a stream, static ones first."""
    check_stream_name(stream)
    static = [GroupName(stream, one, "static") for one in await _groups_in(static_bucket(connection), stream)]
    elastic = [GroupName(stream, one, "elastic") for one in await _groups_in(elastic_bucket(connection), stream)]
    return [*static, *elastic]


async def active_members(connection: Connection, stream: str, group: str) -> list[str]:
    """Members that have an instance pinned or waiting now."""
    stored = await _stored(connection, stream, group)
    active = []
    for member in stored.config.plan.members:
        info = await _consumer(connection, stored.config, stream, group, member)
        if info is not None and (info.num_waiting or any(one.pinned_client_id for one in info.priority_groups)):
            active.append(member)
    return active


async def member_info(connection: Connection, stream: str, group: str, member: str) -> ConsumerInfo | None:
    """The state of a member's consumer; None while no instance has made it."""
    stored = await _stored(connection, stream, group)
    _check_listed(stored.config, group, member)
    return await _consumer(connection, stored.config, stream, group, member)


async def step_down(connection: Connection, stream: str, group: str, member: str) -> None:
    """Let another instance of the member become active."""
    stored = await _stored(connection, stream, group)
    _check_listed(stored.config, group, member)
    await consumers.unpin(
        connection,
        shape.consumer_stream(stored.config, stream, group),
        shape.consumer_name(stored.config, group, member),
        stored.config.priority_group(member),
    )


# ---- change (elastic only) ----------------------------------------------------------------------------


async def add_members(
    connection: Connection, stream: str, group: str, members: Sequence[str], *, plan: PlanName = "balanced"
) -> ElasticConfig:
    """Add members. `plan="sticky"` moves the fewest partitions and stores the result as mappings."""
    return await _change_members(connection, stream, group, lambda now: [*now, *members], members, plan)


async def drop_members(
    connection: Connection, stream: str, group: str, members: Sequence[str], *, plan: PlanName = "balanced"
) -> ElasticConfig:
    gone = set(members)
    return await _change_members(
        connection, stream, group, lambda now: [one for one in now if one not in gone], members, plan
    )


async def set_mapping(connection: Connection, stream: str, group: str, mappings: Mappings) -> ElasticConfig:
    """Replace the members, or the mapping there is, by a mapping of your own."""
    _check_names(stream, group)
    return await change_elastic(connection, stream, group, lambda config: config.with_owners(mappings=_plan(mappings)))


async def delete_mapping(connection: Connection, stream: str, group: str) -> ElasticConfig:
    """Remove the mapping. Nobody owns a partition then, until members are added or a mapping is set."""
    _check_names(stream, group)
    return await change_elastic(connection, stream, group, lambda config: config.with_owners())


async def _change_members(
    connection: Connection,
    stream: str,
    group: str,
    choose: Callable[[Sequence[str]], Sequence[str]],
    named: Sequence[str],
    plan: PlanName,
) -> ElasticConfig:
    _check_names(stream, group)
    if not named:
        raise InvalidInput("no member named: give at least one")
    for member in named:
        check_member_name(member)
    if plan not in ("balanced", "sticky"):
        raise InvalidInput(f"plan is {plan!r}: use balanced or sticky")

    def decide(config: ElasticConfig) -> ElasticConfig:
        if plan == "sticky":
            members = list(dict.fromkeys(choose(config.plan.members)))
            return config.with_owners(mappings=sticky(config.plan, members, config.max_members))
        if config.mappings is not None:
            raise GroupError(
                f"group {group!r} has a mapping, which names its members: use plan='sticky', or set_mapping, "
                "or delete_mapping first"
            )
        return config.with_owners(members=list(dict.fromkeys(choose(config.members))))

    return await change_elastic(connection, stream, group, decide)


def planned(config: GroupConfig, members: Sequence[str], plan: PlanName) -> Plan:
    """The plan that a change to these members would give: for a dry run."""
    if plan == "sticky":
        return sticky(config.plan, members, config.max_members)
    return balanced(members, config.max_members)


# ---- small things -------------------------------------------------------------------------------------


def _check_names(stream: str, group: str) -> None:
    check_stream_name(stream)
    check_group_name(group)


def _plan(mappings: Mappings | None) -> Plan | None:
    return Plan.from_mappings(list(mappings.items())) if mappings is not None else None


def _check_listed(config: GroupConfig, group: str, member: str) -> None:
    if not config.has_member(member):
        raise NotAMember(
            f"group {group!r} does not list member {member!r}; it lists {', '.join(config.plan.members) or 'nobody'}"
        )


def _check_partition_count(transform: Any, max_members: int, stream: str) -> None:
    if transform is None or not transform.dest:
        return
    known = parse_transform(transform.src or ">", transform.dest)
    if known is not None and known.partitions != max_members:
        raise InvalidInput(
            f"max_members is {max_members}, but the transform of stream {stream!r} makes {known.partitions} partitions: "
            "they must be equal, or some partitions have no owner"
        )


async def _check_durables(connection: Connection, stream: str, group: str, config: StaticConfig, other: str) -> None:
    """`a` + `b-c` and `a-b` + `c` would be one durable consumer."""
    theirs = await read_static(connection, stream, other)
    if theirs is None:
        return
    names = {shape.consumer_name(theirs.config, other, member): member for member in theirs.config.plan.members}
    for member in config.plan.members:
        if shape.consumer_name(config, group, member) in names:
            raise GroupConflict(
                f"member {member!r} of group {group!r} and member {names[shape.consumer_name(config, group, member)]!r} "
                f"of group {other!r} would share one consumer name: rename the group or the member"
            )


async def _refuse_foreign_queue(connection: Connection, stream: str, group: str) -> None:
    """`a` + `b-c` and `a-b` + `c` would be one queue stream."""
    queue = shape.queue_stream(stream, group)
    try:
        info = await streams.info(connection, queue)
    except NotFound:
        return
    sources = [source.name for source in info.config.sources or ()]
    if sources != [stream]:
        raise GroupConflict(
            f"group {group!r} on stream {stream!r} needs the stream name {queue!r}, which is taken"
            + (f" by a group on stream {sources[0]!r}" if sources else "")
            + ": choose another group name"
        )


async def _write_new(
    bucket: Bucket, stream: str, group: str, value: bytes, replicas: int, same: Callable[[bytes], bool]
) -> None:
    await bucket.ensure(replicas=replicas)
    key = shape.key_of_group(stream, group)
    entry = await bucket.get(key)
    if entry is None or entry.value is None:
        try:
            await bucket.put(key, value, revision=entry.revision if entry is not None else 0)
        except RevisionConflict:
            entry = await bucket.get(key)
        else:
            return
    if entry is None or entry.value is None or not same(entry.value):
        raise GroupConflict(
            f"stream {stream!r} has a group {group!r} with another configuration: delete it first, or choose another name"
        )


async def _create_queue(
    connection: Connection, stream: str, group: str, config: ElasticConfig, replicas: int, storage: str
) -> None:
    transforms = [{"src": one.filter, "dest": one.destination} for one in config.partitioning] or [
        {"src": ">", "dest": f"{{{{Partition({config.max_members})}}}}.>"}
    ]
    queue = shape.queue_stream(stream, group)
    await connection.api.request(
        f"STREAM.CREATE.{queue}",
        {
            "name": queue,
            "retention": "workqueue",
            "discard": "new",
            "storage": storage,
            "num_replicas": replicas,
            "max_msgs": config.max_buffered_messages or -1,
            "max_bytes": config.max_buffered_bytes or -1,
            "allow_direct": True,
            "sources": [{"name": stream, "subject_transforms": transforms}],
        },
    )


async def _stored(connection: Connection, stream: str, group: str) -> StoredGroup:
    _check_names(stream, group)
    return await read_any(connection, stream, group)


async def _groups_in(bucket: Bucket, stream: str) -> list[str]:
    return [key.partition(".")[2] for key in await bucket.keys(stream)]


async def _consumer(
    connection: Connection, config: StaticConfig | ElasticConfig, stream: str, group: str, member: str
) -> ConsumerInfo | None:
    try:
        return await consumers.info(
            connection,
            shape.consumer_stream(config, stream, group),
            shape.consumer_name(config, group, member),
        )
    except NotFound:
        return None


async def _ignore_missing(call: Any) -> None:
    try:
        await call
    except NotFound:
        return
