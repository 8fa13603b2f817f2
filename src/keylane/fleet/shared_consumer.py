"""One durable consumer that the partitions of a worker share: performs what `core/consumer_filters.py` decides.

Its filters change while it is read. The pull loop goes on whatever becomes of a change: one that fails leaves the
consumer as it was, and is tried again. The consumer's position is nobody's memory: what is handled is known by
partition, so a consumer that is gone is made again and nothing is lost with it.

`admitted` is called in the same turn of the event loop in which the filters are admitted, before any message of them
can arrive in its order.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from keylane.core.consumer_filters import (
    AdmitFilters,
    ChangeLater,
    ConsumerFilters,
    CreateConsumer,
    DeleteConsumer,
    FilterChange,
    Filters,
    NarrowFilters,
    ReleaseMessages,
    UpdatePace,
    WidenFilters,
)
from keylane.errors import (
    ApiError,
    ConsumerUpdateCancelled,
    ConsumerUpdateUnconfirmed,
    KeylaneError,
    NotFound,
    RequestTimeout,
)
from keylane.fleet.pinned_consumer import PIN_GROUP, pin_in, pinned_consumer, pinned_pulls
from keylane.jetstream import Connection, ConsumerConfig, ConsumerInfo, Feed, Message, consumers, open_feed, streams

_log = logging.getLogger("keylane.fleet")

_FILTERS_OVERLAP = 10100
_NOT_CHANGEABLE = 10012
_EXISTS_DIFFERENTLY = 10148
_MISSING = (10014, 10149)
_CONFIRM_S = 2.0
_LOOK_AGAIN_S = 0.01
_NOT_NOW_S = 0.1
_PIN_LOOKS = 5
_PIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerTerms:
    """What never changes of a worker's consumer."""

    stream: str
    is_queue: bool
    ack_wait_s: float
    max_ack_pending: int
    pin_timeout_s: float

    def consumer(self, name: str, filters: Filters, start: int | None) -> ConsumerConfig:
        return pinned_consumer(self, filters, start, durable_name=name)


