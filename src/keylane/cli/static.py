"""`keylane static …`: groups on a stream whose subjects begin with a partition number. They never change."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keylane.cli.connecting import ConnectionOptions
from keylane.cli.group_commands import (
    DialectOption,
    GroupArgument,
    Json,
    Mappings,
    MaxMembers,
    Stream,
    add_shared_commands,
    command,
    connected,
    say,
)

if TYPE_CHECKING:
    from keylane.groups import StaticConfig
    from keylane.jetstream.connection import Connection

app = typer.Typer(
    help="Static groups: on a stream that carries partition numbers; their members never change.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
_create = typer.Typer(help="Create a static group.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(_create, name="create")
add_shared_commands(app, "static")

_Filter = Annotated[
    str, typer.Argument(metavar="FILTER", help="Only these subjects, without the partition number; '>' for all.")
]
_MoreFilters = Annotated[
    list[str] | None, typer.Option("--filter", metavar="FILTER", help="One more filter. May be repeated.")
]


@command(_create, "balanced")
def balanced(
    stream: Stream,
    group: GroupArgument,
    max_members: MaxMembers,
    subject_filter: _Filter,
    members: Annotated[list[str], typer.Argument(metavar="MEMBER...", help="The members' names.")],
    *,
    more_filters: _MoreFilters = None,
    dialect: DialectOption = "present",
    as_json: Json = False,
    link: ConnectionOptions,
) -> None:
    """Create a group whose partitions are spread evenly over its members."""
    filters = [subject_filter, *(more_filters or ())]
    make = partial(_make, stream, group, max_members=max_members, filters=filters, members=members, dialect=dialect)
    _show(stream, group, connected(link, make), as_json=as_json)


@command(_create, "mapped")
def mapped(
    stream: Stream,
    group: GroupArgument,
    max_members: MaxMembers,
    subject_filter: _Filter,
    mappings: Mappings,
    *,
    more_filters: _MoreFilters = None,
    dialect: DialectOption = "present",
    as_json: Json = False,
    link: ConnectionOptions,
) -> None:
    """Create a group with a mapping of your own, such as: worker-1:0-3,8 worker-2:4-7,9"""
    from keylane.cli.group_words import mapping_from_words

    plan = dict(mapping_from_words(mappings).shares)
    filters = [subject_filter, *(more_filters or ())]
    make = partial(_make, stream, group, max_members=max_members, filters=filters, mappings=plan, dialect=dialect)
    _show(stream, group, connected(link, make), as_json=as_json)


async def _make(stream: str, group: str, connection: Connection, **how: Any) -> StaticConfig:
    from keylane import groups
    from keylane.cli.group_sight import explaining_the_stream

    making = groups.create_static(connection, stream, group, **how)
    return await explaining_the_stream(connection, stream, making)


def _show(stream: str, group: str, config: StaticConfig, *, as_json: bool) -> None:
    from keylane.cli.groups_told import config_object

    words = f"created static group {group!r} of stream {stream!r}: {config.max_members:,} partitions, "
    say(as_json, config_object(stream, group, config), words + f"members {', '.join(config.plan.members)}")
