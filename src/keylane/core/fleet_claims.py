"""The partitions of one worker: waiting for a claim, claiming, owning, draining, releasing.

Theory of operation. An assignment says who is to own a partition, the claim record says who does. A worker that is
given a partition opens it as a standby at once, so that the server can deliver without a pause, and handles nothing of
it before its claim is written. The owner before drains it, and writes the claim `released`. Each claim has a higher
token than the one before; the token goes with every call of a handler.

A claim may be written over another one if that is released, or if its holder has lost its lease for good (the view says
so). What has been written is certain only with its answer. After an unknown outcome the record is read and written
again, until an answer says what is stored: the first write may land late, and a claim that its owner does not know
would block the partition, a release that it does not know would give the partition away under its hands.

An owner whose lease was renewed too late may have been replaced, and a store that went back since may not tell: its
claim looks as it did, and the token of the owner between is lost with it. So it goes on only where the server confirms
its pin, until it has claimed the partition again, with a token above all that anybody has used.

| step | what happened | wanted | not wanted |
| --- | --- | --- | --- |
| (none) | assigned | open, read the claim: STANDBY | |
| STANDBY | the claim is free | write it: CLAIMING | close: (none) |
| CLAIMING | confirmed | start: HELD | write the release: RELEASING |
| CLAIMING | conflict | read: STANDBY | close: (none) |
| CLAIMING | unknown | read: mine: as confirmed; unchanged: write again; else as a conflict | the same |
| HELD | not assigned any more | | drain: DRAINING |
| HELD | read: absent, or with a lower token | write mine again: the store went back | |
| HELD | read: another's, with a higher token | drain without a release: LOST | |
| HELD | the lease was renewed too late | read the claim: LATE | |
| LATE | read: mine | write it with a new token; confirmed: HELD | |
| LATE | read: absent, or with a lower token | the store went back: wait until it has recovered, then as above | |
| LATE | read: another's, with a higher token | drain without a release: LOST | |
| LATE | not assigned any more | | drain: DRAINING |
| DRAINING | drained | write the release: RELEASING | close, write the release: RELEASING |
| RELEASING | confirmed | STANDBY | (none) |
| RELEASING | conflict, unknown | read: mine, lower or absent: release again; higher: as confirmed | the same |
| LOST | drained | read: STANDBY | close: (none) |
| (none) | read: held by this worker, which gave it up | | write the release again: the store went back |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from heapq import heappop, heappush

from keylane.core.fleet_events import (
    ChangeToken,
    ClosePartition,
    DrainPartition,
    OpenPartition,
    RecordEntry,
    StartPartition,
    UnpinPartition,
)
from keylane.core.fleet_records import FleetClaim, claim_key, to_json
from keylane.core.fleet_requests import PendingWrite, StoreRequests
from keylane.core.fleet_view import FleetView

_MOST_UNPINS = 4


class ClaimStep(Enum):
    STANDBY = auto()
    CLAIMING = auto()
    HELD = auto()
    LATE = auto()
    DRAINING = auto()
    RELEASING = auto()
    LOST = auto()


@dataclass(slots=True)
class AssignedPartition:
    """One partition as this worker has it."""

    partition: str
    step: ClaimStep = ClaimStep.STANDBY
    wanted: bool = True
    token: int = 0
    """Of the claim that this worker has written, or is writing."""
    revision: int = 0
    """What the next write of the claim expects."""
    claim: FleetClaim | None = None
    """As last read or written."""
    read_since: float = 0.0
    """When a standby first read it as it is."""
    known: bool = False
    """The claim was read, or written, since something else was heard of it."""
    doubt: bool = False
    """A write of this claim had no answer: it may have landed, or may still."""
    force: bool = False
    """The owner before did not release it."""
    closed: bool = False
    """Nothing of it runs, and the pin is given back, before the release is confirmed: the next owner need not wait."""
    pinned: bool = False
    missing: bool = False
    """The store lost the claim while the lease was not sure, and that was told."""
    waits_for: str = ""


@dataclass(slots=True)
class Ownership:
    """The partitions of this worker, under one lease."""

    view: FleetView
    requests: StoreRequests
    worker: int
    instance: str
    partitions: dict[str, AssignedPartition] = field(default_factory=dict)
    standby: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    """Of those, the ones whose claim may have become free: a worker may have ten thousand partitions."""
    busy: int = 0
    """In how many of them something may run."""
    late: set[str] = field(default_factory=set)
    """Those that were owned when the lease was renewed too late, until they are claimed again."""
    unpins: list[tuple[float, int, str]] = field(default_factory=list)
    """When to clear a pin, for which time, of which partition: a heap."""
    past: dict[str, int] = field(default_factory=dict)
    """Partition -> the token under which this instance owned it. A store that went back may still say `held`."""
    token_written: bool = False
    """A claim was written since the lease was last renewed: renew it, so that its record knows the token."""
    went_back: bool = False
    """A lost claim was written again: the store went back. Whoever reads it clears it."""

    # ---- what is wanted ------------------------------------------------------------------------------------

    def want(self, wanted: frozenset[str]) -> None:
        """Own these partitions, and no others."""
        opened = sorted(wanted - self.partitions.keys())
        for name in opened:
            self.partitions[name] = AssignedPartition(name)
            self.standby.add(name)
            self.requests.do(OpenPartition(name))
        self.requests.read(*map(claim_key, opened))
        for one in list(self.partitions.values()):
            one.wanted = one.partition in wanted
            if not one.wanted and one.step is ClaimStep.STANDBY:
                self._close(one)
            elif not one.wanted and one.step in (ClaimStep.HELD, ClaimStep.LATE):
                self._go(one, ClaimStep.DRAINING)
                self.requests.do(DrainPartition(one.partition))

    def _go(self, one: AssignedPartition, step: ClaimStep) -> None:
        self.busy += (step in _BUSY) - (one.step in _BUSY)
        one.step = step
        if step is ClaimStep.STANDBY:
            self.standby.add(one.partition)
            self.ready.add(one.partition)
        else:
            self.standby.discard(one.partition)
        one.missing = one.missing and step is ClaimStep.LATE
        if step is ClaimStep.LATE:
            self.late.add(one.partition)
        else:
            self.late.discard(one.partition)

    def _close(self, one: AssignedPartition) -> None:
        del self.partitions[one.partition]
        self.standby.discard(one.partition)
        if one.token:
            self.past[one.partition] = one.token
        if not one.closed:
            self.requests.do(ClosePartition(one.partition))

    def _settle(self, one: AssignedPartition) -> None:
        """Nothing of it is this worker's: wait for the claim again, or close it."""
        one.doubt = False
        self._go(one, ClaimStep.STANDBY)
        if one.wanted and one.closed:
            one.closed = False
            self.requests.do(OpenPartition(one.partition))
        if not one.wanted:
            self._close(one)
        elif not one.known:
            self.requests.read(claim_key(one.partition))

    # ---- claiming ------------------------------------------------------------------------------------------

    def claim_free(self, now: float) -> None:
        """Claim what is free. To be called after reads, while the lease is sure."""
        ready, self.ready = self.ready & self.standby, set()
        for name in sorted(ready):
            one = self.partitions[name]
            if one.known and not self.requests.is_writing(claim_key(name)):
                one.waits_for = self.obstacle(one, now)
                if not one.waits_for:
                    self._claim(one, now)

    def obstacle(self, one: AssignedPartition, now: float) -> str:
        """Why this partition cannot be claimed now; empty if it can."""
        if (why := self.view.broken.get(claim_key(one.partition))) is not None:
            return why
        claim = one.claim
        if self.view.is_recovering(now):
            return f"partition {one.partition}: the store lost records, and owners write their claims again"
        if claim is None or not claim.held or claim.instance == self.instance:
            return ""
        if self.view.has_ended(claim.worker, claim.instance, one.revision, one.read_since):
            return ""
        return f"partition {one.partition}: worker {claim.worker} to release it"

    def _claim(self, one: AssignedPartition, now: float) -> None:
        before = one.claim
        one.force = before is not None and before.held and before.instance != self.instance
        one.token = self.view.next_token(before.token if before is not None else 0, now)
        one.doubt = False
        self._go(one, ClaimStep.CLAIMING)
        self._write(one, now, held=True)

    def _claim_again(self, one: AssignedPartition, now: float) -> None:
        """What runs goes on under the token of before, until the new one is confirmed."""
        before = one.claim.token if one.claim is not None else 0
        self._write(one, now, held=True, token=self.view.next_token(max(before, one.token), now))

    def _write(self, one: AssignedPartition, now: float, *, held: bool, token: int | None = None) -> None:
        token = one.token if token is None else token
        self.view.highest_token = max(self.view.highest_token, token)
        extra = one.claim.extra if one.claim is not None else {}
        claim = FleetClaim(
            partition=one.partition,
            worker=self.worker,
            instance=self.instance,
            token=token,
            held=held,
            extra=extra,
        )
        self.requests.write(claim, one.revision, now)

    # ---- answers -------------------------------------------------------------------------------------------

    def confirmed(self, write: PendingWrite, revision: int, now: float) -> None:
        assert isinstance(write.record, FleetClaim)
        one = self.partitions.get(write.record.partition)
        if one is None:
            return
        one.claim, one.revision, one.known, one.doubt = write.record, revision, True, False
        self._stored(one, now)

    def _stored(self, one: AssignedPartition, now: float) -> None:
        """The stored claim is what this worker wrote last."""
        assert one.claim is not None
        if one.step is ClaimStep.CLAIMING:
            self.token_written = True
            if one.wanted:
                self._go(one, ClaimStep.HELD)
                one.pinned = False
                heappush(self.unpins, (now + self.view.lease_s / 3, 0, one.partition))
                self.requests.do(StartPartition(one.partition, one.token, one.force))
            else:
                self._go(one, ClaimStep.RELEASING)
                self._write(one, now, held=False)
        elif one.step is ClaimStep.RELEASING and one.claim.held:
            self._write(one, now, held=False)
        elif one.step is ClaimStep.RELEASING:
            self._settle(one)
        elif one.step is ClaimStep.HELD:
            self.went_back = True
        elif one.step is ClaimStep.LATE and one.claim.token > one.token:
            one.token, self.token_written = one.claim.token, True
            self._go(one, ClaimStep.HELD)
            self.requests.do(ChangeToken(one.partition, one.token))

    def conflicted(self, write: PendingWrite) -> None:
        assert isinstance(write.record, FleetClaim)
        one = self.partitions.get(write.record.partition)
        if one is None:
            return
        one.known = False
        if one.step is ClaimStep.CLAIMING and not one.doubt:
            self._settle(one)
        else:
            self.requests.read(claim_key(one.partition))

    def unknown(self, write: PendingWrite) -> None:
        assert isinstance(write.record, FleetClaim)
        one = self.partitions.get(write.record.partition)
        if one is not None:
            one.doubt = True
            self.requests.read(claim_key(one.partition))

    def renewed_late(self) -> None:
        """The lease is sure again, after a time when others may have expired it."""
        for one in self.partitions.values():
            if one.step is ClaimStep.HELD:
                self._go(one, ClaimStep.LATE)
        self.requests.read(*map(claim_key, sorted(self.late)))

    def found(self, partition: str, entry: RecordEntry | None, now: float) -> None:
        """The claim of a partition, as a read shows it: perhaps a stale one."""
        one = self.partitions.get(partition)
        if self.requests.is_writing(claim_key(partition)):
            return
        record = self.view.parse(claim_key(partition), entry) if entry is not None else None
        claim = record if isinstance(record, FleetClaim) else None
        revision = entry.revision if entry is not None else 0
        if one is None:
            if claim is not None and claim.held and claim.instance == self.instance:
                token = max(claim.token, self.past.get(partition, 0))
                self.requests.write(replace(claim, token=token, held=False), revision, now)
            return
        one.known = True
        self.ready.add(partition)
        _FOUND[one.step](self, one, claim, revision, now)

    def _found_standby(self, one: AssignedPartition, claim: FleetClaim | None, revision: int, now: float) -> None:
        if revision != one.revision or claim != one.claim:
            one.read_since = now
        one.claim, one.revision = claim, revision

    def _found_claiming(self, one: AssignedPartition, claim: FleetClaim | None, revision: int, now: float) -> None:
        if self._is_mine(one, claim) and claim is not None and claim.held:
            one.claim, one.revision = claim, revision
            self._stored(one, now)
        elif revision == one.revision:
            self._write(one, now, held=True)
        else:
            one.claim, one.revision = claim, revision
            self._settle(one)

    def _found_held(self, one: AssignedPartition, claim: FleetClaim | None, revision: int, now: float) -> None:
        if self._is_mine(one, claim) and claim is not None and claim.held:
            one.claim, one.revision = claim, revision
        elif not self._is_later(one, claim):
            one.revision = revision
            self._write(one, now, held=True)
        else:
            self._lose(one)

    def _found_late(self, one: AssignedPartition, claim: FleetClaim | None, revision: int, now: float) -> None:
        if claim is not None and claim.instance == self.instance and claim.held and claim.token >= one.token:
            one.claim, one.revision = claim, revision
            if claim.token > one.token:  # the new one, whose answer is lost
                self._stored(one, now)
            else:
                self._claim_again(one, now)
        elif self._is_later(one, claim):
            self._lose(one)
        else:
            one.claim, one.revision = claim, revision
            if not one.missing:
                one.missing = self.went_back = True
            elif not self.view.is_recovering(now):
                self._claim_again(one, now)

    def _lose(self, one: AssignedPartition) -> None:
        self._go(one, ClaimStep.LOST)
        self.requests.do(DrainPartition(one.partition, lost=True))

    def _found_releasing(self, one: AssignedPartition, claim: FleetClaim | None, revision: int, now: float) -> None:
        if self._is_later(one, claim):
            one.claim, one.revision = claim, revision
            self._settle(one)
        elif self._is_mine(one, claim) and claim is not None and not claim.held:
            one.claim, one.revision = claim, revision
            self._stored(one, now)
        else:
            one.revision = revision
            self._write(one, now, held=False)

    def _found_later(self, one: AssignedPartition, claim: FleetClaim | None, revision: int, now: float) -> None:
        """Handlers still run: the record is read again when they have ended."""

    def _is_mine(self, one: AssignedPartition, claim: FleetClaim | None) -> bool:
        return claim is not None and claim.instance == self.instance and claim.token == one.token

    def _is_later(self, one: AssignedPartition, claim: FleetClaim | None) -> bool:
        """Whether another claim has replaced this worker's. Tokens are equal only if the store went back."""
        return claim is not None and (claim.token, claim.instance) > (one.token, self.instance)

    def heeds(self, partition: str, value: bytes | None) -> bool:
        """Whether the claim must be read after this hint: not after this worker's own write."""
        one = self.partitions.get(partition)
        if one is None or one.step not in (ClaimStep.STANDBY, ClaimStep.HELD, ClaimStep.LATE):
            return False
        return value is None or one.claim is None or value != to_json(one.claim)

    # ---- the worker's own events ---------------------------------------------------------------------------

    def drained(self, partition: str, now: float) -> None:
        one = self.partitions.get(partition)
        if one is None:
            return
        if one.step is ClaimStep.LOST:
            one.known = False
            self._settle(one)
        elif one.step is ClaimStep.DRAINING:
            self._go(one, ClaimStep.RELEASING)
            if not one.wanted:
                one.closed = True
                self.requests.do(ClosePartition(partition))
            if not self.requests.is_writing(claim_key(partition)):
                self._write(one, now, held=False)

    def pinned(self, partition: str) -> None:
        one = self.partitions.get(partition)
        if one is not None:
            one.pinned = True

    def unpinned(self, partition: str, now: float) -> None:
        """Whoever has the pin now is not the owner: a pull that nobody reads, or a client of somebody else."""
        one = self.partitions.get(partition)
        if one is not None and one.step is ClaimStep.HELD and one.pinned:
            one.pinned = False
            heappush(self.unpins, (now + self.view.lease_s / 3, 0, partition))

    def unpin_late(self, now: float) -> None:
        """An owner that ended before its close, or was frozen, leaves its pin or an open pull behind: clear it.

        A few times only, as most partitions without a message are idle; then the pin's own timeout must do.
        """
        while self.unpins and self.unpins[0][0] <= now:
            _, times, name = heappop(self.unpins)
            one = self.partitions.get(name)
            if one is not None and one.step is ClaimStep.HELD and not one.pinned and times < _MOST_UNPINS:
                self.requests.do(UnpinPartition(name))
                heappush(self.unpins, (now + self.view.lease_s * 2**times, times + 1, name))

    def unresolved(self) -> Iterator[str]:
        """The claims to read now: what is waited for, and what is written with an unknown outcome."""
        for one in self.partitions.values():
            key = claim_key(one.partition)
            waits = one.step in (ClaimStep.STANDBY, ClaimStep.CLAIMING, ClaimStep.LATE, ClaimStep.RELEASING)
            if waits and not self.requests.is_writing(key):
                yield key

    def holders(self) -> Iterator[int]:
        """The workers that partitions are waited for."""
        for name in self.standby:
            claim = self.partitions[name].claim
            if claim is not None and claim.held:
                yield claim.worker

    def obstacles(self) -> str | None:
        """What the first partition in the order of their names waits for."""
        waits = sorted(name for name in self.standby if self.partitions[name].waits_for)
        return self.partitions[waits[0]].waits_for if waits else None

    def audited(self) -> Iterator[str]:
        """The claims to read now and then: what is owned, and what was."""
        yield from (claim_key(one.partition) for one in self.partitions.values() if one.step is ClaimStep.HELD)
        yield from (claim_key(partition) for partition in self.past.keys() - self.partitions.keys())

    def token(self, partition: str) -> int | None:
        one = self.partitions.get(partition)
        return one.token if one is not None and one.step in (ClaimStep.HELD, ClaimStep.LATE) else None


_BUSY = frozenset({ClaimStep.HELD, ClaimStep.LATE, ClaimStep.DRAINING, ClaimStep.LOST})
_FOUND = {
    ClaimStep.STANDBY: Ownership._found_standby,
    ClaimStep.CLAIMING: Ownership._found_claiming,
    ClaimStep.HELD: Ownership._found_held,
    ClaimStep.LATE: Ownership._found_late,
    ClaimStep.RELEASING: Ownership._found_releasing,
    ClaimStep.DRAINING: Ownership._found_later,
    ClaimStep.LOST: Ownership._found_later,
}
