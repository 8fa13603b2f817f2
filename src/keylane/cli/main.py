"""The `keylane` command: assembles the sub-commands and prints errors as one line.

Each command or family of commands has a package or module of its own, which is imported when the command line names it:
the list of all needs none of them, so that help is quick.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from keylane import __version__
from keylane.cli.command import COMPLETION_VARIABLE, ContextOption, ServerOption, default_map
from keylane.errors import KeylaneError, ServerUnreachable
from keylane.lazy import load_when_used

_SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Begin": {
        "demo": ("demo.commands", "See it work: members killed, added, dropped, and a verdict."),
        "server": ("server", "A real NATS server on this machine."),
        "stream": ("stream.commands", "Create, list, show and remove streams."),
        "pub": ("pub", "Publish messages."),
        "sub": ("sub", "Show messages, live or stored."),
    },
    "Work": {
        "run": ("app.run", "Run the handlers of a `keylane.App` in worker processes."),
        "elastic": ("groups.elastic", "Groups on any stream; members come and go."),
        "static": ("groups.static", "Groups on a stream with partition numbers."),
        "fleet": ("fleet.commands", "Workers that share the partitions by themselves."),
        "autoscale": ("autoscale", "As many workers or members as the lag needs."),
        "plan": ("configuration.plan", "What a file of streams, groups and fleets would change."),
        "apply": ("configuration.apply", "Make the server what a file says, step by step."),
        "dlq": ("dlq", "Messages that groups gave up."),
        "exactly-once": ("exactly_once", "A database after a restored bucket or stream."),
        "marshal": ("marshal.commands", "Consumers coordinated by nothing but a log."),
    },
    "Look": {
        "doctor": ("doctor.commands", "What is wrong, why it matters, and what fixes it."),
        "exporter": ("exporter", "Metrics of every group of an account."),
        "web": ("web", "A page that shows every group, live."),
        "consumer": ("consumer.commands", "Consumers, and who is pinned."),
        "pipeline": ("pipeline.commands", "What a stream and its journal tell, on Spark."),
        "spark": ("spark", "Programs on Apache Spark."),
        "completion": ("completion", "Completion for bash, zsh and fish."),
    },
}
"""Each command of the list: the module here that has its `app`, and what the list says about it."""

_DEFAULT_SERVER = "nats://127.0.0.1:4222"
_START_ONE = "; `keylane server run --port 4222` starts one"

COMMANDS = {name: about for section in _SECTIONS.values() for name, about in section.items()}


def load_command(name: str) -> Any:
    """The command of this name, as click knows it."""
    return typer.main.get_command(import_module(f"keylane.cli.{COMMANDS[name][0]}").app)


class _Commands(TyperGroup):
    """Loads a command when the command line names it. The list of commands has sections."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, text) in COMMANDS.items():
            self.add_command(TyperCommand(name, help=text, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            command = load_command(args[0])
            self.add_command(command, args[0])
            given = {name: ctx.params.get(name) for name in ("server", "context")}
            ctx.default_map = {args[0]: default_map(command, {name: one for name, one in given.items() if one})}
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()])


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"keylane {__version__}")
        raise typer.Exit


def _options(
    server: ServerOption = None,
    context: ContextOption = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Partitioned consumer groups on NATS JetStream: every key its own ordered lane."""
    del server, context, version  # the commands have them as their defaults; the version is its callback's


def _app() -> typer.Typer:
    return typer.Typer(
        name="keylane",
        cls=_Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        callback=_options,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def main() -> None:
    """Run the command. Exit codes: 0 done, 1 a `KeylaneError` (one line on stderr), 2 wrong usage."""
    if COMPLETION_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # it has no other home

        completion_init()
    load_when_used("aiohttp")  # nats-py imports it where it is installed; only a websocket needs it
    try:
        _app()(prog_name="keylane")
    except KeylaneError as error:
        hint = _START_ONE if isinstance(error, ServerUnreachable) and _DEFAULT_SERVER in str(error) else ""
        typer.echo(f"keylane: {' '.join(str(error).split())}{hint}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