def with_filters(config: ConsumerConfig, filters: Filters) -> ConsumerConfig:
    """The same consumer with other filters. Nothing else of it ever changes."""
    return replace(config, filter_subject=None, filter_subjects=tuple(sorted(filters)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerEvents:
    """Called when something happens to a shared consumer. Plain functions; they must not wait."""

    take: Callable[[list[Message]], None]
    admitted: Callable[[Filters, int], None]
    """Filters, and the last sequence of the stream; 0 on a work queue, which begins at its start."""
    interrupted: Callable[[Filters], None]
    """The consumer is gone: what these delivered comes again, or has to be read by other means."""
    pinned: Callable[[str | None], None]
    stream_made_anew: Callable[[], Awaitable[None]]
    escalated: Callable[[str], None]
    """Changes have failed for long; empty: they succeed again."""
    changed: Callable[[FilterChange, float, KeylaneError | None], None]
    """A change was tried, in so many seconds; the error if it failed."""


class SharedConsumer:
    """The consumer `name`, from its first filter to its close."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        terms: ConsumerTerms,
        events: ConsumerEvents,
        *,
        may_change: Callable[[], bool],
        pace: UpdatePace | None = None,
    ) -> None:
        """`may_change`: whether the name is surely this worker's; if not, another run may have the consumer."""
        self._connection = connection
        self.name = name
        self._terms = terms
        self._events = events
        self._may_change = may_change
        self.filters = ConsumerFilters(pace or UpdatePace())
        self._config: ConsumerConfig | None = None
        self._feed: Feed | None = None
        self._feed_end: asyncio.Task[str] | None = None
        self._stream_created = ""
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._failure: KeylaneError | None = None
        self._is_escalated = False
        self._is_closed = False
        self._loop = asyncio.create_task(self._run(), name=f"filters of {terms.stream}/{name}")

    def __repr__(self) -> str:
        return f"<SharedConsumer {self._terms.stream}/{self.name} {len(self.filters.present or ())} filters>"

    # ---- what is wanted ---------------------------------------------------------------------------------------

    def want(self, filters: Filters) -> bool:
        """Have these filters, soon; returns False if that is nothing new."""
        is_new = self.filters.want(filters)
        if is_new:
            self._wake.set()
        return is_new

    def admit_again(self, one: str) -> None:
        self.filters.admit_again(one)
        self._wake.set()

    async def wait(self, good: Callable[[ConsumerFilters], bool], timeout_s: float | None = None) -> None:
        """Wait until the filters are as they should be. Changes that fail are tried again meanwhile.

        `timeout_s`: then `ConsumerUpdateUnconfirmed`; it goes on in the background.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while not good(self.filters):
                    if self._is_closed:
                        raise ConsumerUpdateCancelled(f"consumer {self.name!r} was closed before its filters changed")
                    await self._changed.wait()
        except TimeoutError:
            why = f": {self._failure}" if self._failure is not None else ""
            raise ConsumerUpdateUnconfirmed(
                f"the filters of consumer {self.name!r} did not change within {timeout_s:g} s{why}. It works on with "
                "the last ones, and the change is tried again"
            ) from self._failure

    async def close(self) -> None:
        """Stop reading and changing. The consumer stays as it is: want no filters first, or delete it."""
        self._is_closed = True
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await self._close_feed()
        await self._tell_changed()

    # ---- changes ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            change = self.filters.next_change(time.monotonic())
            if change is None:
                await self._wake.wait()
            elif isinstance(change, ChangeLater):
                await self._sleep(change.at - time.monotonic())
            elif not self._may_change():
                await self._sleep(_NOT_NOW_S)
            else:
                await self._try(change)
                await self._tell_changed()

    async def _sleep(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, pause_s)):
                await self._wake.wait()

    async def _tell_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _try(self, change: FilterChange) -> None:
        began = time.monotonic()
        try:
            await self._perform(change)
        except KeylaneError as error:
            self._failed(change, error)
            self._events.changed(change, time.monotonic() - began, error)
        except Exception as error:  # noqa: BLE001 - the loop must not end: the change is tried again
            _log.exception("%r: %s failed", self, change)
            self._failed(change, ConsumerUpdateUnconfirmed(repr(error)))
        else:
            self._failure = None
            if self._is_escalated:
                self._is_escalated = False
                self._events.escalated("")
            self._events.changed(change, time.monotonic() - began, None)

    def _failed(self, change: FilterChange, error: KeylaneError) -> None:
        self._failure = error
        code = error.err_code if isinstance(error, ApiError) else None
        is_taken = code == _FILTERS_OVERLAP
        _log.log(logging.DEBUG if is_taken else logging.WARNING, "%r: %s failed: %s", self, _words(change), error)
        if code in _MISSING:
            self._interrupt()
        elif code in (_EXISTS_DIFFERENTLY, _NOT_CHANGEABLE):
            # Another run's; or made again while the one before was being deleted, and then the server (2.15.1) may have
            # lost its files.
            self._interrupt()
            self.filters.forget()
        if self.filters.failed(change, time.monotonic(), jitter=random.random(), taken=is_taken):  # noqa: S311
            self._is_escalated = True
            self._events.escalated(f"consumer {self.name} cannot {_words(change)}: {error}")

    async def _perform(self, change: FilterChange) -> None:
        now = time.monotonic
        match change:
            case DeleteConsumer():
                await self._delete()
            case CreateConsumer(filters):
                await self._create(filters)
            case NarrowFilters(filters) | WidenFilters(filters):
                await self._update(filters)
            case ReleaseMessages():
                if self._terms.is_queue and self._feed is not None:
                    await self._feed.reset()
                    await self._free_pin(self._feed)
            case AdmitFilters():
                await self._admit(change)
                return
        self.filters.succeeded(change, now())

    async def _delete(self) -> None:
        await self._close_feed()
        with suppress(NotFound):
            await consumers.delete(self._connection, self._terms.stream, self.name)

    async def _create(self, filters: Filters) -> None:
        stream, terms = self._terms.stream, self._terms
        await self._close_feed()
        state = await streams.state(self._connection, stream)
        created = state.created.isoformat()
        if self._stream_created not in ("", created):
            _log.warning("stream %s was made anew", stream)
            await self._events.stream_made_anew()
        self._stream_created = created
        config = terms.consumer(self.name, filters, None if terms.is_queue else state.last_sequence + 1)
        await consumers.create(self._connection, stream, config, action="create")
        self._config = config

    async def _admit(self, change: AdmitFilters) -> None:
        """A consumer that nobody has read yet is at the start; another one is rewound."""
        last = 0 if self._terms.is_queue else await self._end_of_stream()
        feed = self._feed
        if feed is not None and self._terms.is_queue:
            await feed.reset(1)
        # Nothing is awaited from here on: the first message after a rewind must find its filter admitted.
        self.filters.succeeded(change, time.monotonic())
        self._events.admitted(change.filters & self.filters.wanted, last)
        if feed is None:
            try:
                await self._open_feed()
            except BaseException:
                self._interrupt()
                self.filters.forget()
                raise
        elif self._terms.is_queue:
            await self._free_pin(feed)

    async def _free_pin(self, feed: Feed) -> None:
        """A reset closes the pulls. If the server has just pinned one of them, nobody heard of it: clear that pin."""
        for _ in range(_PIN_LOOKS):
            if feed.pin_id is not None or pin_in(await self._info()) is None:
                return
            await asyncio.sleep(_PIN_S)
        if feed.pin_id is None:
            await consumers.unpin(self._connection, self._terms.stream, self.name, PIN_GROUP)

    async def _update(self, filters: Filters) -> None:
        assert self._config is not None
        config = with_filters(self._config, filters)
        await consumers.update(self._connection, self._terms.stream, config)
        self._config = config
        await self._confirm(filters)

    async def _confirm(self, filters: Filters) -> None:
        """A cluster answers before the consumer's leader has the change: wait until that says so."""
        end = time.monotonic() + _CONFIRM_S
        while _filters_of(await self._info()) != filters:
            if time.monotonic() > end:
                raise RequestTimeout(
                    f"consumer {self.name!r} did not have its new filters within {_CONFIRM_S:g} s of their change"
                )
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _end_of_stream(self) -> int:
        """At least where the consumer is: its replica may be ahead of the one that tells the stream's state."""
        info = await self._info()
        state = await streams.state(self._connection, self._terms.stream)
        return max(state.last_sequence, info.delivered_sequence)

    async def _info(self) -> ConsumerInfo:
        return await consumers.info(self._connection, self._terms.stream, self.name)

    # ---- the feed -----------------------------------------------------------------------------------------------

    async def _open_feed(self) -> None:
        terms = self._terms
        options = pinned_pulls(
            terms,
            self._events.take,
            on_pinned=self._events.pinned,
            on_unpinned=lambda _: self._events.pinned(None),
        )
        self._feed = await open_feed(self._connection, terms.stream, self.name, options)
        self._feed_end = asyncio.create_task(self._feed.wait(), name=f"end of {self.name}")
        self._feed_end.add_done_callback(self._feed_ended)

    async def _close_feed(self) -> None:
        feed, self._feed = self._feed, None
        end, self._feed_end = self._feed_end, None
        if end is not None and not end.cancel() and not end.cancelled():
            end.exception()  # seen: it is being let go of
        if feed is not None:
            await feed.drain(0)

    def _feed_ended(self, end: asyncio.Task[str]) -> None:
        if end.cancelled() or self._feed_end is not end:
            return
        _log.warning("%r: its pulls have ended (%s); making it again", self, end.exception())
        self._interrupt()

    def _interrupt(self) -> None:
        """The consumer is gone, or cannot be read any more."""
        present = self.filters.present or frozenset()
        self.filters.gone()
        self._wake.set()
        self._events.interrupted(present)


def _filters_of(info: ConsumerInfo) -> Filters:
    config = info.config
    return frozenset(config.filter_subjects or (() if config.filter_subject is None else (config.filter_subject,)))


def _words(change: FilterChange) -> str:
    match change:
        case DeleteConsumer():
            return "delete the consumer"
        case CreateConsumer(filters):
            return f"create it with {len(filters)} filters"
        case NarrowFilters(filters):
            return f"narrow its filters to {len(filters)}"
        case WidenFilters(filters):
            return f"widen its filters to {len(filters)}"
        case ReleaseMessages():
            return "release what it has delivered"
        case AdmitFilters(filters):
            return f"begin with {len(filters)} new filters"
