"""`keylane elastic …`: groups on any stream, whose members come and go.

Owns the commands that only elastic groups have: creating one, changing the owners of partitions, and planning a change.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from keylane.cli.command import (
    ConnectionOptions,
    ForceOption,
    GroupArgument,
    JsonOption,
    StreamArgument,
    command,
    confirm,
    connected,
    family,
    print_answer,
)
from keylane.cli.groups.commands import (
    DialectOption,
    Mappings,
    MaxMembers,
    StopGoMembers,
    add_shared_commands,
    confirm_stop_of_go_members,
    group_options,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from keylane.core.plans import Plan
    from keylane.groups import ElasticConfig
    from keylane.jetstream import Connection

app = family("Elastic groups: on any stream; members are added and dropped while it runs.", group_options)
add_shared_commands(app, "elastic")

_PlanOption = Annotated[
    Literal["balanced", "sticky"],
    typer.Option(
        help="balanced: what every language computes from the names. sticky: the fewest moves, stored as a mapping."
    ),
]


# ---- create ---------------------------------------------------------------------------------------------


@command(app, "create")
def create(
    stream: StreamArgument,
    group: GroupArgument,
    max_members: MaxMembers,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILTER WILDCARD...",
            help="A filter, then the numbers of its '*' that make up the key: 'orders.*.*' 2. Several may follow "
            "each other. None: every subject, hashed whole.",
        ),
    ] = None,
    *,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", metavar="FILTER", help="A filter whose wildcards are asked for, as in cg. May be repeated."
        ),
    ] = None,
    max_buffered_msgs: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many messages its queue may hold; 0: no limit.")
    ] = 0,
    max_buffered_bytes: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many bytes its queue may hold; 0: no limit.")
    ] = 0,
    dialect: DialectOption = "present",
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Create a group. `keylane elastic add` brings its members.

    The server copies what matches into a queue, with partition numbers. When a limited queue is full, the server
    pauses the copying for about two seconds.
    """
    from keylane import groups
    from keylane.cli.groups.arguments import ask_for_partition_by, parse_partition_by
    from keylane.cli.groups.snapshot import config_object
    from keylane.errors import InvalidInput

    if words and filters:
        raise InvalidInput("filters are given with --filter and without: write all of them in one of the two ways")
    partition_by = ask_for_partition_by(filters, _ask_for_wildcards) if filters else parse_partition_by(words or [])
    config = connected(
        link,
        lambda connection: groups.create_elastic(
            connection,
            stream,
            group,
            partitions=max_members,
            partition_by=partition_by,
            max_buffered_messages=max_buffered_msgs,
            max_buffered_bytes=max_buffered_bytes,
            dialect=dialect,
        ),
    )
    made = f"created elastic group {group!r} of stream {stream!r}: {config.partitions:,} partitions, "
    owners = config.plan.members
    print_answer(
        as_json,
        config_object(stream, group, config),
        made + (f"members {', '.join(owners)}" if owners else "no members yet"),
    )


# ---- change -------------------------------------------------------------------------------------------


