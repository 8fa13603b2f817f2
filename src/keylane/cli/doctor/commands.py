"""`keylane doctor`: looks at the server, its streams, groups and fleets, and says what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from keylane.cli.command import (
    ConnectionOptions,
    JsonOption,
    complete_stream,
    connected,
    print_answer,
    single_command,
)

if TYPE_CHECKING:
    from keylane.core.diagnosis_facts import DoctorFacts, Finding
    from keylane.jetstream import Connection

_CANNOT_LOOK = 2


def doctor(
    stream: Annotated[
        str | None,
        typer.Argument(metavar="STREAM", help="Only this stream and its readers.", autocompletion=complete_stream),
    ] = None,
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="Only this group or fleet of it.")] = None,
    watch: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Watch so long for pins that time out; 30 sees most that flap."),
    ] = 0.0,
    as_json: JsonOption = False,
    *,
    link: ConnectionOptions,
) -> None:
    """Say what is wrong with a server, its streams, groups and fleets: what, why it matters, the command that fixes it.

    Changes nothing. What this user may not see is reported, never taken for fine. Exit code 0: nothing to do, 1:
    something is, 2: it could not look.

    \b
      keylane doctor
      keylane doctor ORDERS billing --watch 30
    """
    from keylane.errors import KeylaneError

    async def look(connection: Connection) -> tuple[str, DoctorFacts, tuple[Finding, ...]]:
        from keylane.operations.diagnosis import findings

        return connection.server, *await findings(connection, stream, group, watch_s=watch)

    try:
        server, facts, found = connected(link, look)
    except KeylaneError as error:
        typer.echo(f"keylane: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(_CANNOT_LOOK) from None
    from keylane.cli.doctor.render import as_wire, needs_action

    if as_json:
        print_answer(as_json, as_wire(server, facts, found), "")
    else:
        from keylane.cli.display import console
        from keylane.cli.doctor.render import report

        console().print(report(server, facts, found), soft_wrap=False)
    raise typer.Exit(1 if needs_action(found) else 0)


app = single_command(doctor)
