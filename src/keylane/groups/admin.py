"""Looking at groups, changing who is in an elastic one, and plan files. Nothing here reads messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from keylane.core.name_suggestions import name_missing
from keylane.core.names import check_member_name, check_stream_name
from keylane.core.plans import Plan, balanced, sticky
from keylane.core.subjects import shown
from keylane.errors import GroupError, InvalidInput, NotAMember, NotFound
from keylane.groups import consumer_spec
from keylane.groups.config import ElasticConfig, GroupConfig, Kind, StaticConfig
from keylane.groups.creation import Mappings, check_names, plan_of, refuse_to_stop_go_members, warn_of_idle_members
from keylane.groups.store import StoredGroup, change_elastic, group_names, read_any
from keylane.jetstream import Connection, ConsumerInfo, consumers

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


async def list_groups(connection: Connection, stream: str | None = None) -> list[GroupName]:
    """The groups of a stream, or of all streams; static ones first."""
    if stream is not None:
        check_stream_name(stream)
    return [GroupName(one, group, kind) for kind, one, group in await group_names(connection, stream)]


async def active_members(connection: Connection, stream: str, group: str, *, kind: Kind | None = None) -> list[str]:
    """The members that have a pinned or a waiting instance now."""
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
    """Drop members. Names that the group does not list are ignored. `plan` and `stop_go_members`: see `add_members`."""
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
    """Replace the members, or the present mapping, with a mapping of your own.

    On a group with two or more filters it stops members in Go: it is stored only with `stop_go_members`.
    """
    check_names(stream, group)
    plan = plan_of(mappings)
    return await change_elastic(
        connection, stream, group, lambda config: mapped(group, config, plan, stop_go_members=stop_go_members)
    )


async def delete_mapping(connection: Connection, stream: str, group: str) -> ElasticConfig:
    """Remove the mapping. No member owns a partition until members are added or a mapping is set."""
    check_names(stream, group)
    return await change_elastic(connection, stream, group, lambda config: config.with_owners(members=config.members))


def planned(config: GroupConfig, members: Sequence[str], plan: PlanName) -> Plan:
    """The plan after a change to these members; changes nothing."""
    if plan == "sticky":
        return sticky(config.plan, members, config.partitions)
    return balanced(members, config.partitions)


def mapped(group: str, config: ElasticConfig, plan: Plan | None, *, stop_go_members: bool) -> ElasticConfig:
    """The group with this mapping. Raises `InvalidInput` if it is the first one and would stop members in Go."""
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
    warn_of_idle_members(stream, group, changed)
    return changed


def _stuck(group: str, config: ElasticConfig, members: Sequence[str], stop_go_members: bool) -> ElasticConfig:
    if not members:
        return config.with_owners()
    plan = sticky(config.plan, members, config.partitions)
    if plan.idle:
        raise InvalidInput(
            f"{len(members)} members for {config.partitions} partitions: {', '.join(plan.idle)} would own nothing, "
            "and a mapping lists only owners; use plan='balanced', or fewer members"
        )
    return mapped(group, config, plan, stop_go_members=stop_go_members)


# ---- small things -------------------------------------------------------------------------------------


def _check_listed(config: GroupConfig, group: str, member: str) -> None:
    if not config.has_member(member):
        raise not_listed(group, member, config.plan.members)


def not_listed(group: str, member: str, members: Sequence[str]) -> NotAMember:
    """The error for a member that a group does not have."""
    return NotAMember(name_missing(f"group {group!r} does not list member {member!r}", member, members))


async def _stored(connection: Connection, stream: str, group: str, kind: Kind | None) -> StoredGroup:
    check_names(stream, group)
    return await read_any(connection, stream, group, kind)


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


# ---- plan files: `keylane elastic plan` and the skew pipeline write them, `apply-plan` reads them ------------


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan, and the group that it is for if the file names one."""

    plan: Plan
    stream: str | None = None
    group: str | None = None


def write_plan_file(path: Path, stream: str, group: str, plan: Plan) -> None:
    """Write a plan and the group that it is for. Raises `InvalidInput` if the file cannot be written."""
    mappings = [{"member": member, "partitions": partitions} for member, partitions in plan.mappings()]
    wire = {"stream": stream, "group": group, "member_mappings": mappings}
    try:
        path.write_text(json.dumps(wire, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"plan file {str(path)!r} cannot be written: {error.strerror}") from error


def read_plan_file(path: Path, stdin: TextIO) -> PlanFile:
    """`{"member_mappings": [{"member", "partitions"}]}`, or that list alone, or `{"a": [0, 1], "b": [2]}`.

    The first form, in which a group is also stored, may name `stream` and `group`. `-` reads `stdin`.
    """
    where = "the plan on standard input" if str(path) == "-" else f"plan file {str(path)!r}"
    try:
        text = stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        wire = json.loads(text)
    except OSError as error:
        raise InvalidInput(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"{where} is not JSON: {error}") from error
    named = wire if isinstance(wire, dict) and "member_mappings" in wire else {}
    listed = named.get("member_mappings", wire)
    try:
        pairs = (
            list(listed.items()) if isinstance(listed, dict) else [(one["member"], one["partitions"]) for one in listed]
        )
        plan = Plan.from_mappings((member, _numbers(partitions)) for member, partitions in pairs)
    except (KeyError, TypeError) as error:
        raise InvalidInput(
            f'{where} has no mapping of members to partitions: give {{"member_mappings": '
            '[{"member": "a", "partitions": [0, 1]}]}'
        ) from error
    if not plan.members:
        raise InvalidInput(f"{where} names no member: `keylane elastic delete-mapping` takes a mapping away")
    return PlanFile(plan, _text(named, "stream", where), _text(named, "group", where))


def _numbers(partitions: Any) -> list[int]:
    if not isinstance(partitions, list):
        raise TypeError(partitions)
    return partitions


def _text(named: dict[str, Any], key: str, where: str) -> str | None:
    value = named.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{where} has {key} {shown(value)}: it must be a name")
    return value
