"""A snapshot of a group: its configuration, its members' consumers, its queue.

Takes a fixed number of requests, however many members the group has: the record, the stream, and the consumers as one
paged list. Changes nothing and prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nats.js.api import StreamInfo

from keylane.cli.errors import naming_the_stream
from keylane.cli.pins import pin_of
from keylane.core.names import check_group_name, check_stream_name
from keylane.errors import BrokenGroupRecord, GroupError, NoSuchGroup, NotFound
from keylane.groups import ElasticConfig, StaticConfig, list_groups
from keylane.groups.consumer_spec import consumer_name, consumer_stream
from keylane.groups.store import Kind, read_elastic, read_static
from keylane.jetstream import Connection, ConsumerInfo, consumers, streams

State = Literal["active", "waiting", "absent", "leaving"]


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """A member, its partitions in the plan, and its consumer if an instance has created one."""

    member: str
    partitions: tuple[int, ...]
    info: ConsumerInfo | None
    listed: bool = True

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

    @property
    def unowned(self) -> tuple[int, ...]:
        return unowned_partitions(self.config)


def kind_of(config: StaticConfig | ElasticConfig) -> Kind:
    return "static" if isinstance(config, StaticConfig) else "elastic"


def unowned_partitions(config: StaticConfig | ElasticConfig) -> tuple[int, ...]:
    """The partitions whose messages no member gets."""
    owned = set(config.plan.partitions)
    return tuple(one for one in range(config.max_members) if one not in owned)


async def config_of(connection: Connection, kind: Kind, stream: str, group: str) -> StaticConfig | ElasticConfig:
    """The configuration of a group of this kind. Raises `NoSuchGroup` with the names that exist."""
    check_stream_name(stream)
    check_group_name(group)
    read = read_static if kind == "static" else read_elastic
    stored = await read(connection, stream, group)
    if stored is None:
        raise await _no_such_group(connection, kind, stream, group)
    return stored.config


async def groups_of(
    connection: Connection, kind: Kind, stream: str
) -> dict[str, StaticConfig | ElasticConfig | BrokenGroupRecord]:
    """All groups of this kind, by name; one that cannot be read does not hide the others."""
    found: dict[str, StaticConfig | ElasticConfig | BrokenGroupRecord] = {}
    read = read_static if kind == "static" else read_elastic
    for one in await list_groups(connection, stream):
        if one.kind != kind:
            continue
        try:
            stored = await read(connection, stream, one.group)
        except BrokenGroupRecord as broken:
            found[one.group] = broken
        else:
            if stored is not None:
                found[one.group] = stored.config
    if not found:
        await naming_the_stream(connection, stream, streams.info(connection, stream))
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
    members = [
        MemberSnapshot(member, partitions, infos.pop(consumer_name(config, group, member), None))
        for member, partitions in config.plan.shares
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
    )


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


async def _no_such_group(connection: Connection, kind: Kind, stream: str, group: str) -> GroupError:
    there = await list_groups(connection, stream)
    for one in there:
        if one.group == group:
            return GroupError(
                f"group {group!r} of stream {stream!r} is {one.kind}, not {kind}: use `keylane {one.kind} …`"
            )
    if not there:
        await naming_the_stream(connection, stream, streams.info(connection, stream))
    known = ", ".join(one.group for one in there if one.kind == kind) or "none"
    return NoSuchGroup(f"stream {stream!r} has no {kind} group {group!r}; there is: {known}")
