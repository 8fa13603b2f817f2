"""Errors as a user sees them: invalid input as one line and exit code 2; a missing stream with the names that exist."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from keylane.errors import NotFound
    from keylane.jetstream import Connection

Answer = TypeVar("Answer")

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
