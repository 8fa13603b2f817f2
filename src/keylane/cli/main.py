"""The `keylane` command: assembles the sub-commands and prints errors as one line.

Each family of commands has a package or module of its own and imports what it needs when it runs, so that help is
quick. Only the family that the command line names is loaded.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

from keylane import __version__
from keylane.errors import KeylaneError
from keylane.lazy import load_when_used

_FAMILIES = {
    "server": "server",
    "consumer": "consumer.commands",
    "static": "groups.static",
    "elastic": "groups.elastic",
    "fleet": "fleet.commands",
    "dlq": "dlq",
    "exactly-once": "exactly_once",
    "spark": "spark",
    "pipeline": "pipeline.commands",
    "marshal": "marshal.commands",
}
"""Each family of commands and the module here that has its `app`."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"keylane {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    del version  # handled by its callback


def _app(first: str) -> typer.Typer:
    """The command for a line with this first argument: with one family if it names one, else with all."""
    from keylane.cli.app.run import run_app
    from keylane.cli.command import expand_options
    from keylane.cli.demo.commands import demo

    app = typer.Typer(
        name="keylane",
        help="Partitioned consumer groups on NATS JetStream: every key its own ordered lane.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        callback=_options,
    )
    for name in [first] if first in _FAMILIES else _FAMILIES:
        app.add_typer(import_module(f"keylane.cli.{_FAMILIES[name]}").app, name=name)
    app.command("run")(expand_options(run_app))
    app.command()(demo)
    return app


def main() -> None:
    """Run the command. Exit codes: 0 done, 1 a `KeylaneError` (one line on stderr), 2 wrong usage."""
    load_when_used("aiohttp")  # nats-py imports it where it is installed; only a websocket needs it
    try:
        _app(sys.argv[1] if len(sys.argv) > 1 else "")()
    except KeylaneError as error:
        typer.echo(f"keylane: {' '.join(str(error).split())}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
