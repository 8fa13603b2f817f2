"""The messages of all partitions of one consumer, from the time they are read until their handler has ended.

A `Dispatcher` runs the handlers; this module decides what becomes of each message. Before a handler starts, its
`OwnedPartition` is asked: a message that may not start waits, or is dropped when the partition is over. Never writes to
a log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import count

from keylane.core.claim_choice import TopicPartition
from keylane.core.lanes import Entry, Lanes
from keylane.dispatch import Dispatcher, Executor, HandlerCall, Settling, error_line, store_dead_letter
from keylane.errors import HandlerCrashed
from keylane.marshal.message import GiveUp, Handler, MarshalMessage
from keylane.marshal.options import ConsumerHooks, Order
from keylane.marshal.owned_partition import OwnedPartition
from keylane.marshal.source import SourceRecord
from keylane.retrying import backoff_s

_log = logging.getLogger("keylane.marshal")

_LOOK_AGAIN_S = 0.05
_CANCEL_S = 2.0


class ClaimedMessage(MarshalMessage):
    """A message with the owned partition that it was read from."""

    __slots__ = ("owned",)

    def __init__(self, record: SourceRecord, where: TopicPartition, token: int, owned: OwnedPartition) -> None:
        super().__init__(record, where, token)
        self.owned = owned

    def __reduce__(self) -> tuple[object, ...]:
        """For another process: the message alone."""
        return MarshalMessage, (self.record, self.where, self.token)


class MessageDispatcher:
    """Runs the handler on the messages of one consumer."""

    def __init__(
        self,
        handler: Handler,
        *,
        concurrency: int,
        name: str = "the consumer",
        executor: Executor = "thread",
        order: Order = "key",
        max_tries: int | None = None,
        give_up: GiveUp | None = None,
        hooks: ConsumerHooks | None = None,
    ) -> None:
        """`name`: whose messages these are, for errors and logs."""
        self._call: HandlerCall[ClaimedMessage] = HandlerCall(handler, concurrency=concurrency, executor=executor)
        self._name = name
        self._by_key = order == "key"
        self._give_up = give_up
        hooks = hooks or ConsumerHooks()
        self._on_failure, self._on_delivered = hooks.on_failure, hooks.on_delivered
        self._lanes: Lanes[ClaimedMessage] = Lanes(max_tries=max_tries, backoff=backoff_s, remember=0)
        self._dispatcher = Dispatcher(
            self._call.run,
            self._lanes,
            self,
            name=name,
            concurrency=self._call.concurrency,
            log=_log,
            admit=self._admit,
            on_returned=hooks.on_returned,
            on_outcome=hooks.on_outcome,
        )
        self._tickets = count(1)

    def __repr__(self) -> str:
        return f"<MessageDispatcher {self._dispatcher!r}>"

    @property
    def failure(self) -> asyncio.Future[HandlerCrashed]:
        """Has a result when a handler raised what does not count as a failed try: the consumer must end."""
        return self._dispatcher.crash

    async def start(self) -> None:
        """Raises if the handler cannot be called where it is to run."""
        try:
            await self._call.start()
        except BaseException:
            await self.close()
            raise

    def offer(self, owned: OwnedPartition, records: Sequence[SourceRecord]) -> None:
        """Messages of a partition, in order."""
        if self._on_delivered is not None:
            self._on_delivered(len(records))
        where, token = owned.where, owned.token
        for record in records:
            lane: Hashable = (where, record.key) if self._by_key else where
            self._lanes.arrive(next(self._tickets), lane, ClaimedMessage(record, where, token, owned))
        self._dispatcher.wake()

    def drop(self, owned: OwnedPartition) -> None:
        """Forget what has not started."""
        self._lanes.forget(lambda one: one.owned is owned)

    async def let_go(self, owned: OwnedPartition, grace_s: float) -> bool:
        """Start nothing more of a partition and wait for its running handlers; after `grace_s` cancel them.

        False: handlers were cancelled, or a plain function goes on in a thread.
        """
        self.drop(owned)
        if await self._quiet(owned, grace_s):
            return True
        self._dispatcher.cancel(entry for entry in self._dispatcher.at_work if entry.item.owned is owned)
        if not await self._quiet(owned, _CANCEL_S):
            _log.error("handlers of %s/%d did not end within %g s of being cancelled", *owned.where, _CANCEL_S)
        return False

    async def close(self) -> None:
        """End now: running handlers are cancelled."""
        await self._dispatcher.close()
        await self._call.close()

    async def _quiet(self, owned: OwnedPartition, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while self._lanes.running(lambda one: one.owned is owned):
                    await self._dispatcher.some_end()
                    self.drop(owned)
        except TimeoutError:
            return False
        return True

    # ---- the dispatcher asks ------------------------------------------------------------------------

    def may_go_on(self) -> bool:
        return True  # `_admit` asks the partition of each message

    def _admit(self, entry: Entry[ClaimedMessage]) -> bool:
        """Whether it may start now. If its partition is over it is another owner's, and so are those behind it."""
        owned = entry.item.owned
        if owned.may_start():
            return True
        if owned.is_over:
            self._lanes.release(entry)
        else:
            self._dispatcher.retry_at(self._lanes.postponed(entry, self._dispatcher.now(), _LOOK_AGAIN_S))
        return False

    def returned(self, entry: Entry[ClaimedMessage], given: ClaimedMessage) -> str:
        self._lanes.finished(entry)
        given.owned.finished(given.offset)
        return "done"

    def failed(self, entry: Entry[ClaimedMessage], given: ClaimedMessage, error: BaseException) -> str | Settling:
        if not given.owned.retries:
            self._report(given, error, 1)
            return self.returned(entry, given)
        retry_at = self._lanes.failed(entry, self._dispatcher.now())
        self._report(given, error, entry.tries)
        if retry_at is None:
            return partial(self._store_dead_letter, entry, error)
        self._dispatcher.retry_at(retry_at)
        return "failed"

    def cancelled(self, entry: Entry[ClaimedMessage], given: ClaimedMessage) -> str:
        self._lanes.release(entry)
        return "cancelled"

    def crashed(self, entry: Entry[ClaimedMessage], given: ClaimedMessage, error: BaseException) -> None:
        self._call_hook(given, error, entry.tries + 1)

    async def _store_dead_letter(self, entry: Entry[ClaimedMessage], error: BaseException) -> str:
        """It had all its tries: its lane goes on once the message is stored elsewhere, or the partition is over."""
        message = entry.item
        if self._give_up is None:
            _log.error("%r is given up after %d tries: %s", message, entry.tries, error_line(error))
        elif not await store_dead_letter(
            self._give_up, lambda: message, error, entry.tries, log=_log, until=lambda: message.owned.is_over
        ):
            return self.cancelled(entry, message)
        self.returned(entry, message)
        return "dead"

    # ---- reporting ------------------------------------------------------------------------------------

    def _report(self, message: MarshalMessage, error: BaseException, tries: int) -> None:
        _log.log(
            logging.WARNING if self._on_failure is None else logging.DEBUG,
            "handler failed: %s, %s/%d, key %r, offset %d (try %d): %s",
            self._name,
            *message.where,
            message.key,
            message.offset,
            tries,
            error_line(error),
            exc_info=error,
        )
        self._call_hook(message, error, tries)

    def _call_hook(self, message: MarshalMessage, error: BaseException, tries: int) -> None:
        if self._on_failure is None:
            return
        try:
            self._on_failure(message, error, tries)
        except Exception:  # noqa: BLE001 - a hook may raise anything
            _log.exception("the hook on_failure failed")
