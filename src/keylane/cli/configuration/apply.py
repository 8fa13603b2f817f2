"""`keylane apply FILE`: makes the server what the file says, by compare-and-set, and says each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from keylane.cli.command import ConnectionOptions, confirm, connected, single_command
from keylane.cli.configuration.plan import CANNOT, FileArgument, planned, show_plan

if TYPE_CHECKING:
    from keylane.core.configuration_difference import PlannedStep
    from keylane.jetstream import Connection


def apply(
    file: FileArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    allow_delete: Annotated[
        bool, typer.Option("--allow-delete", help="Also delete what the file says is to be absent, without asking.")
    ] = False,
    expect: Annotated[
        str | None, typer.Option(metavar="ID", help="Only if the plan is still the one that `keylane plan` showed.")
    ] = None,
    *,
    link: ConnectionOptions,
) -> None:
    """Make the server what a file says. Shows the plan and asks; a second run changes nothing.

    Nothing is deleted unless the file says `absent = true` and you confirm it, or give --allow-delete. A change that
    would lose messages or their order is refused before anything is changed, with the command that does it safely.

    Exit code 0: the server is as the file says, 1: it stopped or nobody confirmed, 2: the file is wrong or a change is
    refused; nothing was changed then.
    """
    wanted, made = planned(file, link)
    show_plan(made, as_json=False)
    if made.refused:
        raise typer.Exit(CANNOT)
    if not made.steps:
        return
    if expect is not None and expect != made.digest:
        typer.echo(
            f"keylane: this is plan {made.digest}, not {expect}: look at it again; nothing was changed", err=True
        )
        raise typer.Exit(1)
    if made.deletes and not allow_delete:
        question = f"Delete {', '.join(str(step.key) for step in made.deletes)}?"
        confirm(question, otherwise="nothing was changed", option="--allow-delete")
    if not yes:
        confirm(f"Apply plan {made.digest}?", otherwise="nothing was changed", option="--yes")

    async def work(connection: Connection) -> None:
        from keylane.operations.configuration import perform

        await perform(connection, made, wanted, _say)

    connected(link, work)


_DONE = {"create": "created", "change": "changed", "delete": "deleted"}


def _say(step: PlannedStep) -> None:
    typer.echo(f"{_DONE[step.action]} {step.key}")


app = single_command(apply)
