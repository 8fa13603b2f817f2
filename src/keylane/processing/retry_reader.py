"""Runs what is due of a group's delayed retries, in one of its members or workers.

All of them read one consumer, each as much as it can handle. A retry that fails again is delayed again, or becomes a
dead letter; one that is at work when its process dies is delivered to another one after the consumer's ack wait.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from keylane.core.pull_budget import PullBudget
from keylane.dispatch import HandlerCall, HandlerSlots
from keylane.errors import BrokenRetry, HandlerCrashed, KeylaneError
from keylane.jetstream import MOST_BYTES, Feed, FeedOptions, Message, SharedBudget, open_feed
from keylane.processing.delayed_retries import ACK_WAIT_S, DelayedRetries, RetriedMessage, RetryOrigin
from keylane.processing.handler_options import HandlerOptions, MessageJournal
from keylane.processing.message import GroupMessage
from keylane.processing.message_processor import MessageProcessor
from keylane.retrying import backoff_s

_log = logging.getLogger("keylane.groups")

_LONGEST_PAUSE_S = 2.0
_OUTCOMES = {"done": "retried", "terminated": "retried", "dead": "retried_dead"}
"""How a journal names what ends a message off its lane: it says nothing about the order of its key."""


class RetryReader:
    """The part of one member or worker in the delayed retries of its group."""

    def __init__(
        self,
        retries: DelayedRetries,
        call: HandlerCall[GroupMessage],
        options: HandlerOptions,
        *,
        slots: HandlerSlots,
        member: Callable[[], str],
        from_queue: bool,
        on_crash: Callable[[], None],
    ) -> None:
        """`slots`: shared with the handlers of the lanes. `member`: the name of the member or worker, as it is now.

        `from_queue`: the group reads a copy of the stream. `on_crash`: called when `crash` is set.
        """
        self._retries = retries
        self._origin = RetryOrigin(
            retries.stream, retries.group, member, instance=secrets.token_hex(8), from_queue=from_queue
        )
        self._options = replace(
            options,
            order="none",
            commits="message",
            tracks_position=False,
            ack_wait_s=ACK_WAIT_S,
            remember=2 * options.concurrency,
            on_crowded=None,
            journal=_RetryJournal(options.journal) if options.journal is not None else None,
        )
        name = f"delayed retries of {retries.stream}/{retries.group}"
        self._processor = MessageProcessor(call, self._options, name, on_crash=on_crash, slots=slots)
        self._share = PullBudget(2 * options.concurrency, MOST_BYTES).share()
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        return f"<RetryReader of {self._retries.stream}/{self._retries.group}>"

    @property
    def crash(self) -> HandlerCrashed | None:
        return self._processor.crash

    def stop(self) -> None:
        """Take no more. `run` ends when what is at work has ended."""
        self._stopping.set()

    async def cut(self) -> None:
        """Cancel what is at work: it is delivered again, here or elsewhere."""
        self._stopping.set()
        await self._processor.close()

    async def run(self) -> None:
        """Until `stop`, or cancelled."""
        failures = 0
        try:
            while not self._stopping.is_set() and not self._retries.connection.is_closed:
                try:
                    await self._read()
                except KeylaneError as error:  # deleted, or the server is away
                    failures += 1
                    pause_s = backoff_s(failures, longest_s=_LONGEST_PAUSE_S)
                    _log.warning("%r: reading it again in %g s: %s", self._retries, pause_s, error)
                    await self._pause(pause_s)
                else:
                    failures = 0
        finally:
            await self._processor.close()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _read(self) -> None:
        await self._retries.start()
        self._share.clear()
        options = FeedOptions(
            on_messages=self._take,
            budget=SharedBudget(
                share=self._share, in_flight=lambda: self._processor.in_flight, on_window=self._processor.set_window
            ),
        )
        feed = await open_feed(self._retries.connection, self._retries.name, self._retries.group, options)
        self._processor.call_at_low_water(feed.refill)
        ended, stopped = asyncio.ensure_future(feed.wait()), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
        finally:
            stopped.cancel()
            await self._finish(feed)
            await asyncio.wait({ended}, timeout=_LONGEST_PAUSE_S)
            if ended.done() and not ended.cancelled():
                ended.exception()  # seen: it was raised above, or came while the feed was closed

    async def _finish(self, feed: Feed) -> None:
        """Let what is at work end, and give the rest to others."""
        await feed.stop()
        for message in await self._processor.let_go():
            if not message.delivery.settled:
                message.delivery.nak()
        await feed.settle()

    def _take(self, messages: list[Message]) -> None:
        taken: list[GroupMessage] = []
        for one in messages:
            if self._stopping.is_set():
                one.nak()
                continue
            try:
                taken.append(RetriedMessage.of(one, self._origin))
            except BrokenRetry as error:
                _log.error("%s", error)
                one.term("no retry")
        if taken:
            self._processor.offer(taken)


class _RetryJournal:
    """Notes what became of retries as tries at the originals."""

    def __init__(self, journal: MessageJournal) -> None:
        self._journal = journal
        self.stream = journal.stream

    def now_ns(self) -> int:
        return self._journal.now_ns()

    def note(self, message: GroupMessage, outcome: str, started_ns: int, ended_ns: int) -> None:
        original = GroupMessage(message.original, message.place, message.origin)
        self._journal.note(original, _OUTCOMES.get(outcome, outcome), started_ns, ended_ns)
