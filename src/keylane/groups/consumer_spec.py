"""What a group looks like on the server: names, and the consumer that every instance of a member asks for.

Instances in any language must ask for the same consumer, or they replace each other's: so it is computed here and
nowhere else. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from keylane.core.subjects import is_subset, matches
from keylane.errors import InvalidInput
from keylane.groups.config import ElasticConfig, GroupConfig, StaticConfig
from keylane.jetstream import ConsumerConfig

STATIC_BUCKET = "static-consumer-groups"
ELASTIC_BUCKET = "elastic-consumer-groups"
DEFAULT_ACK_WAIT_S = 5.0
DEFAULT_MAX_ACK_PENDING = 1000
GO_01_ACK_WAIT_S = 6.0
"""Members of the Go library 0.1 take at least this."""

_OVERWRITTEN = (
    "name",
    "durable_name",
    "filter_subject",
    "filter_subjects",
    "priority_groups",
    "priority_policy",
    "priority_timeout_s",
)

_SERVER_DEFAULTS: dict[str, Any] = {
    "ack_wait": 30_000_000_000,
    "max_ack_pending": 1000,
    "max_deliver": -1,
    "max_waiting": 512,
}
_REMEMBERED = 65_536
_NOT_COMPARED = ("durable_name", "filter_subjects", "metadata", "name")


def key_of_group(stream: str, group: str) -> str:
    return f"{stream}.{group}"


def queue_stream(stream: str, group: str) -> str:
    """The work queue of an elastic group."""
    return f"{stream}-{group}"


def consumer_name(config: GroupConfig, group: str, member: str) -> str:
    return f"{group}-{member}" if isinstance(config, StaticConfig) else member


def consumer_stream(config: GroupConfig, stream: str, group: str) -> str:
    return stream if isinstance(config, StaticConfig) else queue_stream(stream, group)


def ack_wait_s(config: GroupConfig, wanted: ConsumerConfig) -> float:
    """How long the server waits for an ack: the wanted time, within what the group allows."""
    if wanted.backoff_s:
        return wanted.backoff_s[0]  # the server takes its first step for the ack wait
    least = GO_01_ACK_WAIT_S if config.dialect == "go-0.1" else 0.0
    return max(least, wanted.ack_wait_s or DEFAULT_ACK_WAIT_S)


def check_settings(config: GroupConfig, wanted: ConsumerConfig) -> None:
    """Raise `InvalidInput` for a setting that would break the group."""
    wanted.check()
    for name in _OVERWRITTEN:
        if getattr(wanted, name) is not None:
            raise InvalidInput(f"{name} belongs to the group and cannot be set by a member: leave it out")
    if wanted.deliver_subject is not None:
        raise InvalidInput("deliver_subject makes a push consumer, and groups pull: leave it out")
    if wanted.max_deliver not in (None, -1):
        raise InvalidInput(
            f"max_deliver is {wanted.max_deliver}: the server would give up a message and tell nobody; leave it out"
        )
    if wanted.max_ack_pending is not None and wanted.max_ack_pending < 1:
        raise InvalidInput(
            f"max_ack_pending is {wanted.max_ack_pending}: it bounds what a member holds; give 1 or more"
        )
    if isinstance(config, ElasticConfig):
        if wanted.ack_policy != "explicit":
            raise InvalidInput(f"ack_policy is {wanted.ack_policy!r}: an elastic group needs explicit acks")
        if wanted.deliver_policy != "all":
            raise InvalidInput(
                f"deliver_policy is {wanted.deliver_policy!r}: a start position belongs to static groups; the queue of "
                "an elastic group is always read from its start"
            )


def consumer_config(
    config: StaticConfig | ElasticConfig, group: str, member: str, wanted: ConsumerConfig
) -> ConsumerConfig:
    """The consumer of a member, with the caller's own settings in it."""
    wait_s = ack_wait_s(config, wanted)
    common = replace(
        wanted,
        ack_wait_s=wait_s,
        filter_subjects=config.filters_of(member),
        priority_groups=(config.priority_group(member),),
        priority_policy="pinned_client",
        priority_timeout_s=wait_s if config.dialect == "go-0.1" else max(wait_s, 1.0),
    )
    if wanted.ack_policy == "none":
        common = replace(common, ack_wait_s=None, max_ack_pending=None)  # the server keeps neither
    name = consumer_name(config, group, member)
    if isinstance(config, StaticConfig):
        return replace(common, durable_name=name)
    idle_s = GO_01_ACK_WAIT_S if config.dialect == "go-0.1" else wait_s
    return replace(common, name=name, inactive_threshold_s=wanted.inactive_threshold_s or idle_s)


def difference(ours: ConsumerConfig, theirs: ConsumerConfig) -> str | None:
    """The first setting in which an existing consumer differs from what we would ask for, in words.

    Filters are not compared: they follow the membership.
    """
    mine, other = ours.to_wire(), theirs.to_wire()
    for name in [*mine, *(one for one in other if one not in mine)]:
        if name in _NOT_COMPARED:
            continue
        here, there = (wire.get(name) or _SERVER_DEFAULTS.get(name) for wire in (mine, other))
        if (here or None) != (there or None):
            return f"{name} is {there!r} there and {here!r} here"
    return None


def covers(there: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a consumer with these filters delivers all that is wanted of it, and of no other partition.

    >>> covers(["0.>", "1.>"], ["0.orders.*", "1.orders.*"])
    True
    """
    by_partition = _by_partition(there)
    wanted_by_partition = _by_partition(wanted)
    return by_partition.keys() == wanted_by_partition.keys() and all(
        any(is_subset(one, other) for other in by_partition[partition])
        for partition, filters in wanted_by_partition.items()
        for one in filters
    )


def asking_for(filters: Sequence[str]) -> Callable[[bytes], bool]:
    """A function that says whether a stored subject matches these filter subjects; it caches its answers."""
    by_partition = _by_partition(filters)

    @lru_cache(maxsize=_REMEMBERED)
    def is_asked_for(raw_subject: bytes) -> bool:
        subject = raw_subject.decode("utf-8", "surrogateescape")
        return any(matches(one, subject) for one in by_partition.get(subject.split(".", 1)[0], ()))

    return is_asked_for


def _by_partition(filters: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in filters:
        found.setdefault(one.split(".", 1)[0], []).append(one)
    return found
