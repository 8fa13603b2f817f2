"""Partitioned consumer groups: static on streams that carry partitions, elastic on any stream.

`creation` makes groups, `admin` looks at them and changes them. `member` takes part in one: `member_consumer` reads its
consumer, and `keylane.processing` has its messages. `config` and `consumer_spec` are the contracts with members in
other languages.
"""

from __future__ import annotations

from keylane.core.member_state import MemberState
from keylane.groups.admin import (
    GroupName,
    active_members,
    add_members,
    delete_mapping,
    drop_members,
    get_config,
    list_groups,
    member_info,
    set_mapping,
    step_down,
)
from keylane.groups.config import ElasticConfig, StaticConfig, partition_limit
from keylane.groups.consumer_spec import queue_stream
from keylane.groups.creation import create_elastic, create_static, delete
from keylane.groups.instance import Origin
from keylane.groups.member import Member, MemberHooks, join
from keylane.groups.stream_subjects import can_store
from keylane.lazy import public_names
from keylane.processing.delayed_retries import RetryCounts, retry_counts
from keylane.processing.message import GroupMessage, MessageContext, Placing, placing_by
from keylane.processing.origin import GroupSource

__all__ = [
    "ElasticConfig",
    "GroupMessage",
    "GroupName",
    "GroupSource",
    "Member",
    "MemberHooks",
    "MemberState",
    "MessageContext",
    "Origin",
    "Placing",
    "RetryCounts",
    "StaticConfig",
    "active_members",
    "add_members",
    "can_store",
    "create_elastic",
    "create_static",
    "delete",
    "delete_mapping",
    "drop_members",
    "get_config",
    "join",
    "list_groups",
    "member_info",
    "partition_limit",
    "placing_by",
    "queue_stream",
    "retry_counts",
    "set_mapping",
    "step_down",
]

__dir__ = public_names(__all__)
