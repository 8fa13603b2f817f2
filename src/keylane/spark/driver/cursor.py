"""A durable consumer that nobody reads: it stands where a query stands, so that every NATS tool sees the query's lag.

On a stream with interest retention it is also what keeps messages for the query, and lets them go.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from keylane.errors import InvalidInput, NotFound
from keylane.jetstream import consumers
from keylane.jetstream.connection import Connection
from keylane.jetstream.consumers import AckPolicy, ConsumerConfig, ConsumerInfo

_QUERY = "keylane-query"


class Cursor:
    """The consumer `spark-<query>` of a stream. `keeps` messages for the query on streams with interest retention."""

    def __init__(
        self, connection: Connection, stream: str, query: str, filters: Sequence[str], *, keeps: bool = False
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._query = query
        self._keeps = keeps
        self._there = True
        ack_policy: AckPolicy = "explicit" if keeps else "none"
        self._config = ConsumerConfig(
            durable_name=f"spark-{query}",
            description=f"how far the Spark query {query} is; nobody reads here",
            ack_policy=ack_policy,
            filter_subjects=tuple(filters) or None,
            metadata={_QUERY: query},
        )

    @property
    def name(self) -> str:
        return f"spark-{self._query}"

    async def ensure(self) -> None:
        """Make the consumer, or take the one that an earlier run of the query made."""
        try:
            found = await consumers.info(self._connection, self._stream, self.name)
        except NotFound:
            await consumers.create(self._connection, self._stream, self._config, action="create")
            return
        if (found.config.metadata or {}).get(_QUERY) != self._query:
            raise InvalidInput(
                f"stream {self._stream!r} has a consumer {self.name!r} that is not the query's: delete it, or give the "
                "query another name"
            )
        if _filters(found) == sorted(self._config.filter_subjects or ()):
            return
        if self._keeps:
            raise InvalidInput(
                f"query {self._query!r} kept {', '.join(_filters(found)) or 'all'} of stream {self._stream!r} before, "
                f"and now reads {', '.join(self._config.filter_subjects or ()) or 'all'}: what it did not keep is "
                "gone. Give the old filters or partitions, or a new queryName and a new checkpoint directory"
            )
        await consumers.delete(self._connection, self._stream, self.name)
        await consumers.create(self._connection, self._stream, self._config, action="create")

    async def move(self, sequence: int) -> None:
        """Stand behind `sequence`: what is pending then is what the query has not done."""
        if not self._connection.supports("consumer_reset"):
            await self._replace(sequence + 1)
            return
        if not self._there:
            await self.ensure()
        self._there = False  # a server without this consumer does not answer at all
        await consumers.reset(self._connection, self._stream, self.name, sequence=sequence + 1)
        self._there = True

    async def _replace(self, first: int) -> None:
        """Without resets (server 2.13 and older) a consumer is moved by making it anew."""
        assert not self._keeps, "without its consumer the stream would drop what the query has not read"
        with suppress(NotFound):
            await consumers.delete(self._connection, self._stream, self.name)
        moved = replace(self._config, deliver_policy="by_start_sequence", opt_start_seq=first)
        await consumers.create(self._connection, self._stream, moved, action="create")


def _filters(found: ConsumerInfo) -> list[str]:
    one = found.config.filter_subject
    return sorted(found.config.filter_subjects or ((one,) if one else ()))
