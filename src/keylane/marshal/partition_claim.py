"""This consumer's claim on one partition: the records that keep it, and until when handlers may start under it.

Owns: the fence. An owner may start handlers only while nobody else can own the partition: until two intervals, less a
margin, after it *sent* the last heartbeat that the log counted, or sooner if the delivery mode says so. The log's
timestamp of that heartbeat is later than the sending, so by the log's time the claim holds longer than that. The clock
is this machine's monotonic one and only measures durations; what time it is does not matter.

Every write is read back before it counts. If the outcome of a write is unknown, the log is read before the next write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Claim, Key
from keylane.core.claim_records import Message
from keylane.errors import CoordinationLogError, KeylaneError, ReadIncomplete, RevisionConflict
from keylane.marshal.log import Position
from keylane.marshal.log_view import LogView, own_clock

MARGIN = 0.25
"""Of an interval: how much earlier an owner stops than others may begin."""

_TAKE_TRIES = 5


class _Written(NamedTuple):
    sent_at: float
    position: Position | None
    """None: it is in the log at an unknown offset."""


class PartitionClaim:
    """A claim that was won. Made by `claim_attempts.py`.

    `offset` gives the next message to read, for whoever owns the partition next. `hold`: for how many intervals after a
    heartbeat handlers may start; at most two, less the margin.
    """

    def __init__(
        self, view: LogView, where: TopicPartition, token: int, *, offset: Callable[[], int], hold: float
    ) -> None:
        self.where = where
        self.key: Key = view.identity.key(where)
        self.token = token
        self._view = view
        self._identity = view.identity
        self._offset = offset
        self._writing = asyncio.Lock()
        self._hold_s = min(hold, 2 - MARGIN) * view.interval_s
        self._safe_until = float("-inf")  # nothing starts before the first heartbeat

    def __repr__(self) -> str:
        state = "held" if self.is_safe() else "in doubt"
        return f"<PartitionClaim {self.where.topic}/{self.where.partition} token={self.token} {state}>"

    def is_safe(self) -> bool:
        """Whether nobody else can own the partition now."""
        return own_clock() < self._safe_until

    @property
    def is_ours(self) -> bool:
        """Whether this claim is the newest in the log, as far as it was read. If it expired, a heartbeat revives it."""
        claim = self._claim
        return claim.owner == self._identity.owner and claim.token == self.token

    async def heartbeat(self) -> bool:
        """Write that the owner is alive and how far it is. False: the partition is no longer ours."""
        async with self._writing:
            return await self._heartbeat()

    async def take(self, proposed: int) -> bool:
        """At most once: take all messages before `proposed`. Handlers may get them only after True.

        From then on nobody else gets them, whatever happens. False: the partition is no longer ours.
        """
        async with self._writing:
            for _ in range(_TAKE_TRIES):
                written = await self._write(
                    lambda: self._identity.claiming_messages(self.where, proposed),
                    lambda claim, _: self._taken_at(claim, proposed) is not None,
                )
                if written is None:
                    return False
                claim = self._claim
                at = self._taken_at(claim, proposed) if written.position is None else written.position.offset
                now_ms = self._view.world.now_ms(claim.log_partition) or 0
                if at is not None and claim.messages_stand(self._identity.owner, self.token, at, now_ms):
                    return True
                if not await self._heartbeat():  # the claim had expired
                    return False
        raise CoordinationLogError(
            f"{self.where.topic}/{self.where.partition}: gave up after {_TAKE_TRIES} tries to take the messages before "
            f"{proposed}; the log says {self._claim}"
        )

    async def release(self) -> bool:
        """Give the partition up. False: it was no longer ours."""
        async with self._writing:
            written = await self._write(
                lambda: self._identity.releasing(self.where, self._offset()),
                lambda claim, before: claim.released is not None and claim.released.at > before,
            )
        released = self._claim.released
        return written is not None and released is not None and released.owner == self._identity.owner

    async def _heartbeat(self) -> bool:
        written = await self._write(
            lambda: self._identity.heartbeat(self.where, self._offset()),
            lambda claim, before: (claim.heartbeat_at or 0) > before,
        )
        if written is None or not self.is_ours:
            return False
        self._safe_until = written.sent_at + self._hold_s
        return True

    async def _write(self, make: Callable[[], Message], has_landed: Callable[[Claim, int], bool]) -> _Written | None:
        """Write until the record is in the log and was read back. None: the partition is no longer ours."""
        first_sent_at, backoff, world = own_clock(), self._view.new_backoff(), self._view.world
        number = world.where(*self.where)
        while self.is_ours:
            sent_at = own_clock()
            read_to, newest = world.next_offset(number), world.newest_of(*self.key)
            before = -1 if newest is None else newest
            position, conflict = None, None
            try:
                position = await self._view.append(make(), self.key)
            except RevisionConflict as error:
                conflict = error  # somebody wrote about this partition: read what it was
            except KeylaneError as error:
                await backoff.after(error)
            await self._view.read([number])
            if conflict is not None and world.next_offset(number) == read_to:
                await backoff.after(ReadIncomplete(f"the conflicting record cannot be read: {conflict}"))
            if position is not None:
                return _Written(sent_at, position)
            if self._is_or_was_ours and has_landed(self._claim, before):
                # Any of our tries may be the one that landed: a log stamps a record before others can read it.
                return _Written(first_sent_at, None)
        return None

    @property
    def _is_or_was_ours(self) -> bool:
        claim = self._claim
        return self.is_ours or (claim.released is not None and claim.released.owner == self._identity.owner)

    def _taken_at(self, claim: Claim, proposed: int) -> int | None:
        taken = claim.messages
        return taken.at if taken is not None and (taken.proposed, taken.token) == (proposed, self.token) else None

    @property
    def _claim(self) -> Claim:
        claim = self._view.world.claim_of(*self.key)
        assert claim is not None, self.key
        return claim
