"""A snapshot of a group: its configuration, its members' consumers, its queue; as values and as JSON objects.

Takes a fixed number of requests, however many members the group has: the record, the stream, and the consumers as one
paged list. Changes nothing, prints nothing, and does not load rich: programs that ask often wait less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nats.js.api import StreamInfo

from keylane.cli.command import pin_of
from keylane.cli.formatting import as_utc
from keylane.core.plans import Plan
from keylane.errors import BrokenGroupRecord, NotFound, PermissionDenied
from keylane.groups import ElasticConfig, RetryCounts, StaticConfig, get_config, list_groups, retry_counts
from keylane.groups.config import Kind
from keylane.groups.consumer_spec import consumer_name, consumer_stream
from keylane.groups.presence import RunningInstance, running_instances
from keylane.groups.store import read_group
from keylane.jetstream import Connection, ConsumerInfo, consumers, streams

ListedGroup = StaticConfig | ElasticConfig | BrokenGroupRecord
State = Literal["active", "waiting", "absent", "leaving"]


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """A member, its partitions in the plan, and its consumer if an instance has created one."""

    member: str
    partitions: tuple[int, ...]
    info: ConsumerInfo | None
    listed: bool = True
    instance: RunningInstance | None = None
    """The process of the pinned instance, if it answered."""

    @property
    def state(self) -> State:
        """`active`: an instance is pinned. `waiting`: instances pull and none is pinned yet. `absent`: no instance."""
        if not self.listed:
            return "leaving"
        if self.info is None:
            return "absent"
        pin = pin_of(self.info)
        if pin is not None and pin.pinned_client_id is not None:
            return "active"
        return "waiting" if self.info.num_waiting else "absent"

    @property
    def covered(self) -> tuple[int, ...] | None:
        """The partitions that its consumer reads now. During a change they differ from those of the plan."""
        if self.info is None:
            return None
        config = self.info.config
        filters = config.filter_subjects or ((config.filter_subject,) if config.filter_subject else ())
        numbers = {one.partition(".")[0] for one in filters}
        return tuple(sorted(int(number) for number in numbers if number.isdecimal()))


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The work queue of an elastic group. A limit of 0 means no limit."""

    stream: str
    messages: int
    bytes: int
    max_messages: int
    max_bytes: int
    source_lag: int
    """Roughly how many messages of the source are not copied yet, as the server counts them."""

    @property
    def fill(self) -> float | None:
        """How full it is, 0 to 1; None without a limit."""
        shares = [
            held / limit for held, limit in ((self.messages, self.max_messages), (self.bytes, self.max_bytes)) if limit
        ]
        return min(max(shares), 1.0) if shares else None


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """A group as it is at this moment. `queue` is None for a static group, or if the queue is gone."""

    stream: str
    group: str
    config: StaticConfig | ElasticConfig
    members: tuple[MemberSnapshot, ...]
    queue: QueueSnapshot | None
    stream_exists: bool
    retries: RetryCounts | None = None
    """None: no message of the group waits for a delayed retry."""

    @property
    def unowned(self) -> tuple[int, ...]:
        return unowned_partitions(self.config)


def unowned_partitions(config: StaticConfig | ElasticConfig) -> tuple[int, ...]:
    """The partitions whose messages no member gets."""
    owned = set(config.plan.partitions)
    return tuple(one for one in range(config.partitions) if one not in owned)


async def config_of(connection: Connection, kind: Kind, stream: str, group: str) -> StaticConfig | ElasticConfig:
    """The configuration of a group of this kind. Raises `NoSuchGroup` with the names that exist."""
    return await get_config(connection, stream, group, kind=kind)


async def groups_of(connection: Connection, kind: Kind, stream: str | None) -> dict[tuple[str, str], ListedGroup]:
    """All groups of this kind, of one stream or of all; one that cannot be read does not hide the others."""
    found: dict[tuple[str, str], ListedGroup] = {}
    for one in await list_groups(connection, stream):
        if one.kind != kind:
            continue
        try:
            stored = await read_group(connection, kind, one.stream, one.group)
        except BrokenGroupRecord as broken:
            found[one.stream, one.group] = broken
        else:
            if stored is not None:
                found[one.stream, one.group] = stored.config
    if not found and stream is not None:
        await streams.info(connection, stream)  # raises if it is the stream that does not exist
    return found


