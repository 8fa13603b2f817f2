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
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

    from keylane.errors import NotFound
    from keylane.jetstream import Connection, ConsumerInfo, PriorityGroupState
    from keylane.priority import Pinned, Unpinned


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # a repr would show the password
class ConnectionOptions:
    """Where to connect and as whom, as given on the command line. Each field is one option."""

    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            "-s",
            metavar="URL",
            help="Server URL, or several with commas. Else NATS_URL, else the context, else 127.0.0.1:4222.",
        ),
    ] = None
    context: Annotated[str | None, typer.Option(metavar="NAME", help="Use this context of the `nats` tool.")] = None
    creds: Annotated[Path | None, typer.Option(metavar="FILE", help="Log in with a creds file.")] = None
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="Log in as this user; without a password it is a token.")
    ] = None
    password: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Its password. Others can see it here; NATS_USER and NATS_PASSWORD hide it."),
    ] = None
    nkey: Annotated[Path | None, typer.Option(metavar="FILE", help="Log in with an nkey seed file.")] = None
    tlsca: Annotated[Path | None, typer.Option(metavar="FILE", help="Trust this certificate authority.")] = None
    tlscert: Annotated[Path | None, typer.Option(metavar="FILE", help="Client certificate.")] = None
    tlskey: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key.")] = None
    domain: Annotated[str | None, typer.Option(metavar="NAME", help="JetStream domain.")] = None
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for the server.")] = 5.0

    async def connect(self, **hooks: Callable[[str], None]) -> Connection:
        """Connect; `on_disconnect` and its like are handed on to `keylane.connect`."""
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
            **hooks,  # type: ignore[arg-type]
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

StreamArgument = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonChangesOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for each change.")]
JsonEventsOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for each event.")]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Do not ask.")]


def family(text: str, callback: Callable[..., None] | None = None) -> typer.Typer:
    """The app of one family of commands, such as `keylane elastic`."""
    return typer.Typer(help=text, callback=callback, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def command(app: typer.Typer, name: str, *aliases: str) -> Callable[[Callable[..., None]], None]:
    """Add a command that connects, under its name and under the aliases that the `cg` tool has for it."""

    def add(function: Callable[..., None]) -> None:
        expanded = expand_options(function)
        app.command(name)(expanded)
        for alias in aliases:
            app.command(alias, hidden=True)(expanded)

    return add


def connected(link: ConnectionOptions, work: Callable[[Connection], Awaitable[Answer]]) -> Answer:
    """Connect, do the work, close. Warnings of the library go to stderr."""
    import asyncio

    async def run() -> Answer:
        async with await link.connect() as connection:
            return await work(connection)

    with _warnings_on_stderr():
        return asyncio.run(run())


def print_answer(as_json: bool, value: Any, text: str) -> None:
    """The answer of a command: JSON for programs, text for people."""
    import json

    typer.echo(json.dumps(value, indent=2) if as_json else text)


def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it returns. Ctrl-C or SIGTERM cancels it, which is no failure."""
    import asyncio
    import signal

    async def run() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise

    asyncio.run(run())


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
_STREAM_NOT_FOUND = 10059
_LISTED_NAMES = 10


@contextmanager
def exit_on_invalid_input() -> Iterator[None]:
    """Print one line on stderr and exit with code 2 if the command cannot start."""
    from keylane.errors import ExtraMissing, InvalidInput, JavaMissing

    try:
        yield
    except (InvalidInput, JavaMissing, ExtraMissing) as error:
        typer.echo(f"keylane: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(_INVALID_INPUT) from None


async def naming_the_stream(connection: Connection, stream: str, work: Awaitable[Answer]) -> Answer:
    """Await `work`. If the stream does not exist, the error names the streams that do."""
    from keylane.errors import NotFound

    try:
        return await work
    except NotFound as error:
        raise await with_existing_names(connection, error, stream, None) from error


async def with_existing_names(connection: Connection, error: NotFound, stream: str, consumer: str | None) -> NotFound:
    """Return the same error with the name that was not found and the names that exist."""
    from keylane.errors import KeylaneError, NotFound
    from keylane.jetstream import consumers, streams

    try:
        if error.err_code == _STREAM_NOT_FOUND or consumer is None:
            problem, names = f"there is no stream {stream!r}", await streams.names(connection)
        else:
            problem = f"stream {stream!r} has no consumer {consumer!r}"
            names = await consumers.names(connection, stream)
    except KeylaneError as failure:
        return NotFound(
            error.code, error.err_code, f"{error.description}, and the existing names cannot be listed: {failure}"
        )
    listed = ", ".join(sorted(names)[:_LISTED_NAMES]) or "none"
    more = f" and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else ""
    return NotFound(error.code, error.err_code, f"{problem}; there is: {listed}{more}")


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
