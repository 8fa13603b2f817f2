"""What commands of several families share: options, the connection, questions and answers, errors, signals, the pin.

The names of the connection options are those of the `nats` tool. `keylane.connect` decides what replaces a missing one:
the environment or a context.

    @app.command()
    @expand_options
    def info(stream: str, *, link: ConnectionOptions) -> None:
        ...
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

    from keylane.jetstream import Connection, ConnectionHooks, ConsumerInfo, PriorityGroupState
    from keylane.priority import Pinned, Unpinned


CONNECTION_PANEL = "Connection options"
COMPLETION_VARIABLE = "_KEYLANE_COMPLETE"
"""In the environment of a command that a shell runs to learn how the line may go on."""
_COMPLETION_S = 1.0


def connection_option(*names: str, metavar: str, text: str, **more: Any) -> Any:
    """An option that help shows apart from those of the command itself."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=CONNECTION_PANEL, **more)


ServerOption = Annotated[
    str | None,
    connection_option(
        "--server",
        "-s",
        metavar="URL",
        text="Server URL, or several with commas. Else NATS_URL, else the context, else 127.0.0.1:4222.",
    ),
]
ContextOption = Annotated[str | None, connection_option(metavar="NAME", text="Use this context of the `nats` tool.")]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # a repr would show the password
class ConnectionOptions:
    """Where to connect and as whom, as given on the command line. Each field is one option."""

    server: ServerOption = None
    context: ContextOption = None
    creds: Annotated[Path | None, connection_option(metavar="FILE", text="Log in with a creds file.")] = None
    user: Annotated[
        str | None, connection_option(metavar="NAME", text="Log in as this user; without a password it is a token.")
    ] = None
    password: Annotated[
        str | None,
        connection_option(
            metavar="TEXT", text="Its password. Others can see it here; NATS_USER and NATS_PASSWORD hide it."
        ),
    ] = None
    nkey: Annotated[Path | None, connection_option(metavar="FILE", text="Log in with an nkey seed file.")] = None
    tlsca: Annotated[Path | None, connection_option(metavar="FILE", text="Trust this certificate authority.")] = None
    tlscert: Annotated[Path | None, connection_option(metavar="FILE", text="Client certificate.")] = None
    tlskey: Annotated[Path | None, connection_option(metavar="FILE", text="The certificate's key.")] = None
    domain: Annotated[str | None, connection_option(metavar="NAME", text="JetStream domain.")] = None
    timeout: Annotated[
        float, connection_option(metavar="SECONDS", text="How long to wait for the server.", min=0.1)
    ] = 5.0

    @asynccontextmanager
    async def open(self, hooks: ConnectionHooks | None = None) -> AsyncIterator[Connection]:
        """Connected for as long as the block lasts; a name that does not exist is an error with those that do."""
        from keylane.jetstream import naming_missing

        async with await self.connect(hooks) as connection, naming_missing(connection):
            yield connection

    async def connect(self, hooks: ConnectionHooks | None = None) -> Connection:
        """A connection for a program that closes it itself; a command uses `open`."""
        import keylane

        # A command prints what happens to the connection itself; log lines would break its screen.
        logging.getLogger("keylane").addHandler(logging.NullHandler())
        is_token = self.user is not None and self.password is None  # as in the `nats` tool
        return await keylane.connect(
            self.server,
            context=self.context,
            user=None if is_token else self.user,
            password=self.password,
            token=self.user if is_token else None,
            creds_file=self.creds,
            nkey_seed_file=self.nkey,
            tls_ca=self.tlsca,
            tls_cert=self.tlscert,
            tls_key=self.tlskey,
            domain=self.domain,
            name="keylane cli",
            connect_timeout_s=self.timeout,
            request_timeout_s=self.timeout,
            hooks=hooks,
        )


@functools.cache
def _options_of(kind: type[Any]) -> tuple[inspect.Parameter, ...]:
    """Cached, because reading annotations takes time and many commands have the same options."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=spec.default, annotation=hints[spec.name])
        for spec in fields(kind)
    )


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Show the fields of each parameter whose type is a dataclass as options, and pass them as one value."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    kinds: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    for name, parameter in inspect.signature(command).parameters.items():
        parameters += _options_of(kinds[name]) if name in kinds else [parameter.replace(annotation=hints[name])]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, kind in kinds.items():
            values[name] = kind(**{one.name: values.pop(one.name) for one in _options_of(kind)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


Answer = TypeVar("Answer")

INTERRUPTED = 130
"""The exit code after a second Ctrl-C."""


def complete_stream(ctx: typer.Context, incomplete: str) -> list[str]:
    """For the completion of the shell: the streams whose names begin like this."""
    from keylane.errors import KeylaneError
    from keylane.jetstream import stream_names

    given = {**ctx.find_root().params, **{name: one for name, one in ctx.params.items() if one is not None}}
    link = ConnectionOptions(server=given.get("server"), context=given.get("context"), timeout=_COMPLETION_S)
    try:
        return [name for name in connected(link, stream_names) if name.startswith(incomplete)]
    except KeylaneError:
        return []  # without a server there are no names to complete


StreamArgument = Annotated[
    str, typer.Argument(metavar="STREAM", help="The stream's name.", autocompletion=complete_stream)
]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonChangesOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for each change.")]
JsonEventsOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for each event.")]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Do not ask.")]


class SectionedCommand(TyperCommand):
    """A command whose help shows the options of each panel apart, without the cost of loading rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            title = "Arguments" if one.param_type_name == "argument" else "Options"
            if (row := one.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(one, "rich_help_panel", None) or title, []).append(row)
        for title in sorted(sections, key=lambda title: title == CONNECTION_PANEL):
            with formatter.section(title):
                formatter.write_dl(sections[title])


