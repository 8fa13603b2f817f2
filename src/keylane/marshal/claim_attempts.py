"""Winning a partition: the claim, its verdict, the offset to begin at, and the first heartbeat.

Owns: the steps from a free partition to a `PartitionClaim`. The log judges a claim once. A claim that is won after this
consumer gave up on it is released at once, so that the partition never stays unserved.
"""

from __future__ import annotations

import logging

from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Claim
from keylane.core.partition_offsets import resume
from keylane.errors import KeylaneError, RevisionConflict
from keylane.marshal.delivery_modes import AtLeastOnce, AtMostOnce, BatchAllowance
from keylane.marshal.log_view import LogView
from keylane.marshal.options import Mode
from keylane.marshal.owned_partition import DeliveryMode
from keylane.marshal.partition_claim import PartitionClaim
from keylane.marshal.source import Source
from keylane.retrying import Backoff

_log = logging.getLogger("keylane.marshal")


class Claimer:
    """Claims for one consumer. `batch_size`: at most once, how many messages may be taken and not done."""

    def __init__(self, view: LogView, source: Source, mode: Mode, backoff: Backoff, *, batch_size: int) -> None:
        self._view = view
        self._identity = view.identity
        self._source = source
        self._mode = mode
        self._backoff = backoff
        self._allowance = BatchAllowance(batch_size)
        self._write_backoff = view.new_backoff()
        self.trying: set[TopicPartition] = set()
        """Partitions that this consumer is claiming or releasing."""

    async def claim(self, where: TopicPartition) -> tuple[PartitionClaim, DeliveryMode] | None:
        """Try once; None: somebody else has it, the group is paused, or it is not known yet."""
        key, world = self._identity.key(where), self._view.world
        self.trying.add(where)
        try:
            position = None
            try:
                position = await self._view.append(self._identity.claiming(where), key)
                self._write_backoff.succeeded()
            except RevisionConflict:
                pass  # somebody was quicker; the log says who
            except KeylaneError as error:
                await self._write_backoff.after(error)
            await self._view.read([world.where(*where)])
            claim = world.claim_of(*key)
            if claim is None or not self._is_mine(claim):
                verdict = None if position is None else world.verdict_of(*position)
                _log.debug("%s/%d: not won (%s)", *where, verdict.value if verdict else "not written")
                return None
            return await self._begin(where, claim)
        finally:
            self.trying.discard(where)

    async def reclaim(self, claim: Claim) -> tuple[PartitionClaim, DeliveryMode] | None:
        """Continue what another instance of this client owned, by a heartbeat: the quick restart."""
        where = TopicPartition(claim.key.topic, claim.key.partition)
        self.trying.add(where)
        try:
            offset = await self._start_offset(claim)
            try:
                await self._view.append(self._identity.heartbeat(where, offset), claim.key)
            except RevisionConflict:
                pass  # somebody wrote about it meanwhile
            except KeylaneError as error:
                await self._write_backoff.after(error)
            await self._view.read([claim.log_partition])
            now = self._view.world.claim_of(*claim.key)
            if now is None or not self._is_mine(now):
                return None
            return await self._begin(where, now)
        finally:
            self.trying.discard(where)

    def strays(self, known: set[TopicPartition]) -> list[Claim]:
        """Claims that this instance won after it gave up on them."""
        return [
            claim
            for claim in self._view.world.owned_by(self._identity.group, *self._identity.owner)
            if TopicPartition(claim.key.topic, claim.key.partition) not in known | self.trying
        ]

    async def release_stray(self, claim: Claim) -> None:
        where = TopicPartition(claim.key.topic, claim.key.partition)
        self.trying.add(where)
        try:
            assert claim.token is not None, claim
            _log.warning("%s/%d was won after this consumer gave up on it: released", *where)
            offset = await self._start_offset(claim)
            await PartitionClaim(self._view, where, claim.token, offset=lambda: offset, hold=0.0).release()
        finally:
            self.trying.discard(where)

    def _is_mine(self, claim: Claim) -> bool:
        return claim.owner == self._identity.owner and self._view.world.holds(*claim.key)

    async def _begin(self, where: TopicPartition, claim: Claim) -> tuple[PartitionClaim, DeliveryMode] | None:
        assert claim.token is not None, claim
        offset = await self._start_offset(claim)
        delivery: DeliveryMode = (
            AtLeastOnce(offset) if self._mode == "at_least_once" else AtMostOnce(offset, self._allowance)
        )
        won = PartitionClaim(self._view, where, claim.token, offset=lambda: delivery.offset, hold=delivery.hold)
        return (won, delivery) if await won.heartbeat() else None

    async def _start_offset(self, claim: Claim) -> int:
        """The offset at which a new owner begins to read."""
        where = (claim.key.topic, claim.key.partition)
        extent = await self._backoff.call(lambda: self._source.extent(*where))
        committed = await self._backoff.call(lambda: self._source.committed(self._identity.group, *where))
        at = claim.offset
        if self._mode == "at_most_once":
            at = claim.resume_at_most_once
            if at is None and await self._may_have_forgotten(claim.log_partition):
                _log.warning(
                    "%s/%d: the log no longer says up to which offset messages were taken, so this consumer begins at "
                    "the end, %d: it may skip messages, but handles none twice",
                    *where,
                    extent.end,
                )
                return extent.end
        place = resume(heartbeat=at, committed=committed, earliest=extent.earliest, end=extent.end)
        if place.lost:
            _log.warning(
                "%s/%d: %d offsets from %s on expired in the source before they were read", *where, place.lost, at
            )
        return place.offset

    async def _may_have_forgotten(self, log_partition: int) -> bool:
        """Whether records of the log have expired."""
        log = self._view.log
        return (await self._view.new_backoff().call(lambda: log.bounds(log_partition))).first > log.first_offset
