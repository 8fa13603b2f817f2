"""Deletes what a query has durably done from a work queue, and refuses to while anybody else reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from keylane.core.subjects import overlaps
from keylane.errors import AcknowledgeRefused, NoSuchGroup
from keylane.groups import get_config
from keylane.jetstream import consumers, streams
from keylane.jetstream.connection import Connection
from keylane.jetstream.consumers import ConsumerConfig

_AT_ONCE = 16
_ADVICE = (
    "Nothing is purged. A queue has one reader: stop the other one, or read without 'acknowledge', or let Spark read "
    "other partitions"
)


class Purging:
    """The purges of one query. No filters: the whole stream."""

    def __init__(self, connection: Connection, stream: str, filters: Sequence[str]) -> None:
        self._connection = connection
        self._stream = stream
        self._filters = tuple(filters)

    async def try_out(self) -> None:
        """Purge nothing, so that a stream or a user that may not purge is known at once."""
        await streams.purge(self._connection, self._stream, before_sequence=1)

    async def refuse_if_shared(self, wire: Mapping[str, Any]) -> None:
        """Raise `AcknowledgeRefused` if somebody else reads these messages. `wire` is the stream's info of now."""
        await self._refuse_members(wire["config"])
        if wire["state"]["consumer_count"]:
            async for one in consumers.list_all(self._connection, self._stream):
                if self._meets(one.config):
                    raise AcknowledgeRefused(
                        f"acknowledge=true would delete messages of queue {self._stream!r} that its consumer "
                        f"{one.name!r} has not handled. {_ADVICE}. Delete the consumer if nobody uses it"
                    )

    async def purge(self, sequence: int) -> None:
        """Delete everything up to `sequence`."""
        filters: Sequence[str | None] = self._filters or (None,)
        for begin in range(0, len(filters), _AT_ONCE):
            await asyncio.gather(
                *(
                    streams.purge(self._connection, self._stream, subject_filter=one, before_sequence=sequence + 1)
                    for one in filters[begin : begin + _AT_ONCE]
                )
            )

    async def _refuse_members(self, config: Mapping[str, Any]) -> None:
        """A member may be listed and only not running: its messages wait for it."""
        for source in config.get("sources") or ():
            stream, _, group = self._stream.partition(f"{source['name']}-")
            if stream or not group:
                continue
            try:
                found = await get_config(self._connection, source["name"], group, kind="elastic")
            except NoSuchGroup:
                continue
            if found.plan.members:
                raise AcknowledgeRefused(
                    f"acknowledge=true would delete messages of queue {self._stream!r} that group {group!r} of stream "
                    f"{source['name']!r} has not handled: it has the members {', '.join(found.plan.members)}. {_ADVICE}"
                )

    def _meets(self, config: ConsumerConfig) -> bool:
        one = config.filter_subject
        theirs = config.filter_subjects or ((one,) if one else ())
        if not theirs or not self._filters:
            return True
        return any(overlaps(mine, other) for mine in self._filters for other in theirs)
