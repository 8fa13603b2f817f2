"""What the readers of all kinds of groups ask the server for, each thing once, and not too much at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from keylane.dead_letters import dead_letter_stream
from keylane.errors import KeylaneError, NotFound
from keylane.jetstream import Connection, ConsumerInfo, consumers, first_messages, parse_time, streams

Answer = TypeVar("Answer")

_AT_ONCE = 32


class Oldest(NamedTuple):
    """The first message of a subject filter from a sequence on."""

    sequence: int
    age_s: float


class GivenUp(NamedTuple):
    """What a group gave up."""

    dead_letters: int = 0
    parked_keys: int = 0
    parked_messages: int = 0


class AccountReader:
    """The streams of an account as they were when it was made, and what is asked for about them since."""

    def __init__(self, connection: Connection, found: Mapping[str, dict[str, Any]]) -> None:
        self.connection = connection
        self.streams = found
        self.read_at = datetime.now(UTC)
        self._limit = asyncio.Semaphore(_AT_ONCE)
        self._consumers: dict[str, asyncio.Task[dict[str, ConsumerInfo]]] = {}
        self._given_up: dict[str, asyncio.Task[dict[str, GivenUp]]] = {}

    async def limited(self, work: Awaitable[Answer]) -> Answer:
        async with self._limit:
            return await work

    async def consumers(self, stream: str) -> dict[str, ConsumerInfo]:
        """All consumers of a stream, by their names."""
        if stream not in self._consumers:
            self._consumers[stream] = asyncio.create_task(self.limited(self._list(stream)))
        return await self._consumers[stream]

    async def _list(self, stream: str) -> dict[str, ConsumerInfo]:
        return {info.name: info async for info in consumers.list_all(self.connection, stream)}

    async def oldest(self, stream: str, questions: Sequence[tuple[str, int]]) -> list[Oldest | None]:
        """For each pair of a subject filter and a sequence the first message from there on; None: there is none."""
        if not self.streams[stream]["config"].get("allow_direct"):
            return list(await asyncio.gather(*(self._oldest_of(stream, *one) for one in questions)))
        found = await first_messages(self.connection, stream, questions)
        return [None if one is None else Oldest(one.sequence, self.age_s(one.time)) for one in found]

    async def _oldest_of(self, stream: str, subject_filter: str, sequence: int) -> Oldest | None:
        try:
            message = await self.limited(
                streams.get_message(self.connection, stream, sequence=max(sequence, 1), next_by_subject=subject_filter)
            )
        except NotFound:
            return None
        return Oldest(int(message["seq"]), self.age_s(parse_time(message["time"])))

    def age_s(self, time: datetime) -> float:
        return max(0.0, (datetime.now(UTC) - time).total_seconds())

    async def given_up(self, stream: str, group: str) -> GivenUp | None:
        """What a group of a stream gave up; None: that cannot be read."""
        if dead_letter_stream(stream) not in self.streams:
            return GivenUp()
        if stream not in self._given_up:
            self._given_up[stream] = asyncio.create_task(self.limited(self._count_given_up(stream)))
        try:
            return (await self._given_up[stream]).get(group, GivenUp())
        except KeylaneError:
            return None

    async def _count_given_up(self, stream: str) -> dict[str, GivenUp]:
        counts = await streams.subject_counts(self.connection, dead_letter_stream(stream), f"keylane.dlq.{stream}.>")
        return given_up_by_group(counts)


def given_up_by_group(counts: Mapping[str, int]) -> dict[str, GivenUp]:
    """From the number of messages on each subject of a dead-letter stream.

    >>> given_up_by_group({"keylane.dlq.S.g.3": 2, "keylane.dlq.S.g.parked.ab": 5, "keylane.dlq.S.g.fence.3": 1})
    {'g': GivenUp(dead_letters=2, parked_keys=1, parked_messages=5)}
    """
    found: dict[str, GivenUp] = {}
    for subject, messages in counts.items():
        words = subject.split(".")
        if len(words) < 5 or words[4] in ("fence", "release"):
            continue
        letters, keys, parked = found.get(words[3], GivenUp())
        is_parked = words[4] == "parked"
        found[words[3]] = (
            GivenUp(letters, keys + 1, parked + messages) if is_parked else GivenUp(letters + messages, keys, parked)
        )
    return found
