"""What a group looks like on the server: names, and the consumer that every instance of a member asks for.

Instances in any language must ask for the same consumer, or they replace each other's: so it is computed here and
nowhere else. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from keylane.errors import InvalidInput
from keylane.groups.config import ElasticConfig, GroupConfig, StaticConfig
from keylane.jetstream.consumers import ConsumerConfig

STATIC_BUCKET = "static-consumer-groups"
ELASTIC_BUCKET = "elastic-consumer-groups"
DEFAULT_ACK_WAIT_S = 5.0
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


def key_of_group(stream: str, group: str) -> str:
    return f"{stream}.{group}"


def queue_stream(stream: str, group: str) -> str:
    """The work queue of an elastic group."""
    return f"{stream}-{group}"


def consumer_name(config: GroupConfig, group: str, member: str) -> str:
    return f"{group}-{member}" if isinstance(config, StaticConfig) else member


def consumer_stream(config: GroupConfig, stream: str, group: str) -> str:
    return stream if isinstance(config, StaticConfig) else queue_stream(stream, group)


def ack_wait_s(config: GroupConfig, wanted: float | None) -> float:
    least = GO_01_ACK_WAIT_S if config.dialect == "go-0.1" else 0.0
    return max(least, wanted or DEFAULT_ACK_WAIT_S)


def check_settings(config: GroupConfig, wanted: ConsumerConfig) -> None:
    """Refuse, by name, what would break the group."""
    for name in _OVERWRITTEN:
        if getattr(wanted, name) is not None:
            raise InvalidInput(f"{name} belongs to the group and cannot be set by a member: leave it out")
    if wanted.deliver_subject is not None:
        raise InvalidInput("deliver_subject makes a push consumer, and groups pull: leave it out")
    if isinstance(config, ElasticConfig):
        if wanted.ack_policy != "explicit":
            raise InvalidInput(f"ack_policy is {wanted.ack_policy!r}: an elastic group needs explicit acks")
        if wanted.deliver_policy != "all" or wanted.opt_start_seq or wanted.opt_start_time:
            raise InvalidInput(
                "a start position belongs to static groups: an elastic group's queue is always read from its start"
            )


def consumer_config(
    config: StaticConfig | ElasticConfig, group: str, member: str, wanted: ConsumerConfig
) -> ConsumerConfig:
    """The consumer of a member, with the caller's own settings in it."""
    wait_s = ack_wait_s(config, wanted.ack_wait_s)
    common = replace(
        wanted,
        ack_wait_s=wait_s,
        filter_subjects=config.filters_of(member),
        priority_groups=(config.priority_group(member),),
        priority_policy="pinned_client",
        priority_timeout_s=wait_s if config.dialect == "go-0.1" else max(wait_s, 1.0),
    )
    name = consumer_name(config, group, member)
    if isinstance(config, StaticConfig):
        return replace(common, durable_name=name)
    idle_s = GO_01_ACK_WAIT_S if config.dialect == "go-0.1" else wait_s
    return replace(common, name=name, inactive_threshold_s=wanted.inactive_threshold_s or idle_s)


def difference(ours: ConsumerConfig, theirs: ConsumerConfig) -> str | None:
    """The first setting in which an existing consumer differs from what we would ask for, in words."""
    mine, other = ours.to_wire(), theirs.to_wire()
    for name, value in mine.items():
        if name not in ("metadata", "name", "durable_name") and other.get(name) != value:
            return f"{name} is {other.get(name)!r} there and {value!r} here"
    return None
