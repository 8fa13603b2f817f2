"""Dead letters of what never became a message: something that was to be published to a stream and never can be.

It looks like what a group gave up, in the same stream, so the same commands show, drop and replay it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from keylane.dispatch import error_line
from keylane.errors import ApiUnavailable, Disconnected, NotStored, OutcomeUnknown, RequestTimeout
from keylane.groups.dead_letter_headers import MAX_HEADER_BYTES, escaped, header_block, kept_lines
from keylane.groups.dead_letters import dead_letter_stream, ensure_dead_letter_stream
from keylane.jetstream import publish_raw

if TYPE_CHECKING:
    from keylane.jetstream import Connection

_TRY_S = 5.0
_PAUSE_S = 0.25
_PASSING = (NotStored, OutcomeUnknown, ApiUnavailable, RequestTimeout, Disconnected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpublished:
    """What was to be published, by whom, and why it cannot be."""

    stream: str
    """Where it was to be stored."""
    subject: str
    """As it was given, which may be the fault."""
    message_id: str
    """The same one within an hour is stored once."""
    header_lines: bytes
    """Its headers as they would have been sent; empty where they are the fault."""
    data: bytes
    group: str
    member: str
    partition: int
    error: BaseException


async def put_unpublished(connection: Connection, letter: Unpublished, *, timeout_s: float) -> None:
    """Store it as a dead letter of its stream. Returns when the server has confirmed it; else raises.

    Of data that is too large for the server a part is kept, without the subject: nobody can replay a part by mistake.
    `PublishRejected`: the dead-letter stream is full.
    """
    target = f"keylane.dlq.{letter.stream}.{letter.group}.{letter.partition}".encode()
    head, data = _fitting(letter, connection.nats.max_payload)
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while True:
        try:
            await ensure_dead_letter_stream(connection, letter.stream, like=letter.stream)
            await publish_raw(connection, target, head, data, _TRY_S)
        except _PASSING:
            if loop.time() + _PAUSE_S > end:
                raise
            await asyncio.sleep(_PAUSE_S)
        else:
            return


def _fitting(letter: Unpublished, room: int) -> tuple[bytes, bytes]:
    whole = _head(letter, letter.subject, letter.header_lines)
    if len(whole) + len(letter.data) <= room and len(whole) <= MAX_HEADER_BYTES:
        return whole, letter.data
    bare = _head(letter, "", b"")
    return bare, letter.data[: max(0, room - len(bare))]


def _head(letter: Unpublished, subject: str, header_lines: bytes) -> bytes:
    ours = {
        "Keylane-Subject": escaped(subject),
        "Keylane-Stream": escaped(letter.stream),
        "Keylane-Sequence": "0",
        "Keylane-Group": escaped(letter.group),
        "Keylane-Member": escaped(letter.member),
        "Keylane-Partition": str(letter.partition),
        "Keylane-Key": "",
        "Keylane-Tries": "1",
        "Keylane-Error": error_line(letter.error),
        "Keylane-Time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "Nats-Msg-Id": f"unpublished {escaped(letter.message_id)}",
        "Nats-Expected-Stream": dead_letter_stream(letter.stream),
    }
    lines = [(name.encode(), value.encode()) for name, value in ours.items()]
    return header_block([*lines, *kept_lines(b"NATS/1.0\r\n" + header_lines)])
