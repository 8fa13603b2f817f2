"""Groups as JSON objects. Pure, and free of rich: programs that ask often wait less."""

from __future__ import annotations

from typing import Any

from keylane.cli.command import pin_of
from keylane.cli.formatting import as_utc
from keylane.cli.groups.snapshot import GroupSnapshot, MemberSnapshot, QueueSnapshot, kind_of, unowned_partitions
from keylane.core.plans import Plan
from keylane.errors import BrokenGroupRecord
from keylane.groups import ElasticConfig, StaticConfig


def config_object(stream: str, group: str, config: StaticConfig | ElasticConfig) -> dict[str, Any]:
    """A group's configuration, with the partitions of each member."""
    found: dict[str, Any] = {
        "stream": stream,
        "group": group,
        "kind": kind_of(config),
        "max_members": config.max_members,
    }
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


def list_object(stream: str, group: str, config: StaticConfig | ElasticConfig | BrokenGroupRecord) -> dict[str, Any]:
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
