"""Winning a partition: the claim, its verdict, the place to begin, and the first heartbeat.

Owns: the steps from "nobody has it" to a tenure. A claim is judged once, by the log. A win that arrives after this
consumer gave up is released at once, so that it never stays unserved.
"""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias, get_args

from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Claim, Verdict
from keylane.core.partition_offsets import resume
from keylane.errors import KeylaneError, RevisionConflict
from keylane.marshal.at_least_once import AtLeastOnce
from keylane.marshal.at_most_once import Allowance, AtMostOnce
from keylane.marshal.author import Author
from keylane.marshal.logbook import LogBook
from keylane.marshal.source import Source
from keylane.marshal.tenure import Tenure
from keylane.marshal.trouble import Patience

_log = logging.getLogger("keylane.marshal")

Mode: TypeAlias = Literal["at_least_once", "at_most_once"]
Work: TypeAlias = AtLeastOnce | AtMostOnce
MODES: tuple[Mode, ...] = get_args(Mode)


class Claimer:
    """Claims for one consumer. `batch_size`: at most once, how many messages it may have taken and not done."""

    def __init__(
        self, book: LogBook, author: Author, source: Source, mode: Mode, patience: Patience, *, batch_size: int
    ) -> None:
        self._book = book
        self._author = author
        self._source = source
        self._mode = mode
        self._patience = patience
        self._allowance = Allowance(batch_size)
        self._writing = book.new_patience()
        self.trying: set[TopicPartition] = set()
        """What a claim or a release of ours is under way for."""

    def foresee(self, where: TopicPartition) -> Verdict:
        """What a claim would get. One that would be unsure is not worth a try: two intervals later it is."""
        return self._book.foresee(self._author.key(where), self._author.owner)

    async def claim(self, where: TopicPartition) -> tuple[Tenure, Work] | None:
        """Try once; None: somebody else has it, the group is paused, or it is not known yet."""
        key = self._author.key(where)
        self.trying.add(where)
        try:
            position = None
            try:
                position = await self._book.append(self._author.claiming(where), key)
                self._writing.worked()
            except RevisionConflict:
                pass  # somebody was quicker; the log says who
            except KeylaneError as error:
                await self._writing.after(error)
            await self._book.read([self._book.where(key)])
            claim = self._book.claim_of(key)
            if claim is None or not self._is_mine(claim):
                verdict = None if position is None else self._book.world.verdict_of(*position)
                _log.debug("%s/%d: not won (%s)", *where, verdict.value if verdict else "not written")
                return None
            return await self._begin(where, claim)
        finally:
            self.trying.discard(where)

    async def reclaim(self, claim: Claim) -> tuple[Tenure, Work] | None:
        """Go on with what another instance of this client had, by a heartbeat: the quick restart."""
        where = TopicPartition(claim.key.topic, claim.key.partition)
        self.trying.add(where)
        try:
            offset = await self._place(claim)
            try:
                await self._book.append(self._author.heartbeat(where, offset), claim.key)
            except RevisionConflict:
                pass  # somebody wrote about it meanwhile
            except KeylaneError as error:
                await self._writing.after(error)
            await self._book.read([claim.log_partition])
            now = self._book.claim_of(claim.key)
            if now is None or not self._is_mine(now):
                return None
            return await self._begin(where, now)
        finally:
            self.trying.discard(where)

    def strays(self, known: set[TopicPartition]) -> list[Claim]:
        """What this instance won after it gave up."""
        return [
            claim
            for claim in self._book.world.owned_by(self._author.group, *self._author.owner)
            if TopicPartition(claim.key.topic, claim.key.partition) not in known | self.trying
        ]

    async def release_stray(self, claim: Claim) -> None:
        where = TopicPartition(claim.key.topic, claim.key.partition)
        self.trying.add(where)
        try:
            assert claim.token is not None, claim
            _log.warning("%s/%d was won after this consumer gave up on it: released", *where)
            tenure = Tenure(self._book, self._author, where, claim.token, self._work(await self._place(claim)))
            await tenure.release()
        finally:
            self.trying.discard(where)

    def _is_mine(self, claim: Claim) -> bool:
        return claim.owner == self._author.owner and claim.holds(self._book.now_ms(claim.key))

    async def _begin(self, where: TopicPartition, claim: Claim) -> tuple[Tenure, Work] | None:
        assert claim.token is not None, claim
        work = self._work(await self._place(claim))
        tenure = Tenure(self._book, self._author, where, claim.token, work)
        tenure.retries = work.retries
        return (tenure, work) if await tenure.heartbeat() else None

    def _work(self, offset: int) -> Work:
        return AtLeastOnce(offset) if self._mode == "at_least_once" else AtMostOnce(offset, self._allowance)

    async def _place(self, claim: Claim) -> int:
        """Where to go on."""
        where = (claim.key.topic, claim.key.partition)
        while True:
            try:
                extent = await self._source.extent(*where)
                committed = await self._source.committed(self._author.group, *where)
            except KeylaneError as error:
                await self._patience.after(error)
            else:
                self._patience.worked()
                break
        at = claim.offset
        if self._mode == "at_most_once":
            at = claim.resume_at_most_once
            if at is None and await self._may_have_forgotten(claim.log_partition):
                _log.warning(
                    "%s/%d: the log no longer says how far it was taken, so it begins at its end, %d: rather lost than "
                    "done twice",
                    *where,
                    extent.end,
                )
                return extent.end
        place = resume(heartbeat=at, committed=committed, earliest=extent.earliest, end=extent.end)
        if place.lost:
            _log.warning("%s/%d: %d offsets from %s on are gone before they were read", *where, place.lost, at)
        return place.offset

    async def _may_have_forgotten(self, log_partition: int) -> bool:
        """Whether the log lost records by age."""
        while True:
            try:
                return (await self._book.log.bounds(log_partition)).first > self._book.log.first_offset
            except KeylaneError as error:
                await self._writing.after(error)
