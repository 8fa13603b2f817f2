"""`keylane static …`: groups on a stream whose subjects begin with a partition number. They never change."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.command import (
    ConnectionOptions,
    GroupArgument,
    JsonOption,
    StreamArgument,
    command,
    connected,
    family,
    print_answer,
)
from keylane.cli.groups.commands import (
    DialectOption,
    FilterOption,
    Mappings,
    MaxMembers,
    StopGoMembers,
    add_shared_commands,
    confirm_stop_of_go_members,
    group_options,
)

if TYPE_CHECKING:
    from keylane.groups import StaticConfig
    from keylane.jetstream import Connection

app = family("Static groups: on a stream that carries partition numbers; their members never change.", group_options)
_create = family("Create a static group.")
app.add_typer(_create, name="create")
add_shared_commands(app, "static")


@command(_create, "balanced")
def balanced(
    stream: StreamArgument,
    group: GroupArgument,
    max_members: MaxMembers,
    members: Annotated[list[str], typer.Argument(metavar="MEMBER...", help="The members' names.")],
    *,
    filters: FilterOption = None,
    dialect: DialectOption = "present",
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Create a group whose partitions are spread evenly over its members."""
    _reject_filter(members, "MEMBER...")
    options: dict[str, Any] = {"filters": filters or [], "members": members, "dialect": dialect}
    create = partial(_create_group, stream, group, partitions=max_members, **options)
    _show(stream, group, connected(link, create), as_json=as_json)


@command(_create, "mapped")
def mapped(
    stream: StreamArgument,
    group: GroupArgument,
    max_members: MaxMembers,
    mappings: Mappings,
    *,
    filters: FilterOption = None,
    stop_go_members: StopGoMembers = False,
    dialect: DialectOption = "present",
    as_json: JsonOption = False,
    link: ConnectionOptions,
) -> None:
    """Create a group with a mapping of your own, such as: worker-1:0-3,8 worker-2:4-7,9"""
    from keylane.cli.groups.arguments import parse_mappings

    _reject_filter([one for one in mappings if ":" not in one], "MAPPING...")
    plan = dict(parse_mappings(mappings).shares)
    confirm_stop_of_go_members(group, len(filters or ()), yes=stop_go_members)
    options: dict[str, Any] = {"filters": filters or [], "mappings": plan, "dialect": dialect, "stop_go_members": True}
    create = partial(_create_group, stream, group, partitions=max_members, **options)
    _show(stream, group, connected(link, create), as_json=as_json)


def _reject_filter(words: list[str], argument: str) -> None:
    """In older versions the filter was an argument before the members."""
    from keylane.cli.groups.arguments import is_filter

    for word in words:
        if is_filter(word):
            instead = (
                "leave it out, as without --filter every subject is taken" if word == ">" else f"--filter {word!r}"
            )
            raise typer.BadParameter(f"{word!r} is a filter, and a filter is an option: {instead}", param_hint=argument)


async def _create_group(stream: str, group: str, connection: Connection, **options: Any) -> StaticConfig:
    from keylane import groups

    if (members := options.get("members")) and not options["filters"]:
        await _warn_about_filter(connection, stream, members[0])
    return await groups.create_static(connection, stream, group, **options)


async def _warn_about_filter(connection: Connection, stream: str, first: str) -> None:
    """Warn if the first member's name is also a subject of the stream, and so probably a filter."""
    from keylane.groups.stream_subjects import stored_subjects
    from keylane.jetstream import streams

    about = await streams.info(connection, stream)
    if any(one.split(".")[1:] == [first] for one in stored_subjects(about.config) or ()):
        typer.echo(
            f"keylane: warning: {first!r} is taken for a member, and it is also a subject of stream {stream!r}: "
            f"a filter is given as --filter {first!r}",
            err=True,
        )


def _show(stream: str, group: str, config: StaticConfig, *, as_json: bool) -> None:
    from keylane.cli.groups.snapshot import config_object

    text = f"created static group {group!r} of stream {stream!r}: {config.partitions:,} partitions, "
    print_answer(as_json, config_object(stream, group, config), text + f"members {', '.join(config.plan.members)}")
