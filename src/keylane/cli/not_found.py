"""What to say when a stream or a consumer is not there: its name, and the names that are."""

from __future__ import annotations

from keylane.errors import KeylaneError, NotFound
from keylane.jetstream import consumers, streams
from keylane.jetstream.connection import Connection

_STREAM_NOT_FOUND = 10059
_SHOWN = 10


async def explained(connection: Connection, error: NotFound, stream: str, consumer: str | None) -> NotFound:
    """The same error in words that name what was asked for and what there is instead."""
    try:
        if error.err_code == _STREAM_NOT_FOUND or consumer is None:
            said, known = f"there is no stream {stream!r}", await streams.names(connection)
        else:
            said, known = (
                f"stream {stream!r} has no consumer {consumer!r}",
                await consumers.names(connection, stream),
            )
    except KeylaneError as trouble:
        return NotFound(error.code, error.err_code, f"{error.description}, and its neighbours are unknown: {trouble}")
    there = ", ".join(sorted(known)[:_SHOWN]) or "none"
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return NotFound(error.code, error.err_code, f"{said}; there is: {there}{more}")
