"""What commands of several families share: arguments and options, the connection, the answer, signals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from keylane.cli.connection_options import ConnectionOptions, takes_connection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

    from keylane.jetstream import Connection

Answer = TypeVar("Answer")

INTERRUPTED = 130
"""The exit code after a second Ctrl-C."""

StreamArgument = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonChangesOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for each change.")]
JsonEventsOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for each event.")]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Do not ask.")]


def command(app: typer.Typer, name: str, *aliases: str) -> Callable[[Callable[..., None]], None]:
    """Add a command that connects, under its name and under the aliases that the `cg` tool has for it."""

    def add(function: Callable[..., None]) -> None:
        connecting = takes_connection(function)
        app.command(name)(connecting)
        for alias in aliases:
            app.command(alias, hidden=True)(connecting)

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
