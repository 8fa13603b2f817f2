"""Whether a fleet would share a name with a static or an elastic group: asked on every join, before anything starts."""

from __future__ import annotations

from collections.abc import Collection

from keylane.core.fleet_names import check_collisions
from keylane.errors import NoSuchGroup, NotFound
from keylane.groups import GroupName, StaticConfig, get_config, list_groups
from keylane.jetstream import Connection


async def refuse_collisions(connection: Connection, stream: str, fleet: str, consumers: Collection[str]) -> None:
    """Raise `InvalidInput` if a group has the fleet's name or one of its consumers, or reads this stream as its queue.

    `consumers`: the names that the fleet needs on its stream.
    """
    groups = await list_groups(connection, stream)
    static = {
        one.group: await _members(connection, one)
        for one in groups
        if one.kind == "static" and any(name.startswith(f"{one.group}-") for name in consumers)
    }
    static |= {one.group: () for one in groups if one.kind == "static" and one.group not in static}
    elastic = [(stream, one.group) for one in groups if one.kind == "elastic"]
    elastic += await _group_of_queue(connection, stream)
    check_collisions(stream, fleet, consumers, static=static, elastic=elastic)


async def _members(connection: Connection, name: GroupName) -> Collection[str]:
    config = await get_config(connection, name.stream, name.group, kind="static")
    assert isinstance(config, StaticConfig)
    return config.plan.members


async def _group_of_queue(connection: Connection, stream: str) -> list[tuple[str, str]]:
    """The elastic group whose queue this stream is: a queue is called `<stream>-<group>`."""
    words = stream.split("-")
    pairs = [("-".join(words[:cut]), "-".join(words[cut:])) for cut in range(1, len(words))]
    pairs = [(source, group) for source, group in pairs if source and group]
    return [one for one in pairs if await _is_elastic(connection, *one)]


async def _is_elastic(connection: Connection, stream: str, group: str) -> bool:
    try:
        await get_config(connection, stream, group, kind="elastic")
    except (NoSuchGroup, NotFound):  # no such group, or not even a stream of this name
        return False
    return True
