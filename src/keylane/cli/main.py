"""The `keylane` command: puts the sub-commands together and turns errors into one line.

Each sub-command lives in a file of its own and imports what it needs when it runs, so that help is quick.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from keylane import __version__
from keylane.cli import consumer, demo, elastic, server, static
from keylane.errors import KeylaneError

app = typer.Typer(
    name="keylane",
    help="Partitioned consumer groups on NATS JetStream: every key its own ordered lane.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(server.app, name="server")
app.add_typer(consumer.app, name="consumer")
app.add_typer(static.app, name="static")
app.add_typer(elastic.app, name="elastic")
app.command()(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"keylane {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    del version  # handled by its callback


def main() -> None:
    """Run the command. Exit codes: 0 done, 1 a `KeylaneError` (one line on stderr), 2 wrong usage."""
    try:
        app()
    except KeylaneError as error:
        typer.echo(f"keylane: {' '.join(str(error).split())}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
