"""Claims of partitions under the lease of one worker: who owns what, by compare-and-set, with a token that only grows.

The rules are those of `core/fleet_claims.py`, which the worker itself follows for its own partitions; here they are
asked by name and answered at once. A claim lives as long as the lease of its worker: if that ends, others may claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keylane.core.fleet_claims import AssignedPartition, ClaimStep, Ownership
from keylane.core.fleet_events import (
    DrainPartition,
    FleetAction,
    ReadFailed,
    ReadRecords,
    RecordEntry,
    WriteConfirmed,
    WriteConflict,
    WriteRecord,
)
from keylane.core.fleet_records import FleetClaim, check_partition, claim_key, from_json
from keylane.core.fleet_requests import StoreRequests
from keylane.core.fleet_worker import FleetWorker
from keylane.errors import FleetError, InvalidInput
from keylane.fleet.store import FleetStore

_TRIES = 8


class PartitionClaimer:
    """The claims of one worker: `worker.claimer`.

    The fleet's own partitions go to whom the leader gives them, so `claim` and `release` take other names: of work that
    one worker at a time may do.

    >>> token = await worker.claimer.claim("nightly-report")
    >>> if token is not None:  # this worker, and no other one
    ...     await write_report(token)
    ...     await worker.claimer.release("nightly-report")
    """

    def __init__(
        self,
        core: FleetWorker,
        store: FleetStore,
        *,
        is_partition: Callable[[str], bool],
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._store = store
        self._is_partition = is_partition
        self._clock = clock
        self._asking = asyncio.Lock()
        self._claims: Ownership | None = None
        """Under the present lease, of names that are no partitions of the fleet."""

    def __repr__(self) -> str:
        owned = [name for name, one in self._owned().items() if one.step is ClaimStep.HELD]
        return f"<PartitionClaimer of {self._core.worker_id or '?'}: {', '.join(sorted(owned)) or 'nothing'}>"

    async def claim(self, name: str) -> int | None:
        """Claim it; returns its token, or None if another worker that is alive owns it. Again: the same token.

        The token is higher than every one before. Raises `FleetError` while the store or the lease is in doubt.
        """
        async with self._asking:
            claims = self._checked(name)
            claims.want(frozenset({*claims.partitions, name}))
            claims.requests.look(claim_key(name))
            for _ in range(_TRIES):
                await self._perform(claims)
                claims.claim_free(self._clock())
                if not claims.requests.actions:
                    break
            claims.unpins.clear()  # there is no pin
            token, one = claims.token(name), claims.partitions[name]
            if token is None:
                claims.want(frozenset(claims.partitions) - {name})
                claims.requests.take()
                if one.claim is None or not one.claim.held:
                    why = one.waits_for or self._store.failure or "others write it"
                    raise FleetError(f"the claim of {name!r} is in doubt: {why}")
            return token

    async def release(self, name: str) -> bool:
        """Give it back; False: this worker does not own it, or does not any more, and nothing was changed."""
        async with self._asking:
            claims = self._checked(name)
            if claims.token(name) is None:
                return False
            claims.requests.look(claim_key(name))  # another one may have claimed it since
            await self._perform(claims)
            is_owned = claims.token(name) is not None
            claims.want(frozenset(claims.partitions) - {name})
            await self._perform(claims)
            if name in claims.partitions:
                raise FleetError(f"{name!r} is not released yet: {self._store.failure or 'others write its claim'}")
            return is_owned

    async def is_owner(self, partition: str) -> bool:
        """Whether this worker owns it now, also by the store's leader. Of a name, or of a partition of the fleet."""
        check_partition(partition)
        found = await self._stored(partition)
        mine = self._owned().get(partition)
        return (
            mine is not None
            and mine.step in (ClaimStep.HELD, ClaimStep.DRAINING)
            and found is not None
            and found[0].held
            and (found[0].instance, found[0].token) == (self._core.lease.instance, mine.token)
            and self._core.may_start(self._clock())
        )

    async def is_held(self, partition: str) -> bool:
        """Whether a worker may have it: its claim is not released, and its lease has not ended."""
        found = await self._stored(partition)
        if found is None or not found[0].held:
            return False
        return not self._core.view.has_ended(found[0].worker, found[0].instance, found[1])

    async def _stored(self, partition: str) -> tuple[FleetClaim, int] | None:
        """The claim that the store's leader has, with its revision; None: there is none."""
        key = claim_key(partition)
        entry = (await self._read(ReadRecords((key,)))).get(key)
        if entry is None or entry.value is None:
            return None
        record = from_json(key, entry.value)
        assert isinstance(record, FleetClaim)
        return record, entry.revision

    # ---- what the rules ask for -----------------------------------------------------------------------------------

    def _owned(self) -> dict[str, AssignedPartition]:
        mine = self._claims.partitions if self._claims is not None and self._is_present(self._claims) else {}
        return {**(self._core.ownership.partitions if self._core.ownership is not None else {}), **mine}

    def _is_present(self, claims: Ownership) -> bool:
        return claims.instance == self._core.lease.instance

    def _checked(self, name: str) -> Ownership:
        check_partition(name)
        if self._is_partition(name):
            raise InvalidInput(f"partition {name} of the fleet goes to whom its leader gives it: claim another name")
        worker, lease = self._core, self._core.lease
        if not worker.may_start(self._clock()) or lease.worker is None:
            raise FleetError(f"worker {worker.worker_id or '?'} has no lease that is sure now: nothing can be claimed")
        if self._claims is None or not self._is_present(self._claims):
            self._claims = Ownership(worker.view, StoreRequests(worker.view), lease.worker, lease.instance)
        return self._claims

    async def _read(self, request: ReadRecords) -> dict[str, RecordEntry]:
        answer = await self._store.read(request)
        if isinstance(answer, ReadFailed):
            raise FleetError(f"the claims cannot be read: {self._store.failure}")
        return dict(answer.entries)

    async def _perform(self, claims: Ownership) -> None:
        """Do what the rules ask for, and tell them what came of it, until they ask for nothing more."""
        for _ in range(_TRIES):
            actions = claims.requests.take()
            if not actions:
                return
            for action in actions:
                await self._do(claims, action)

    async def _do(self, claims: Ownership, action: FleetAction) -> None:
        match action:
            case ReadRecords(keys):
                try:
                    entries = await self._read(action)
                finally:
                    claims.requests.read_ended(keys)
                for key in keys:
                    claims.found(key.removeprefix(claim_key("")), entries.get(key), self._clock())
            case WriteRecord(key):
                answer = await self._store.write(action)
                write = claims.requests.answered(key)
                assert write is not None
                if isinstance(answer, WriteConfirmed):
                    claims.confirmed(write, answer.revision, self._clock())
                elif isinstance(answer, WriteConflict):
                    claims.conflicted(write)
                else:
                    claims.unknown(write)
            case DrainPartition(partition):
                claims.drained(partition, self._clock())
            case _:
                pass  # nothing is read here: there is nothing to open, start or close
