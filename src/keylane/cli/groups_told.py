"""What is said of groups in JSON. Pure, and free of what drawings need: programs that ask often wait less."""

from __future__ import annotations

from typing import Any

from keylane.cli.consumer_told import as_utc, pin_of
from keylane.cli.group_sight import GroupSight, MemberSight, QueueSight, kind_of, unowned_partitions
from keylane.core.plans import Plan
from keylane.errors import BrokenGroupRecord
from keylane.groups import ElasticConfig, StaticConfig


def config_object(stream: str, group: str, config: StaticConfig | ElasticConfig) -> dict[str, Any]:
    """A group's configuration, with the partitions of each member worked out."""
    told: dict[str, Any] = {
        "stream": stream,
        "group": group,
        "kind": kind_of(config),
        "max_members": config.max_members,
    }
    if isinstance(config, StaticConfig):
        told["filters"] = list(config.filters)
    else:
        told["partitioning"] = [{"filter": one.filter, "wildcards": list(one.wildcards)} for one in config.partitioning]
        told["max_buffered_messages"] = config.max_buffered_messages or None
        told["max_buffered_bytes"] = config.max_buffered_bytes or None
    return told | {
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


def list_object(stream: str, group: str, found: StaticConfig | ElasticConfig | BrokenGroupRecord) -> dict[str, Any]:
    if isinstance(found, BrokenGroupRecord):
        return {"stream": stream, "group": group, "broken": str(found)}
    return config_object(stream, group, found)


def sight_object(sight: GroupSight) -> dict[str, Any]:
    """Everything that `info` knows."""
    told = config_object(sight.stream, sight.group, sight.config)
    told["members"] = [member_object(one) for one in sight.members]
    if isinstance(sight.config, ElasticConfig):
        told["queue"] = None if sight.queue is None else _queue_object(sight.queue)
    else:
        told["stream_exists"] = sight.is_stream_there
    return told


def member_object(one: MemberSight) -> dict[str, Any]:
    """A member and its consumer; what it does not have is null."""
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
        "pinned_since": as_utc(pin.pinned_since) if pin and pin.pinned_since else None,
        "pending": info.num_pending if info else None,
        "ack_pending": info.num_ack_pending if info else None,
        "max_ack_pending": info.config.max_ack_pending if info else None,
        "redelivered": info.num_redelivered if info else None,
        "waiting_pulls": info.num_waiting if info else None,
    }


def _queue_object(queue: QueueSight) -> dict[str, Any]:
    return {
        "stream": queue.stream,
        "messages": queue.messages,
        "bytes": queue.bytes,
        "max_messages": queue.max_messages or None,
        "max_bytes": queue.max_bytes or None,
        "fill": None if queue.fill is None else round(queue.fill, 3),
        "source_lag": queue.source_lag,
    }
