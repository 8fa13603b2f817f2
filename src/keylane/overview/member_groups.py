"""Static and elastic groups, from their records, their members' consumers and their queues."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from keylane.core.group_summary import known_max, known_sum
from keylane.groups import ElasticConfig, StaticConfig
from keylane.groups.consumer_spec import consumer_name, consumer_stream
from keylane.groups.presence import RunningInstance, all_instances
from keylane.jetstream import ConsumerInfo, parse_time, streams
from keylane.overview.account_reader import AccountReader, GivenUp
from keylane.overview.model import GroupOverview, MemberOverview, PartitionOverview, QueueOverview

_MOST_SUBJECTS = 10_000
"""Of a queue whose messages are counted by partition: the server answers with every subject."""
_MOST_AGES = 4_096
"""Questions for the age of messages, in one group."""

Consumers = Mapping[str, ConsumerInfo | None]
"""Of each member; None: no instance has made it, or it is gone."""


class _Waiting(NamedTuple):
    """Messages that are not handled, and the age of the oldest."""

    lag: int | None = None
    lag_s: float | None = None


_NONE = _Waiting(0, 0.0)
_UNKNOWN = _Waiting()


@dataclass(frozen=True, slots=True)
class _Waits:
    """What waits in a group."""

    in_all: _Waiting
    by_member: Mapping[str, _Waiting]
    by_partition: Mapping[int, _Waiting]


async def read_member_group(
    reader: AccountReader, stream: str, group: str, config: StaticConfig | ElasticConfig, *, ask_members: bool
) -> GroupOverview:
    """A group as it stands now. `ask_members`: ask its instances who they are."""
    where = consumer_stream(config, stream, group)
    wire = reader.streams.get(where)
    if wire is None:
        what = "queue" if isinstance(config, ElasticConfig) else "stream"
        return GroupOverview(kind=config.kind, stream=stream, name=group, problem=f"there is no {what} {where!r}")
    asked = all_instances(reader.connection, stream, group) if ask_members else _nobody()
    infos, instances, given_up = await asyncio.gather(reader.consumers(where), asked, reader.given_up(stream, group))
    own: Consumers = {member: infos.get(consumer_name(config, group, member)) for member in config.plan.members}
    queue = None
    if isinstance(config, ElasticConfig):
        queue = _queue(config, wire)
        waits = await _elastic_waits(reader, config, wire, queue, own)
        # Only members read the group's queue, so the other consumers are those of former members.
        former = {name: info for name, info in infos.items() if name not in own}
    else:
        waits, former = await _static_waits(reader, config, own), {}
    members = [
        _member(member, owned, own[member], waits.by_member[member], instances if ask_members else None)
        for member, owned in config.plan.shares
    ]
    members += [_former(name, info) for name, info in sorted(former.items())]
    return _group(stream, group, config, members, _partitions(config, own, waits), waits.in_all, queue, given_up)


def _group(  # noqa: PLR0917 - its parts
    stream: str,
    group: str,
    config: StaticConfig | ElasticConfig,
    members: list[MemberOverview],
    partitions: tuple[PartitionOverview, ...],
    in_all: _Waiting,
    queue: QueueOverview | None,
    given_up: GivenUp | None,
) -> GroupOverview:
    return GroupOverview(
        kind=config.kind,
        stream=stream,
        name=group,
        members=tuple(members),
        partitions=partitions,
        queue=queue,
        lag=in_all.lag,
        lag_s=in_all.lag_s,
        in_flight=known_sum(one.in_flight for one in members if one.consumer is not None),
        redelivered=sum(one.redelivered or 0 for one in members),
        dead_letters=given_up.dead_letters if given_up is not None else None,
        parked_keys=given_up.parked_keys if given_up is not None else None,
        parked_messages=given_up.parked_messages if given_up is not None else None,
        is_paused=any(one.is_paused for one in members),
    )


async def _nobody() -> list[RunningInstance]:
    return []


# ---- elastic: all that is in the queue waits -----------------------------------------------------------------


def _queue(config: ElasticConfig, wire: Mapping[str, Any]) -> QueueOverview:
    return QueueOverview(
        stream=wire["config"]["name"],
        messages=wire["state"]["messages"],
        bytes=wire["state"]["bytes"],
        max_messages=config.max_buffered_messages or None,
        max_bytes=config.max_buffered_bytes or None,
        source_lag=sum(one.get("lag", 0) for one in wire.get("sources") or ()),
    )


async def _elastic_waits(
    reader: AccountReader, config: ElasticConfig, wire: Mapping[str, Any], queue: QueueOverview, own: Consumers
) -> _Waits:
    by_partition = await _by_partition(reader, config, wire, queue)
    by_member = {}
    for member, owned in config.plan.shares:
        info = own[member]
        parts = [by_partition[one] for one in owned]
        counted = known_sum(one.lag for one in parts)
        lag = _not_acked(info) if counted is None and info is not None else counted
        by_member[member] = _Waiting(lag, known_max(one.lag_s for one in parts))
    if queue.messages:
        lag_s: float | None = reader.age_s(parse_time(wire["state"]["first_ts"]))
    else:
        lag_s = None if queue.source_lag else 0.0
    return _Waits(_Waiting(queue.messages + queue.source_lag, lag_s), by_member, by_partition)


async def _by_partition(
    reader: AccountReader, config: ElasticConfig, wire: Mapping[str, Any], queue: QueueOverview
) -> dict[int, _Waiting]:
    numbers = range(config.partitions)
    if not queue.messages:
        return dict.fromkeys(numbers, _NONE)
    counts: dict[int, int | None] = dict.fromkeys(numbers)
    if wire["state"].get("num_subjects", 0) <= _MOST_SUBJECTS:
        counts = dict.fromkeys(numbers, 0)
        found = await reader.limited(streams.subject_counts(reader.connection, queue.stream, ">"))
        for subject, messages in found.items():
            token = subject.partition(".")[0]
            if token.isdecimal() and int(token) in counts:
                counts[int(token)] = (counts[int(token)] or 0) + messages
    filled = [one for one, count in counts.items() if count != 0]
    if len(filled) > _MOST_AGES:
        return {one: _NONE if count == 0 else _Waiting(count) for one, count in counts.items()}
    ages = await reader.oldest(queue.stream, [(f"{one}.>", 1) for one in filled])
    return dict.fromkeys(numbers, _NONE) | {
        one: _Waiting(counts[one], oldest.age_s) if oldest is not None else _NONE
        for one, oldest in zip(filled, ages, strict=True)
    }


# ---- static: what is above the ack floor of a member's consumer waits --------------------------------------------


async def _static_waits(reader: AccountReader, config: StaticConfig, own: Consumers) -> _Waits:
    filters = sum(len(_filters(info)) for info in own.values() if info is not None and _not_acked(info))
    found = await asyncio.gather(*(_consumer_waiting(reader, info, filters <= _MOST_AGES) for info in own.values()))
    by_member = dict(zip(own, found, strict=True))
    # The acks of a consumer are counted for all its partitions together.
    by_partition = {
        partition: by_member[member] if len(owned) == 1 or by_member[member] == _NONE else _UNKNOWN
        for member, owned in config.plan.shares
        for partition in owned
    }
    in_all = _Waiting(known_sum(one.lag for one in found), known_max(one.lag_s for one in found))
    return _Waits(in_all if len(by_partition) == config.partitions else _UNKNOWN, by_member, by_partition)


async def _consumer_waiting(reader: AccountReader, info: ConsumerInfo | None, with_age: bool) -> _Waiting:
    if info is None:
        return _UNKNOWN
    lag = _not_acked(info)
    if not lag:
        return _NONE
    if not with_age:
        return _Waiting(lag)
    floor = info.delivered_sequence if info.config.ack_policy == "none" else info.ack_floor
    found = await reader.oldest(info.stream, [(one, floor + 1) for one in _filters(info)])
    ages = [one for one in found if one is not None]
    return _Waiting(lag, min(ages).age_s) if ages else _Waiting(lag)


def _not_acked(info: ConsumerInfo) -> int:
    return info.num_pending + info.num_ack_pending


def _filters(info: ConsumerInfo) -> Sequence[str]:
    return info.config.filter_subjects or (info.config.filter_subject or ">",)


# ---- members and partitions ---------------------------------------------------------------------------------


def _partitions(config: StaticConfig | ElasticConfig, own: Consumers, waits: _Waits) -> tuple[PartitionOverview, ...]:
    owners = {
        number: member
        for member, info in own.items()
        if info is not None and _is_at_work(info)
        for number in _covered(info)
    }
    return tuple(
        PartitionOverview(
            id=str(number),
            assigned=config.plan.owner_of(number),
            owner=owners.get(number),
            lag=waits.by_partition.get(number, _UNKNOWN).lag,
            lag_s=waits.by_partition.get(number, _UNKNOWN).lag_s,
        )
        for number in range(config.partitions)
    )


def _covered(info: ConsumerInfo) -> set[int]:
    """The partitions that a consumer reads now. During a change they differ from those of the plan."""
    tokens = {one.partition(".")[0] for one in _filters(info)}
    return {int(token) for token in tokens if token.isdecimal()}


def _is_at_work(info: ConsumerInfo) -> bool:
    """Whether it has an instance: the server pins one of them with the first message."""
    return bool(info.num_waiting) or _pin(info)[0] is not None


def _pin(info: ConsumerInfo) -> tuple[str | None, Any]:
    state = next((one for one in info.priority_groups if one.pinned_client_id is not None), None)
    return (state.pinned_client_id, state.pinned_since) if state is not None else (None, None)


def _member(
    member: str,
    owned: Sequence[int],
    info: ConsumerInfo | None,
    waiting: _Waiting,
    instances: list[RunningInstance] | None,
) -> MemberOverview:
    partitions = tuple(str(one) for one in owned)
    if info is None:
        return MemberOverview(
            name=member, state="absent", is_active=False, partitions=partitions, lag=waiting.lag, lag_s=waiting.lag_s
        )
    pin, since = _pin(info)
    state = "active" if pin is not None else "waiting" if info.num_waiting else "absent"
    running = next((one for one in instances or () if one.pin_id == pin and pin is not None), None)
    return MemberOverview(
        name=member,
        state=state,
        is_active=_is_at_work(info),
        partitions=partitions,
        consumer=info.name,
        pin=pin,
        pinned_since=since,
        host=running.host if running is not None else None,
        pid=running.pid if running is not None else None,
        standbys=_standbys(member, running, instances),
        lag=waiting.lag,
        lag_s=waiting.lag_s,
        in_flight=None if info.config.ack_policy == "none" else info.num_ack_pending,
        max_in_flight=_limit(info.config.max_ack_pending),
        redelivered=info.num_redelivered,
        is_paused=info.paused,
    )


def _standbys(member: str, running: RunningInstance | None, instances: list[RunningInstance] | None) -> int | None:
    """Known if the active instance answers too: its standbys are then of the same kind."""
    if instances is None or running is None:
        return None
    return sum(1 for one in instances if one.member == member and one is not running)


def _limit(max_ack_pending: int | None) -> int | None:
    return max_ack_pending if max_ack_pending is not None and max_ack_pending > 0 else None


def _former(name: str, info: ConsumerInfo) -> MemberOverview:
    return MemberOverview(
        name=name,
        state="leaving",
        is_active=False,
        partitions=(),
        consumer=name,
        lag=_not_acked(info),
        in_flight=info.num_ack_pending,
        redelivered=info.num_redelivered,
        is_paused=info.paused,
    )
