"""Looking at groups, and changing who is in an elastic one. Nothing here reads messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from keylane.core.names import check_member_name, check_stream_name
from keylane.core.plans import Plan, balanced, sticky
from keylane.errors import GroupError, InvalidInput, NotAMember, NotFound
from keylane.groups import consumer_spec
from keylane.groups.config import ElasticConfig, GroupConfig, StaticConfig
from keylane.groups.creation import (
    Mappings,
    check_names,
    plan_of,
    refuse_to_stop_go_members,
    tell_of_idle_members,
)
from keylane.groups.store import Kind, StoredGroup, change_elastic, elastic_bucket, read_any, static_bucket
from keylane.jetstream import Bucket, Connection, ConsumerInfo, consumers

PlanName = Literal["balanced", "sticky"]


@dataclass(frozen=True, slots=True)
class GroupName:
    """A group that exists."""

    stream: str
    group: str
    kind: Kind


# ---- look ---------------------------------------------------------------------------------------------


async def get_config(
    connection: Connection, stream: str, group: str, *, kind: Kind | None = None
) -> StaticConfig | ElasticConfig:
    return (await _stored(connection, stream, group, kind)).config


async def list_groups(connection: Connection, stream: str) -> list[GroupName]:
    """The groups of a stream, static ones first."""
    check_stream_name(stream)
    static = [GroupName(stream, one, "static") for one in await _groups_in(static_bucket(connection), stream)]
    elastic = [GroupName(stream, one, "elastic") for one in await _groups_in(elastic_bucket(connection), stream)]
    return [*static, *elastic]


async def active_members(connection: Connection, stream: str, group: str, *, kind: Kind | None = None) -> list[str]:
    """Members that have an instance pinned or waiting now."""
    config = (await _stored(connection, stream, group, kind)).config
    active = []
    for member in config.plan.members:
        info = await _consumer(connection, config, stream, group, member)
        if info is not None and (info.num_waiting or any(one.pinned_client_id for one in info.priority_groups)):
            active.append(member)
    return active


async def member_info(
    connection: Connection, stream: str, group: str, member: str, *, kind: Kind | None = None
) -> ConsumerInfo | None:
    """The state of a member's consumer; None while no instance has made it."""
    config = (await _stored(connection, stream, group, kind)).config
    _check_listed(config, group, member)
    return await _consumer(connection, config, stream, group, member)


async def step_down(connection: Connection, stream: str, group: str, member: str, *, kind: Kind | None = None) -> None:
    """Let another instance of the member become active."""
    config = (await _stored(connection, stream, group, kind)).config
    _check_listed(config, group, member)
    try:
        await consumers.unpin(
            connection,
            consumer_spec.consumer_stream(config, stream, group),
            consumer_spec.consumer_name(config, group, member),
            config.priority_group(member),
        )
    except NotFound as error:
        raise GroupError(f"member {member!r} of group {group!r} has no consumer: no instance of it ran yet") from error


# ---- change (elastic only) ----------------------------------------------------------------------------


async def add_members(
    connection: Connection,
    stream: str,
    group: str,
    members: Sequence[str],
    *,
    plan: PlanName = "balanced",
    stop_go_members: bool = False,
) -> ElasticConfig:
    """Add members. `plan="sticky"` moves the fewest partitions and stores the result as mappings.

    A mapping on a group with two or more filters stops members in Go: it is stored only with `stop_go_members`.
    """
    _check_change(stream, group, members, plan)
    return await _change_members(
        connection, stream, group, lambda now: [*now, *members], plan, stop_go_members=stop_go_members
    )


async def drop_members(
    connection: Connection,
    stream: str,
    group: str,
    members: Sequence[str],
    *,
    plan: PlanName = "balanced",
    stop_go_members: bool = False,
) -> ElasticConfig:
    """Drop members; those that are not there are no matter. For the rest see `add_members`."""
    _check_change(stream, group, members, plan)
    return await _change_members(
        connection,
        stream,
        group,
        lambda now: [one for one in now if one not in members],
        plan,
        stop_go_members=stop_go_members,
    )


