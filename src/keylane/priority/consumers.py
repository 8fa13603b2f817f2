"""Consumers with a priority group: create, update, get the pin's state, unpin."""

from __future__ import annotations

from keylane.errors import InvalidInput
from keylane.jetstream import Connection, ConsumerConfig, ConsumerInfo, PriorityGroupState, consumers
from keylane.priority.rules import check_config, check_update


async def create(connection: Connection, stream: str, config: ConsumerConfig) -> ConsumerInfo:
    """Create a consumer with a priority group; an existing one with the identical configuration is fine.

    >>> config = ConsumerConfig(durable_name="jobs", priority_groups=("jobs",), priority_policy="overflow")
    >>> await create(connection, "JOBS", config)
    """
    check_config(config)
    connection.require("prioritized" if config.priority_policy == "prioritized" else "priority_groups")
    return await consumers.create(connection, stream, config, action="create")


async def update(connection: Connection, stream: str, config: ConsumerConfig) -> ConsumerInfo:
    """Update a consumer. Its group and its policy can never change; `priority_timeout_s` can."""
    check_config(config)
    name = config.effective_name
    if name is None:
        raise InvalidInput("the configuration has no name: say which consumer to update")
    check_update((await consumers.info(connection, stream, name)).config, config)
    return await consumers.update(connection, stream, config)


async def group_state(connection: Connection, stream: str, consumer: str) -> PriorityGroupState:
    """The consumer's group, who is pinned in it and since when."""
    info = await consumers.info(connection, stream, consumer)
    only_group(info)
    return info.priority_groups[0]


async def unpin(connection: Connection, stream: str, consumer: str) -> None:
    """Clear the pin: with the next message the server pins the client that has waited longest, maybe the same one."""
    info = await consumers.info(connection, stream, consumer)
    group = only_group(info)
    if info.config.priority_policy != "pinned_client":
        raise InvalidInput(
            f"consumer {consumer!r} has the policy {info.config.priority_policy}: only pinned_client has a pin"
        )
    await consumers.unpin(connection, stream, consumer, group)


def only_group(info: ConsumerInfo) -> str:
    groups = info.config.priority_groups
    if not groups:
        raise InvalidInput(
            f"consumer {info.name!r} of stream {info.stream!r} has no priority group: create it with one, "
            "or read it with keylane.jetstream.open_feed"
        )
    return groups[0]
