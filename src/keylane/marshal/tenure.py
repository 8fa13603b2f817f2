"""One partition that this consumer owns: what it writes into the log about it, and until when it may act.

Owns: the fence. An owner may start handlers only while nobody else can own the partition: until two intervals, less a
margin, after it *sent* the last heartbeat that the log counted, or sooner if its way of working says so. The log's
stamp on that heartbeat is later than the sending, so by the log's time the claim holds longer than that. The clock is
this machine's own and only measures how long ago something was; what time it is does not matter.

Every write is read back before it counts. Where the outcome of a write is unknown, the log is read before it is
written to again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Claim, Key
from keylane.core.claim_records import Message
from keylane.errors import CoordinationLogError, KeylaneError, ReadIncomplete, RevisionConflict
from keylane.marshal.author import Author
from keylane.marshal.log import Position
from keylane.marshal.logbook import LogBook, own_clock

MARGIN = 0.25
"""Of an interval: how much sooner an owner stops than others may begin."""

_TAKE_TRIES = 5


class Progress(Protocol):
    """How far the messages of a partition are."""

    @property
    def hold(self) -> float:
        """For how many intervals after a heartbeat handlers may start; at most two, less the margin."""
        ...

    @property
    def offset(self) -> int:
        """The next message to read, for whoever comes next."""
        ...

    @property
    def at_work(self) -> int:
        """How many were read and are not done."""
        ...

    def finish(self, offset: int) -> None: ...


class _Written(NamedTuple):
    sent_at: float
    position: Position | None
    """None: it is in the log, and where was not told."""


@dataclass(frozen=True, slots=True)
class End:
    """Why a tenure is to end, and what is left in the log."""

    why: str
    release: bool = True
    cool_down: bool = False
    """Whether this consumer should leave it to others for a while."""


class Tenure:
    """From the win of a partition to its end. Made by `claiming.py`."""

    def __init__(self, book: LogBook, author: Author, where: TopicPartition, token: int, progress: Progress) -> None:
        self.where = where
        self.key: Key = author.key(where)
        self.token = token
        self.progress = progress
        self.retries = True
        """Whether a message whose handler failed is tried again."""
        self.done = 0
        """Messages handled in this tenure."""
        self.asked: End | None = None
        self.is_over = False
        self._book = book
        self._author = author
        self._writing = asyncio.Lock()
        self._asked = asyncio.Event()
        self._some_done = asyncio.Event()
        self._hold_s = min(progress.hold, 2 - MARGIN) * book.interval_s
        self._safe_until = float("-inf")  # nothing starts before the first heartbeat

    def __repr__(self) -> str:
        state = "over" if self.is_over else "ours" if self.may_start() else "in doubt"
        return f"<Tenure {self.where.topic}/{self.where.partition} token={self.token} {state} {self.progress!r}>"

    # ---- may it act ---------------------------------------------------------------------------------

    def may_start(self) -> bool:
        """Whether a handler may start now."""
        return not self.is_over and own_clock() < self._safe_until

    @property
    def is_ours(self) -> bool:
        """Whether the log, as far as it was read, has this very claim. It may have run out: a heartbeat revives it."""
        claim = self._claim
        return claim.owner == self._author.owner and claim.token == self.token

    def end(self) -> None:
        """Nothing starts any more."""
        self.is_over = True
        self._some_done.set()

    def ask_to_end(self, why: str, *, release: bool = True, cool_down: bool = False) -> None:
        """Whoever serves it lets it go. The first reason counts."""
        if self.asked is None:
            self.asked = End(why, release, cool_down)
            self._asked.set()

    async def asked_to_end(self) -> None:
        await self._asked.wait()

    # ---- messages -----------------------------------------------------------------------------------

    def finished(self, offset: int) -> None:
        self.progress.finish(offset)
        self.done += 1
        self._some_done.set()

    async def fewer_than(self, limit: int) -> None:
        """Wait until fewer messages than this are at work, or the tenure is over."""
        while self.progress.at_work >= limit and not self.is_over:
            self._some_done.clear()
            await self._some_done.wait()

    # ---- the log ------------------------------------------------------------------------------------

    async def is_still_ours(self) -> bool:
        """Whether nobody else can own it: known from the last heartbeat, or by another one."""
        return self.may_start() or (not self.is_over and await self.heartbeat())

    async def heartbeat(self) -> bool:
        """Say that the owner lives and how far it is. False: the partition is not ours any more."""
        async with self._writing:
            return await self._heartbeat()

    async def take(self, proposed: int) -> bool:
        """At most once: take all messages before `proposed`. Only after True may they be worked on.

        They are nobody else's then, whatever happens. False: the partition is not ours any more.
        """
        async with self._writing:
            for _ in range(_TAKE_TRIES):
                written = await self._write(
                    lambda: self._author.claiming_messages(self.where, proposed),
                    lambda claim, _: self._taken_at(claim, proposed) is not None,
                )
                if written is None:
                    return False
                at = self._taken_at(self._claim, proposed) if written.position is None else written.position.offset
                now_ms = self._book.now_ms(self.key)
                if at is not None and self._claim.messages_stand(self._author.owner, self.token, at, now_ms):
                    return True
                if not await self._heartbeat():  # it had run out
                    return False
        raise CoordinationLogError(
            f"{self.where.topic}/{self.where.partition}: the messages before {proposed} could not be taken in "
            f"{_TAKE_TRIES} tries; the log says {self._claim}"
        )

    async def release(self) -> bool:
        """Give the partition up. False: it was not ours any more."""
        self.end()
        async with self._writing:
            written = await self._write(
                lambda: self._author.releasing(self.where, self.progress.offset),
                lambda claim, before: claim.released is not None and claim.released.at > before,
            )
        released = self._claim.released
        return written is not None and released is not None and released.owner == self._author.owner

    async def _heartbeat(self) -> bool:
        written = await self._write(
            lambda: self._author.heartbeat(self.where, self.progress.offset),
            lambda claim, before: (claim.heartbeat_at or 0) > before,
        )
        if written is None or not self.is_ours:
            return False
        self._safe_until = written.sent_at + self._hold_s
        return True

    async def _write(self, make: Callable[[], Message], has_landed: Callable[[Claim, int], bool]) -> _Written | None:
        """Until it is in the log and the log was read beyond it. None: the partition is not ours any more."""
        first_sent_at, patience = own_clock(), self._book.new_patience()
        while self.is_ours:
            sent_at = own_clock()
            number = self._book.where(self.key)
            read_to, newest = self._book.world.next_offset(number), self._book.world.newest_of(*self.key)
            before = -1 if newest is None else newest
            position, conflict = None, None
            try:
                position = await self._book.append(make(), self.key)
            except RevisionConflict as error:
                conflict = error  # somebody wrote about this partition: read what it was
            except KeylaneError as error:
                await patience.after(error)
            await self._book.read([number])
            if conflict is not None and self._book.world.next_offset(number) == read_to:
                await patience.after(ReadIncomplete(f"what is in conflict cannot be read: {conflict}"))
            if position is not None:
                return _Written(sent_at, position)
            if self._is_or_was_ours and has_landed(self._claim, before):
                # Any of our tries may be the one that landed: a log stamps a record before others can read it.
                return _Written(first_sent_at, None)
        return None

    @property
    def _is_or_was_ours(self) -> bool:
        claim = self._claim
        return self.is_ours or (claim.released is not None and claim.released.owner == self._author.owner)

    def _taken_at(self, claim: Claim, proposed: int) -> int | None:
        taken = claim.messages
        return taken.at if taken is not None and (taken.proposed, taken.token) == (proposed, self.token) else None

    @property
    def _claim(self) -> Claim:
        claim = self._book.claim_of(self.key)
        assert claim is not None, self.key
        return claim