def family(text: str, callback: Callable[..., None] | None = None) -> typer.Typer:
    """The app of one family of commands, such as `keylane elastic`."""
    return typer.Typer(help=text, callback=callback, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def single_command(function: Callable[..., None]) -> typer.Typer:
    """The app of a command that has no family, such as `keylane pub`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=SectionedCommand)(expand_options(function))
    return app


def command(app: typer.Typer, name: str, *aliases: str) -> Callable[[Callable[..., None]], None]:
    """Add a command that connects, under its name and under the aliases that the `cg` tool has for it."""

    def add(function: Callable[..., None]) -> None:
        expanded = expand_options(function)
        app.command(name, cls=SectionedCommand)(expanded)
        for alias in aliases:
            app.command(alias, cls=SectionedCommand, hidden=True)(expanded)

    return add


def default_map(command: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values as defaults of this command and all its subcommands."""
    below = getattr(command, "commands", None)
    if below is None:
        return values
    return {name: default_map(one, values) for name, one in below.items()}


def run_loop(work: Coroutine[Any, Any, Answer]) -> Answer:
    """`asyncio.run` on uvloop where it is installed. Unlike `keylane.run` it leaves the signals alone."""
    import asyncio

    from keylane.loop import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


def connected(link: ConnectionOptions, work: Callable[[Connection], Awaitable[Answer]]) -> Answer:
    """Connect, do the work, close. Warnings of the library go to stderr."""

    async def run() -> Answer:
        async with link.open() as connection:
            return await work(connection)

    with _warnings_on_stderr():
        return run_loop(run())


def print_answer(as_json: bool, value: Any, text: str) -> None:
    """The answer of a command: JSON for programs, text for people."""
    from keylane.cli.formatting import json_text

    typer.echo(json_text(value, indent=2) if as_json else text)


def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it returns. Ctrl-C or SIGTERM cancels it, which is no failure."""
    import asyncio
    import signal
    import threading

    async def run() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        is_main = threading.current_thread() is threading.main_thread()  # only there signals can be handled
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        for number in numbers:
            loop.add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
        finally:
            for number in numbers:  # uvloop leaves them behind when it is closed
                loop.remove_signal_handler(number)

    run_loop(run())


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"keylane: warning: {record.getMessage()}", err=True)


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    log, handler = logging.getLogger("keylane.groups"), _StderrHandler(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def confirm(question: str, *, otherwise: str, option: str = "--force") -> None:
    """Return if the answer is yes; else print `otherwise` and exit with code 1.

    The question goes to stderr, so that stdout holds only the answer. No answer at all, as in a script, means no; a
    script gives `option` instead.
    """
    typer.echo(f"{question} [y/N] ", nl=False, err=True)
    answer = sys.stdin.readline()
    if answer.strip().lower() in ("y", "yes"):
        return
    if not answer.endswith("\n"):
        typer.echo(err=True)
        otherwise += f": nobody answered, and {option} does not ask"
    typer.echo(f"keylane: {otherwise}", err=True)
    raise typer.Exit(1)


_INVALID_INPUT = 2


@contextmanager
def exit_on_invalid_input() -> Iterator[None]:
    """Print one line on stderr and exit with code 2 if the command cannot start."""
    from keylane.errors import ExtraMissing, InvalidInput, JavaMissing

    try:
        yield
    except (InvalidInput, JavaMissing, ExtraMissing) as error:
        typer.echo(f"keylane: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(_INVALID_INPUT) from None


NEXT_PIN_S = 1.0


def pin_of(info: ConsumerInfo) -> PriorityGroupState | None:
    """The state of the pin, or None if the policy has no pin."""
    if info.config.priority_policy != "pinned_client" or not info.priority_groups:
        return None
    return info.priority_groups[0]


async def next_pin(events: AsyncIterator[Pinned | Unpinned]) -> str | None:
    """The id that the server pins next, or None if that takes longer than `NEXT_PIN_S`."""
    import asyncio

    from keylane.priority import Pinned

    try:
        async with asyncio.timeout(NEXT_PIN_S):
            async for event in events:
                if isinstance(event, Pinned):
                    return event.pin_id
    except TimeoutError:
        return None
    return None
