"""A stream or consumer that does not exist, as an error that names those that do.

For the edge of a program: code that only asks whether something exists catches `NotFound` and pays for no list.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from keylane.core.name_suggestions import name_missing
from keylane.errors import KeylaneError, NotFound
from keylane.jetstream import consumers, streams

if TYPE_CHECKING:
    from keylane.jetstream.connection import Connection
    from keylane.jetstream.streams import StreamInfo

_HIDDEN = ("KV_", "OBJ_")


@asynccontextmanager
async def naming_missing(connection: Connection) -> AsyncIterator[None]:
    """If something in the block needs a stream or a consumer that does not exist, the error names those that do.

    >>> async with naming_missing(connection):
    ...     await streams.info(connection, "ORDRES")
    keylane.errors.NotFound: there is no stream 'ORDRES'; did you mean 'ORDERS'? There is: ORDERS, REFUNDS
    """
    try:
        yield
    except NotFound as error:
        if error.names_are_listed or not error.stream:
            raise
        raise await with_names(connection, error) from error


async def existing_stream(connection: Connection, stream: str) -> StreamInfo:
    """As `streams.info`; if there is no such stream, the error names those that do exist."""
    async with naming_missing(connection):
        return await streams.info(connection, stream)


async def with_names(connection: Connection, error: NotFound) -> NotFound:
    """The same error with the names that exist, or as it is where they cannot be listed."""
    problem = no_such_stream(error.stream) if not error.consumer else no_such_consumer(error.stream, error.consumer)
    try:
        if error.consumer:
            existing = await consumers.names(connection, error.stream)
        else:
            existing = await stream_names(connection, also=error.stream)
    except KeylaneError as failure:
        text = f"{problem}, and the existing names cannot be listed: {failure}"
    else:
        text = name_missing(problem, error.consumer or error.stream, existing)
    return NotFound(
        error.code,
        error.err_code,
        error.description,
        text=text,
        stream=error.stream,
        consumer=error.consumer,
        names_are_listed=True,
    )


async def stream_names(connection: Connection, *, also: str = "") -> list[str]:
    """The streams of the account without those of buckets, unless `also` looks like the name of one."""
    hidden = () if also.startswith(_HIDDEN) else _HIDDEN
    return [name for name in await streams.names(connection) if not name.startswith(hidden)]


def no_such_stream(stream: str) -> str:
    return f"there is no stream {stream!r}"


def no_such_consumer(stream: str, consumer: str) -> str:
    return f"stream {stream!r} has no consumer {consumer!r}"
