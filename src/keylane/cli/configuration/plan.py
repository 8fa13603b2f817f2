"""`keylane plan FILE`: what the file would change on the server, and what would move. Changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keylane.cli.command import ConnectionOptions, JsonOption, connected, print_answer, single_command

if TYPE_CHECKING:
    from keylane.core.configuration_difference import ConfigurationPlan
    from keylane.core.configuration_file import ResourceKey, WantedResource
    from keylane.jetstream import Connection

DIFFERS, CANNOT = 1, 2

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file: docs/configuration.md describes it.")]


def plan(file: FileArgument, as_json: JsonOption = False, *, link: ConnectionOptions) -> None:
    """Show what a file of streams, groups, fleets and dead letters would change on the server.

    Exit code 0: nothing, 1: something, 2: the file is wrong, it could not look, or a change is refused because it would
    lose messages or their order.
    """
    _, made = planned(file, link)
    show_plan(made, as_json=as_json)
    raise typer.Exit(CANNOT if made.refused else DIFFERS if made.steps else 0)


def planned(file: Path, link: ConnectionOptions) -> tuple[dict[ResourceKey, WantedResource], ConfigurationPlan]:
    """What the file wants, and the plan. Prints one line and exits with code 2 if there is none."""
    from keylane.errors import KeylaneError
    from keylane.operations.configuration import make_plan, read_configuration_file

    try:
        wanted = read_configuration_file(file)

        async def look(connection: Connection) -> ConfigurationPlan:
            return await make_plan(connection, wanted)

        return wanted, connected(link, look)
    except KeylaneError as error:
        typer.echo(f"keylane: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(CANNOT) from None


def show_plan(made: ConfigurationPlan, *, as_json: bool) -> None:
    from keylane.cli.configuration.render import plan_as_wire

    if as_json:
        print_answer(as_json, plan_as_wire(made), "")
        return
    from keylane.cli.configuration.render import plan_text
    from keylane.cli.display import console

    console().print(plan_text(made))


app = single_command(plan)