@command(app, "add")
def add(
    stream: StreamArgument,
    group: GroupArgument,
    newcomers: Annotated[list[str], typer.Argument(metavar="MEMBER...", help="The names to add.")],
    plan: _PlanOption = "balanced",
    *,
    stop_go_members: StopGoMembers = False,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Add members. Their instances may already be running and waiting."""
    from keylane import groups

    if plan == "sticky":
        _confirm_first_mapping(link, stream, group, yes=stop_go_members)

    async def change(connection: Connection, before: ElasticConfig) -> ElasticConfig:
        _check_plan_word(group, plan, before)
        return await groups.add_members(connection, stream, group, newcomers, plan=plan, stop_go_members=True)

    def notes(before: ElasticConfig) -> list[str]:
        known = [name for name in newcomers if before.has_member(name)]
        return [f"{', '.join(known)} was in the group already"] if known else []

    _apply(link, stream, group, change, as_json=as_json, notes=notes)


@command(app, "drop")
def drop(
    stream: StreamArgument,
    group: GroupArgument,
    members: Annotated[list[str], typer.Argument(metavar="MEMBER...", help="The names to drop.")],
    plan: _PlanOption = "balanced",
    *,
    stop_go_members: StopGoMembers = False,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Drop members. Their instances finish what is at work, and wait for their name to come back."""
    from keylane import groups

    if plan == "sticky":
        _confirm_first_mapping(link, stream, group, yes=stop_go_members)

    async def change(connection: Connection, before: ElasticConfig) -> ElasticConfig:
        _check_listed(group, members, before)
        _check_plan_word(group, plan, before)
        return await groups.drop_members(connection, stream, group, members, plan=plan, stop_go_members=True)

    _apply(link, stream, group, change, as_json=as_json)


@command(app, "create-mapping", "createmapping", "cm")
def create_mapping(
    stream: StreamArgument,
    group: GroupArgument,
    mappings: Mappings,
    stop_go_members: StopGoMembers = False,
    as_json: JsonOption = False,
    *,
    link: ConnectionOptions,
) -> None:
    """Set a mapping of your own, such as worker-1:0-3,8 worker-2:4-7,9

    It replaces the members, or the mapping that there is. Every partition needs exactly one member.
    """
    from keylane import groups
    from keylane.cli.groups.arguments import parse_mappings

    plan = dict(parse_mappings(mappings).shares)
    _confirm_first_mapping(link, stream, group, yes=stop_go_members)

    async def change(connection: Connection, _: ElasticConfig) -> ElasticConfig:
        return await groups.set_mapping(connection, stream, group, plan, stop_go_members=True)

    _apply(link, stream, group, change, as_json=as_json)


@command(app, "delete-mapping", "deletemapping", "dm")
def delete_mapping(
    stream: StreamArgument,
    group: GroupArgument,
    force: ForceOption = False,
    as_json: JsonOption = False,
    *,
    link: ConnectionOptions,
) -> None:
    """Take the mapping away. Asks first.

    Nobody owns a partition then, until members are added or another mapping is set.
    """
    from keylane import groups
    from keylane.errors import GroupError

    now = connected(link, lambda connection: _config(connection, stream, group))
    if now.mappings is None:
        raise GroupError(f"group {group!r} of stream {stream!r} has no mapping: nothing was changed")
    if not force:
        confirm(
            f"Delete the mapping of group {group!r} of stream {stream!r}? Nobody gets messages after that.",
            otherwise="nothing was changed",
        )

    async def change(connection: Connection, _: ElasticConfig) -> ElasticConfig:
        return await groups.delete_mapping(connection, stream, group)

    _apply(link, stream, group, change, as_json=as_json)


# ---- plan ------------------------------------------------------------------------------------------


@command(app, "plan")
def plan(
    stream: StreamArgument,
    group: GroupArgument,
    *,
    add: Annotated[list[str] | None, typer.Option(metavar="MEMBER", help="With this member. Repeatable.")] = None,
    drop: Annotated[list[str] | None, typer.Option(metavar="MEMBER", help="Without this member. Repeatable.")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the sticky plan to FILE, for apply-plan.")
    ] = None,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Show what a change would move. Changes nothing.

    Compares the balanced plan, which every language computes by itself, with the sticky one, which moves the fewest
    partitions. Without --add and --drop it shows what a new plan for the same members would move.
    """
    from keylane.cli.groups.snapshot import moves_object, plan_object
    from keylane.core.names import check_member_name
    from keylane.groups.admin import planned, write_plan_file

    added, dropped = [check_member_name(name) for name in add or ()], drop or []
    config = connected(link, lambda connection: _config(connection, stream, group))
    _check_listed(group, dropped, config)
    now = config.plan
    members = [name for name in dict.fromkeys([*now.members, *added]) if name not in dropped]
    plans: dict[str, Plan] = {
        "balanced": planned(config, members, "balanced"),
        "sticky": planned(config, members, "sticky"),
    }
    if save is not None:
        write_plan_file(save, stream, group, plans["sticky"])
    if as_json:
        answer: dict[str, Any] = {
            "stream": stream,
            "group": group,
            "max_members": config.partitions,
            "add": added,
            "drop": dropped,
            "now": plan_object(now),
        }
        print_answer(as_json, answer | {name: moves_object(now, then) for name, then in plans.items()}, "")
        return
    from keylane.cli.display import console
    from keylane.cli.groups.render import moves_line, plan_table

    for name, then in plans.items():
        typer.echo(moves_line(name, now, then, config.partitions))
    if config.mappings is not None:
        typer.echo("The group has a mapping: only sticky can change it; balanced needs delete-mapping first.")
    console().print(plan_table(now, plans))
    if save is not None:
        typer.echo(f"the sticky plan is in {save}: keylane elastic apply-plan {save}")


@command(app, "apply-plan")
def apply_plan(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON with a mapping of members to partitions; - for stdin.")
    ],
    stream: Annotated[
        str | None, typer.Argument(metavar="STREAM", help="The stream, if the file does not name it.")
    ] = None,
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP", help="The group, if the file does not name it.")
    ] = None,
    force: ForceOption = False,
    *,
    stop_go_members: StopGoMembers = False,
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Apply a mapping from a file. Shows what moves and asks first.

    If the group is changed by somebody else meanwhile, nothing is applied.
    """
    import sys

    from keylane.cli.display import console
    from keylane.cli.groups.render import plan_table
    from keylane.core.plans import check_plan
    from keylane.errors import InvalidInput
    from keylane.groups.admin import read_plan_file

    if str(file) == "-" and not force:
        raise InvalidInput("the plan comes from standard input, so nobody can be asked: give --force, or a file")
    read = read_plan_file(file, sys.stdin)
    stream = _resolve_name("stream", stream, read.stream)
    group = _resolve_name("group", group, read.group)
    seen = connected(link, lambda connection: _config(connection, stream, group))
    then = check_plan(read.plan, seen.partitions)
    if seen.mappings is None:
        confirm_stop_of_go_members(group, len(seen.group_filters), yes=stop_go_members, may_ask=not force)
    if not force:
        moves = len(then.moves_from(seen.plan))
        console(stderr=True).print(plan_table(seen.plan, {"then": then}))
        confirm(
            f"Apply this plan? {moves:,} of {seen.partitions:,} partitions change hands.",
            otherwise="nothing was changed",
        )
    after = connected(link, lambda connection: _replace_plan(connection, stream, group, seen, then))
    _show_change((stream, group), seen, after, as_json=as_json)


# ---- details -------------------------------------------------------------------------------------


def _ask_for_wildcards(subject_filter: str) -> str | None:
    """Ask on stderr and read the answer from stdin; None if nobody answers."""
    import sys

    question = f"numbers of the '*' of {subject_filter!r} that make up the key, with blanks (none: the whole subject): "
    typer.echo(question, nl=False, err=True)
    answer = sys.stdin.readline()
    return answer if answer.endswith("\n") or answer.strip() else None


def _confirm_first_mapping(link: ConnectionOptions, stream: str, group: str, *, yes: bool) -> None:
    """Ask before the group gets its first mapping, if that stops members in Go."""
    if yes:
        return
    now = connected(link, lambda connection: _config(connection, stream, group))
    if now.mappings is None:
        confirm_stop_of_go_members(group, len(now.group_filters), yes=False)


def _resolve_name(what: str, given: str | None, in_file: str | None) -> str:
    from keylane.errors import InvalidInput

    if given is not None and in_file is not None and given != in_file:
        raise InvalidInput(f"the plan was made for {what} {in_file!r}, not {given!r}: nothing was changed")
    if (name := given or in_file) is None:
        raise InvalidInput(f"the plan names no {what}: give STREAM and GROUP after the file")
    return name


async def _config(connection: Connection, stream: str, group: str) -> ElasticConfig:
    from keylane.cli.groups.snapshot import config_of
    from keylane.groups import ElasticConfig

    config = await config_of(connection, "elastic", stream, group)
    assert isinstance(config, ElasticConfig)
    return config


def _apply(
    link: ConnectionOptions,
    stream: str,
    group: str,
    change: Callable[[Connection, ElasticConfig], Awaitable[ElasticConfig]],
    *,
    as_json: bool,
    notes: Callable[[ElasticConfig], Sequence[str]] = lambda _: (),
) -> None:
    """Change the group and show what moves. `notes`: what else to say, from the configuration before."""

    async def work(connection: Connection) -> tuple[ElasticConfig, ElasticConfig]:
        before = await _config(connection, stream, group)
        return before, await change(connection, before)

    before, after = connected(link, work)
    _show_change((stream, group), before, after, as_json=as_json, notes=notes(before))


async def _replace_plan(
    connection: Connection, stream: str, group: str, seen: ElasticConfig, then: Plan
) -> ElasticConfig:
    """Store the plan, but only if the group still has the configuration that was confirmed."""
    from keylane.errors import GroupConflict
    from keylane.groups.store import change_elastic

    def decide(config: ElasticConfig) -> ElasticConfig:
        if config != seen:
            raise GroupConflict(
                f"group {group!r} of stream {stream!r} was changed by somebody else meanwhile: run the command again"
            )
        return config.with_owners(mappings=then)

    return await change_elastic(connection, stream, group, decide)


def _check_listed(group: str, members: list[str], config: ElasticConfig) -> None:
    for member in members:
        if not config.has_member(member):
            from keylane.groups.admin import not_listed

            raise not_listed(group, member, config.plan.members)


def _check_plan_word(group: str, plan: str, config: ElasticConfig) -> None:
    from keylane.errors import GroupError

    if plan == "balanced" and config.mappings is not None:
        raise GroupError(
            f"group {group!r} has a mapping, and balanced would throw it away: give --plan sticky, or use "
            "create-mapping, or delete-mapping first"
        )


def _show_change(
    where: tuple[str, str], before: ElasticConfig, after: ElasticConfig, *, as_json: bool, notes: Sequence[str] = ()
) -> None:
    from keylane.cli.groups.snapshot import config_object, moves_object, unowned_partitions
    from keylane.core.plans import ranges

    moved = moves_object(before.plan, after.plan)
    if as_json:
        answer = config_object(*where, after)
        print_answer(as_json, answer | {"moves": moved["moves"], "moved": moved["moved"], "notes": list(notes)}, "")
        return
    from keylane.cli.display import console
    from keylane.cli.groups.render import moves_line, plan_table

    for note in notes:
        typer.echo(note)
    typer.echo(moves_line(where[1], before.plan, after.plan, after.partitions))
    if moved["moves"]:
        console().print(plan_table(before.plan, {"then": after.plan}))
    if unowned := unowned_partitions(after):
        typer.echo(f"nobody owns partitions {ranges(unowned)} now: their messages wait")