async def read_snapshot(connection: Connection, kind: Kind, stream: str, group: str) -> GroupSnapshot:
    """Everything about a group of this kind, as it is now."""
    config = await config_of(connection, kind, stream, group)
    where = consumer_stream(config, stream, group)
    infos: dict[str, ConsumerInfo] = {}
    about: StreamInfo | None = None
    try:
        about = await streams.info(connection, where)
        infos = {info.name: info async for info in consumers.list_all(connection, where)}
    except NotFound:
        about = None
    pins = {pin: name for name, info in infos.items() if (pin := _pin_id(info)) is not None}
    running = await running_instances(connection, stream, group, pins)
    instances = {pins[pin]: one for pin, one in running.items()}
    members = [
        MemberSnapshot(member, partitions, infos.pop(name, None), instance=instances.get(name))
        for member, partitions in config.plan.shares
        for name in [consumer_name(config, group, member)]
    ]
    if isinstance(
        config, ElasticConfig
    ):  # only members read the group's queue, so the other consumers are former members
        members += [MemberSnapshot(name, (), info, listed=False) for name, info in sorted(infos.items())]
    return GroupSnapshot(
        stream=stream,
        group=group,
        config=config,
        members=tuple(members),
        queue=_queue(config, about) if isinstance(config, ElasticConfig) and about is not None else None,
        stream_exists=about is not None,
        retries=await _retries(connection, stream, group),
    )


async def _retries(connection: Connection, stream: str, group: str) -> RetryCounts | None:
    try:
        return (await retry_counts(connection, stream, group)).get(group)
    except PermissionDenied:  # who may look at the group need not see its retries
        return None


def _pin_id(info: ConsumerInfo) -> str | None:
    pin = pin_of(info)
    return pin.pinned_client_id if pin is not None else None


def _queue(config: ElasticConfig, about: StreamInfo) -> QueueSnapshot:
    assert about.config.name is not None
    return QueueSnapshot(
        stream=about.config.name,
        messages=about.state.messages,
        bytes=about.state.bytes,
        max_messages=config.max_buffered_messages,
        max_bytes=config.max_buffered_bytes,
        source_lag=sum(source.lag or 0 for source in about.sources or ()),
    )


# ---- JSON objects -----------------------------------------------------------------------------------------


def config_object(stream: str, group: str, config: StaticConfig | ElasticConfig) -> dict[str, Any]:
    """A group's configuration, with the partitions of each member."""
    found: dict[str, Any] = {"stream": stream, "group": group, "kind": config.kind, "max_members": config.partitions}
    if isinstance(config, StaticConfig):
        found["filters"] = list(config.filters)
    else:
        found["partitioning"] = [
            {"filter": one.filter, "wildcards": list(one.wildcards)} for one in config.partitioning
        ]
        found["max_buffered_messages"] = config.max_buffered_messages or None
        found["max_buffered_bytes"] = config.max_buffered_bytes or None
    return found | {
        "dialect": config.dialect,
        "mapped": config.mappings is not None,
        "members": plan_object(config.plan),
        "unowned": list(unowned_partitions(config)),
    }


def plan_object(plan: Plan) -> list[dict[str, Any]]:
    return [{"member": member, "partitions": list(partitions)} for member, partitions in plan.shares]


def moves_object(now: Plan, then: Plan) -> dict[str, Any]:
    """What a change of plan moves."""
    moved = then.moves_from(now)
    return {
        "moves": len(moved),
        "moved": [{"partition": one.partition, "from": one.source, "to": one.target} for one in moved],
        "member_mappings": [one for one in plan_object(then) if one["partitions"]],
    }


def list_object(stream: str, group: str, config: ListedGroup) -> dict[str, Any]:
    if isinstance(config, BrokenGroupRecord):
        return {"stream": stream, "group": group, "broken": str(config)}
    return config_object(stream, group, config)


def group_object(snapshot: GroupSnapshot) -> dict[str, Any]:
    """Everything that `info` shows."""
    found = config_object(snapshot.stream, snapshot.group, snapshot.config)
    found["members"] = [member_object(one) for one in snapshot.members]
    if isinstance(snapshot.config, ElasticConfig):
        found["queue"] = None if snapshot.queue is None else _queue_object(snapshot.queue)
    else:
        found["stream_exists"] = snapshot.stream_exists
    found["retries"] = None if snapshot.retries is None else snapshot.retries._asdict()
    return found


def member_object(one: MemberSnapshot) -> dict[str, Any]:
    """A member and its consumer. A value that it does not have is null."""
    info = one.info
    pin = pin_of(info) if info is not None else None
    covered = one.covered
    return {
        "member": one.member,
        "partitions": list(one.partitions),
        "state": one.state,
        "covered": None if covered is None else list(covered),
        "consumer": info.name if info else None,
        "pinned_id": pin.pinned_client_id if pin else None,
        "host": one.instance.host if one.instance else None,
        "pid": one.instance.pid if one.instance else None,
        "pinned_since": as_utc(pin.pinned_since) if pin and pin.pinned_since else None,
        "pending": info.num_pending if info else None,
        "ack_pending": info.num_ack_pending if info else None,
        "max_ack_pending": info.config.max_ack_pending if info else None,
        "redelivered": info.num_redelivered if info else None,
        "waiting_pulls": info.num_waiting if info else None,
    }


def _queue_object(queue: QueueSnapshot) -> dict[str, Any]:
    return {
        "stream": queue.stream,
        "messages": queue.messages,
        "bytes": queue.bytes,
        "max_messages": queue.max_messages or None,
        "max_bytes": queue.max_bytes or None,
        "fill": None if queue.fill is None else round(queue.fill, 3),
        "source_lag": queue.source_lag,
    }
