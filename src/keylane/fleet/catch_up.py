"""Reads one partition of a stream with limits from a position up to where its worker's consumer takes over.

A consumer of its own, in memory, that the server deletes when nobody reads it: the worker's consumer cannot go back in
the stream for one of its filters. What it delivers is acked to it, which bounds what is in flight; the partition's
position is kept elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress

from keylane.errors import ConsumerGone, KeylaneError, NotFound
from keylane.fleet.pinned_consumer import pinned_consumer, pinned_pulls
from keylane.fleet.shared_consumer import ConsumerTerms
from keylane.jetstream import Connection, Message, consumers, open_feed, streams

_log = logging.getLogger("keylane.fleet")

_IDLE_S = 60.0
_LOOK_EVERY_S = 0.25


class CatchUp:
    """The messages of one filter from above `after()` up to `upto()`, which may grow meanwhile."""

    def __init__(
        self,
        connection: Connection,
        worker_id: str,
        subject_filter: str,
        terms: ConsumerTerms,
        *,
        after: Callable[[], int],
        offered: Callable[[], int],
        upto: Callable[[], int],
        take: Callable[[list[Message]], None],
    ) -> None:
        """`after`: everything up to here is handled. `offered`: everything up to here was given to `take`."""
        self._connection = connection
        self._worker_id = worker_id
        self._filter = subject_filter
        self._terms = terms
        self._after = after
        self._offered = offered
        self._upto = upto
        self._take = take
        self._look = asyncio.Event()

    def __repr__(self) -> str:
        return f"<CatchUp {self._filter} from {self._after()} to {self._upto()}>"

    async def run(self) -> None:
        """Returns when everything was given to `take`, in the same turn in which that was found."""
        while await self._is_behind():
            try:
                await self._read()
            except ConsumerGone as error:
                _log.warning("%r: %s; reading on with another consumer", self, error)

    async def _is_behind(self) -> bool:
        """Whether a message below the end was not taken yet, as the stream's leader knows it."""
        upto = self._upto()
        try:
            found = await streams.get_message(
                self._connection, self._terms.stream, sequence=self._offered() + 1, next_by_subject=self._filter
            )
        except NotFound:
            return self._upto() != upto
        return int(found["seq"]) <= upto or self._upto() != upto

    async def _read(self) -> None:
        terms = self._terms
        config = pinned_consumer(
            terms,
            self._filter,
            self._after() + 1,
            name=f"{self._worker_id}-catch-up-{secrets.token_hex(6)}",
            inactive_threshold_s=_IDLE_S,
            num_replicas=1,
            mem_storage=True,
        )
        made = await consumers.create(self._connection, terms.stream, config, action="create")
        try:
            await self._read_from(made.name)
        finally:
            with suppress(KeylaneError):  # it ends by itself, too
                consumers.post_delete(self._connection, terms.stream, made.name)

    async def _read_from(self, consumer: str) -> None:
        options = pinned_pulls(self._terms, self._took)
        feed = await open_feed(self._connection, self._terms.stream, consumer, options)
        end = asyncio.create_task(feed.wait())
        try:
            while True:
                look = asyncio.create_task(self._look.wait())
                await asyncio.wait({look, end}, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                look.cancel()
                self._look.clear()
                if end.done():
                    end.result()
                    return
                if not await self._is_behind():
                    return
        finally:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)
            await feed.drain(0)

    def _took(self, batch: list[Message]) -> None:
        """What is above the end is taken as well: the end may grow, and the worker's consumer drops what is below."""
        self._take(batch)
        if batch[-1].sequence >= self._upto() or batch[-1].delivery.pending == 0:
            self._look.set()
