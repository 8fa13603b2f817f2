"""What a group gave up, as much of it as the page shows: dead letters, and the first message of each parked key."""

from __future__ import annotations

import asyncio
import base64
from typing import NamedTuple

from keylane.core.parked_keys import key_token, parked_subject
from keylane.errors import NotFound
from keylane.jetstream import Connection, parse_headers, parse_time, streams
from keylane.overview import GroupOverview
from keylane.processing.dead_letters import DeadLetter, dead_letter_stream, list_dead_letters, read_letter
from keylane.processing.key_parking import wishes

_MOST = 100
_MOST_READ = 1000


class ParkedKey(NamedTuple):
    """A parked key."""

    first: DeadLetter
    """The message that failed. The others wait behind it."""
    messages: int
    is_releasing: bool
    """Whether somebody has asked for its release."""


async def dead_letters(connection: Connection, group: GroupOverview) -> list[DeadLetter]:
    """The oldest ones, without those of parked keys; 100 at most."""
    found: list[DeadLetter] = []
    async for one in list_dead_letters(connection, group.stream, group=group.name, limit=_MOST_READ):
        if not one.is_parked:
            found.append(one)
            if len(found) == _MOST:
                break
    return found


async def parked_keys(connection: Connection, group: GroupOverview) -> list[ParkedKey]:
    """The parked keys of a group, 100 at most, each with the message that failed."""
    name = dead_letter_stream(group.stream)
    counts, wished = await asyncio.gather(
        streams.subject_counts(connection, name, parked_subject(group.stream, group.name, "*")),
        wishes(connection, group.stream, group.name),
    )
    releasing = {one.token for one in wished}
    subjects = sorted(counts)[:_MOST]
    firsts = await asyncio.gather(*(_first(connection, name, one) for one in subjects))
    return [
        ParkedKey(first, counts[subject], key_token(first.key) in releasing)
        for subject, first in zip(subjects, firsts, strict=True)
        if first is not None
    ]


async def _first(connection: Connection, name: str, subject: str) -> DeadLetter | None:
    """None: it was released meanwhile."""
    try:
        wire = await streams.get_message(connection, name, sequence=1, next_by_subject=subject)
    except NotFound:
        return None
    head, data = (base64.b64decode(wire.get(part, "")) for part in ("hdrs", "data"))
    return read_letter(wire["seq"], parse_time(wire["time"]), wire["subject"], parse_headers(head), data)
