"""One partition that this consumer owns, from the won claim to the release: its state, heartbeats and end.

Owns: all mutable state of the partition. Other modules ask it (`may_start`, `is_over`) or report to it (`finished`,
`ask_to_end`); none of them changes it.

The end: when asked to give the partition up, it reads nothing more, lets running handlers finish while heartbeats go
on, then releases at the offset that is done. When the partition is lost, it starts nothing more and ends the handlers.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from keylane.core.heartbeat_pace import Pace, heartbeat_delay_s
from keylane.errors import KeylaneError
from keylane.marshal.delivery_modes import AtLeastOnce, AtMostOnce
from keylane.marshal.log_view import own_clock
from keylane.marshal.partition_claim import PartitionClaim
from keylane.retrying import Backoff

if TYPE_CHECKING:
    from keylane.marshal.message_dispatcher import MessageDispatcher
    from keylane.marshal.options import ConsumerOptions
    from keylane.marshal.source import Source, SourceRecord

_log = logging.getLogger("keylane.marshal")

DeliveryMode: TypeAlias = AtLeastOnce | AtMostOnce

LOST = "somebody else owns it now"

_READ_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class EndRequest:
    """Why a partition is to be given up, and what is left in the log."""

    why: str
    release: bool = True
    cool_down: bool = False
    """Whether this consumer should leave it to others for a while."""
    grace_s: float | None = None
    """How long running handlers may go on; None: as the options say."""


class OwnedPartition:
    """Made by the consumer for each claim that it wins; `serve` runs it."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        claim: PartitionClaim,
        delivery: DeliveryMode,
        source: Source,
        dispatcher: MessageDispatcher,
        backoff: Backoff,
        options: ConsumerOptions,
    ) -> None:
        self.where = claim.where
        self.key = claim.key
        self.token = claim.token
        self.delivery = delivery
        self.options = options
        self._claim = claim
        self._source = source
        self._dispatcher = dispatcher
        self._backoff = backoff
        self._is_over = False
        self._end_request: EndRequest | None = None
        self._end_requested = asyncio.Event()
        self._some_done = asyncio.Event()
        self._done = 0
        self._pace = Pace()
        self._committed: int | None = None

    def __repr__(self) -> str:
        state = "over" if self._is_over else "ours" if self.may_start() else "in doubt"
        where = f"{self.where.topic}/{self.where.partition}"
        return f"<OwnedPartition {where} token={self.token} {state} {self.delivery!r}>"

    # ---- handlers -----------------------------------------------------------------------------------

    def may_start(self) -> bool:
        """Whether a handler may start now."""
        return not self._is_over and self._claim.is_safe()

    @property
    def is_over(self) -> bool:
        """Whether no handler may start any more."""
        return self._is_over

    @property
    def retries(self) -> bool:
        """Whether a message whose handler failed is tried again."""
        return self.delivery.retries

    def finished(self, offset: int) -> None:
        """A message is done."""
        self.delivery.finish(offset)
        self._done += 1
        self._some_done.set()

    # ---- the delivery mode --------------------------------------------------------------------------

    async def batches(
        self, offset: int, limit: Callable[[], Awaitable[int]]
    ) -> AsyncGenerator[list[SourceRecord], None]:
        """The messages from an offset on, in order. `limit` waits, then gives the size of the next batch; 0 ends it.

        After a transient error the partition is read again from the offset that was reached.
        """
        while True:
            try:
                async with self._source.reader(*self.where, offset) as reader:
                    while most := await limit():
                        records = await reader.next(most, _READ_WAIT_S)
                        self._backoff.succeeded()
                        if records:
                            offset = records[-1].offset + 1
                            yield records
                    return
            except KeylaneError as error:
                await self._backoff.after(error)

    def dispatch(self, records: Sequence[SourceRecord]) -> None:
        """Hand messages to the handlers, in order."""
        self._dispatcher.offer(self, records)

    async def fewer_than(self, limit: int) -> None:
        """Wait until fewer messages than this are in flight, or the partition is over."""
        while self.delivery.in_flight >= limit and not self._is_over:
            self._some_done.clear()
            await self._some_done.wait()

    async def is_still_ours(self) -> bool:
        """Whether nobody else can own it: known from the last heartbeat, or by another one."""
        return self.may_start() or (not self._is_over and await self._claim.heartbeat())

    async def take(self, proposed: int) -> bool:
        """At most once: see `PartitionClaim.take`."""
        return await self._claim.take(proposed)

    async def heartbeat(self) -> bool:
        """False: the partition is no longer ours."""
        return await self._claim.heartbeat()

    # ---- the end ------------------------------------------------------------------------------------

    @property
    def end_request(self) -> EndRequest | None:
        return self._end_request

    def ask_to_end(
        self, why: str, *, release: bool = True, cool_down: bool = False, grace_s: float | None = None
    ) -> None:
        """`serve` gives the partition up. The first reason counts."""
        if self._end_request is None:
            self._end_request = EndRequest(why, release, cool_down, grace_s)
            self._end_requested.set()

    async def serve(self) -> str:
        """Read, dispatch and send heartbeats until the end; returns why it ended.

        Raises errors that are not transient; then nothing is written any more.
        """
        # Not a task group: once the partition is being given up, errors of `reading` must not stop the release.
        beating = asyncio.create_task(self._beat())
        reading = asyncio.create_task(self.delivery.run(self))
        asked = asyncio.create_task(self._end_requested.wait())
        try:
            await asyncio.wait({beating, reading, asked}, return_when=asyncio.FIRST_COMPLETED)
            _raise_errors_of(beating, reading)
            if not asked.done() or beating.done():
                return await self._lose()
            stopping = asyncio.create_task(self._stop(reading))
            try:
                await asyncio.wait({stopping, beating}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not stopping.done():
                    stopping.cancel()
            _raise_errors_of(beating, stopping)
            if beating.done():
                return await self._lose()
            beating.cancel()
            return await self._write_end()
        finally:
            self._end()
            for task in (beating, reading, asked):
                task.cancel()
            await asyncio.gather(beating, reading, asked, return_exceptions=True)
            self._dispatcher.drop(self)
            self.delivery.close()

    async def _stop(self, reading: asyncio.Task[None]) -> None:
        assert self._end_request is not None, self
        grace_s = self._end_request.grace_s
        await self.delivery.stop(reading, self)
        await self._dispatcher.let_go(self, self.options.grace_s if grace_s is None else grace_s)

    async def _lose(self) -> str:
        self._end()
        await self._dispatcher.let_go(self, self.options.grace_s)
        return LOST

    async def _write_end(self) -> str:
        request = self._end_request
        assert request is not None, self
        if request.release:
            self._end()
            written = await self._claim.release()
        else:
            written = await self._claim.heartbeat()
        return request.why if written else LOST

    def _end(self) -> None:
        self._is_over = True
        self._some_done.set()

    # ---- heartbeats ---------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Send heartbeats; returns when the partition is somebody else's."""
        beaten_at = own_clock()
        while True:
            fraction = random.random()  # noqa: S311 - guards nothing
            due_at = beaten_at + heartbeat_delay_s(self.options.heartbeat_interval_s, fraction)
            await self._account(max(due_at - own_clock(), 0.0))
            await asyncio.sleep(max(due_at - own_clock(), 0.0))
            beaten_at = own_clock()
            if not await self._claim.heartbeat():
                return

    async def _account(self, within_s: float) -> None:
        """Commit the offset and measure the lag. Both are optional and must not delay the next heartbeat."""
        try:
            async with asyncio.timeout(within_s):
                await self._commit()
                if self.options.release_when_behind:
                    await self._measure_lag()
        except TimeoutError:
            _log.warning("%s/%d: the source was too slow to commit an offset or count its backlog", *self.where)
        except KeylaneError as error:
            if not error.is_transient:
                raise
            _log.warning("%s/%d: no offset was committed: %s", *self.where, error)

    async def _commit(self) -> None:
        offset = self.delivery.offset
        if offset != self._committed:
            await self._source.commit(self.key.group, *self.where, offset)
            self._committed = offset

    async def _measure_lag(self) -> None:
        waiting = self.delivery.in_flight + await self._source.backlog(*self.where, self.delivery.read_to)
        self._pace = self._pace.sampled(self._done, self._done + waiting)
        if self._pace.is_behind:
            self.ask_to_end(
                f"behind: {waiting} messages wait, {self._pace.inflow:g} come in and {self._pace.velocity:g} are done "
                "in each heartbeat",
                cool_down=True,
            )


def _raise_errors_of(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()