async def set_mapping(
    connection: Connection, stream: str, group: str, mappings: Mappings, *, stop_go_members: bool = False
) -> ElasticConfig:
    """Replace the members, or the mapping there is, by a mapping of your own.

    On a group with two or more filters it stops members in Go: it is stored only with `stop_go_members`.
    """
    check_names(stream, group)
    plan = plan_of(mappings)
    return await change_elastic(
        connection, stream, group, lambda config: mapped(group, config, plan, stop_go_members=stop_go_members)
    )


async def delete_mapping(connection: Connection, stream: str, group: str) -> ElasticConfig:
    """Remove the mapping. Nobody owns a partition then, until members are added or a mapping is set."""
    check_names(stream, group)
    return await change_elastic(connection, stream, group, lambda config: config.with_owners(members=config.members))


def planned(config: GroupConfig, members: Sequence[str], plan: PlanName) -> Plan:
    """The plan that a change to these members would give: for a dry run."""
    if plan == "sticky":
        return sticky(config.plan, members, config.max_members)
    return balanced(members, config.max_members)


def mapped(group: str, config: ElasticConfig, plan: Plan | None, *, stop_go_members: bool) -> ElasticConfig:
    """The group with this mapping, unless it would be the first one and members in Go would stop unasked."""
    changed = config.with_owners(mappings=plan)
    refuse_to_stop_go_members(group, changed, stop_go_members or config.mappings is not None)
    return changed


def _check_change(stream: str, group: str, members: Sequence[str], plan: PlanName) -> None:
    check_names(stream, group)
    if isinstance(members, str):
        raise InvalidInput(f"members is {members!r}, one text: give a list")
    if not members:
        raise InvalidInput("no member named: give at least one")
    for member in members:
        check_member_name(member)
    if plan not in ("balanced", "sticky"):
        raise InvalidInput(f"plan is {plan!r}: use balanced or sticky")


async def _change_members(
    connection: Connection,
    stream: str,
    group: str,
    choose: Callable[[Sequence[str]], Sequence[str]],
    plan: PlanName,
    *,
    stop_go_members: bool,
) -> ElasticConfig:
    def decide(config: ElasticConfig) -> ElasticConfig:
        if plan == "sticky":
            return _stuck(group, config, list(dict.fromkeys(choose(config.plan.members))), stop_go_members)
        if config.mappings is not None:
            raise GroupError(
                f"group {group!r} has a mapping, which names its members: use plan='sticky', or set_mapping, "
                "or delete_mapping first"
            )
        return config.with_owners(members=list(dict.fromkeys(choose(config.members))))

    changed = await change_elastic(connection, stream, group, decide)
    tell_of_idle_members(stream, group, changed)
    return changed


def _stuck(group: str, config: ElasticConfig, members: Sequence[str], stop_go_members: bool) -> ElasticConfig:
    if not members:
        return config.with_owners()
    plan = sticky(config.plan, members, config.max_members)
    if plan.idle:
        raise InvalidInput(
            f"{len(members)} members for {config.max_members} partitions: {', '.join(plan.idle)} would own nothing, "
            "and a mapping lists only owners; use plan='balanced', or fewer members"
        )
    return mapped(group, config, plan, stop_go_members=stop_go_members)


# ---- small things -------------------------------------------------------------------------------------


def _check_listed(config: GroupConfig, group: str, member: str) -> None:
    if not config.has_member(member):
        raise NotAMember(
            f"group {group!r} does not list member {member!r}; it lists {', '.join(config.plan.members) or 'nobody'}"
        )


async def _stored(connection: Connection, stream: str, group: str, kind: Kind | None) -> StoredGroup:
    check_names(stream, group)
    return await read_any(connection, stream, group, kind)


async def _groups_in(bucket: Bucket, stream: str) -> list[str]:
    return [key.partition(".")[2] for key in await bucket.keys(stream)]


async def _consumer(
    connection: Connection, config: StaticConfig | ElasticConfig, stream: str, group: str, member: str
) -> ConsumerInfo | None:
    try:
        return await consumers.info(
            connection,
            consumer_spec.consumer_stream(config, stream, group),
            consumer_spec.consumer_name(config, group, member),
        )
    except NotFound:
        return None
