"""One driver of a query at a time: a record in KV that its holder renews, and that a standby watches.

No clocks of two machines are compared. The holder rewrites the record every third of the lease; a standby takes it
when its revision has not changed for a whole lease on the standby's own clock, or at once when it was released. The
holder counts from the moment at which it sent its last successful renewal, so its lease always ends before the standby
may take it. Once lost, a lease object stays lost: a process that was frozen finds it lost when it wakes.

Never looks at checkpoints, and never ends anything by itself: callers use `check()` before they act.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import nats.errors

from keylane.core.names import check_query_name
from keylane.errors import (
    ApiError,
    ApiUnavailable,
    Disconnected,
    InvalidInput,
    KeylaneError,
    PermissionDenied,
    PublishFailed,
    QueryFenced,
    RequestTimeout,
    RevisionConflict,
)
from keylane.jetstream import Connection, KvEntry
from keylane.spark.options import LONGEST_LEASE_S, SHORTEST_LEASE_S
from keylane.spark.parent_process import ParentProcess
from keylane.spark.query_records import BUCKET, bucket_of, lease_key

_log = logging.getLogger("keylane.spark.driver.lease")

_LOOK_S = 0.5
"""How often a waiting or holding process checks that its JVM still runs. Costs no request to the server."""
_RETRY_S = 0.25
_EARLY_S = (0.05, 0.1, 0.2, 0.4)
"""A hint arrives before the stream has stored the record that it announces: read again after these pauses."""
_LONGEST_TROUBLE_S = 60.0
_PASSING = (ApiError, ApiUnavailable, Disconnected, PublishFailed, RequestTimeout, nats.errors.Error)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Who holds a query, as it is stored. `token` is drawn by each taker: only its owner writes it."""

    holder: str
    token: str
    lease_s: float

    def to_json(self) -> bytes:
        return json.dumps({"holder": self.holder, "token": self.token, "lease_s": self.lease_s}).encode()

    @classmethod
    def of(cls, entry: KvEntry | None) -> LeaseRecord | None:
        """The record in an entry; None if there is none, or it was released."""
        if entry is None or entry.value is None:
            return None
        try:
            wire = json.loads(entry.value)
            return cls(str(wire["holder"]), str(wire["token"]), float(wire["lease_s"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f"record {entry.key!r} in bucket {BUCKET!r} is not a lease ({entry.value[:80]!r}): if no driver runs "
                "this query, delete this key"
            ) from error


class LeaseExpiry:
    """How long a record has not changed, on this process's clock, and whether that is long enough to call it dead."""

    def __init__(self) -> None:
        self.revision: int | None = None
        self._since = 0.0
        self._lease_s = 0.0
        self.holder = "nobody"

    @property
    def left_s(self) -> float:
        """How long until the record counts as dead, if it does not change."""
        return max(0.0, self._since + self._lease_s - time.monotonic())

    def saw(self, entry: KvEntry | None) -> bool:
        """Record the newest entry; returns whether nobody holds the lease: free, released, or expired."""
        record = LeaseRecord.of(entry)
        if record is None and (entry is not None or self.revision is None):
            return True
        revision = entry.revision if entry is not None else 0  # the whole bucket is gone: its holder may not know
        if revision != self.revision:
            self.revision, self._since = revision, time.monotonic()
            if record is not None:
                self._lease_s, self.holder = record.lease_s, record.holder
        return self.left_s == 0.0


class Lease:
    """The lease of one query, for one driver.

    >>> lease = Lease(connection, "orders-lake", holder_name(), lease_s=10)
    >>> await lease.take()      # waits while another driver has it
    >>> lease.check()           # before every step; raises QueryFenced once it is lost
    >>> await lease.release()

    `replicas` is for the bucket, if it has to be made.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        holder: str,
        lease_s: float,
        *,
        replicas: int = 1,
        caller: ParentProcess | None = None,
    ) -> None:
        if not SHORTEST_LEASE_S <= lease_s <= LONGEST_LEASE_S:
            raise InvalidInput(f"leaseSeconds is {lease_s:g}: give {SHORTEST_LEASE_S:g} to {LONGEST_LEASE_S:g}")
        self.name = check_query_name(name)
        self.lease_s = lease_s
        self._connection = connection
        self._bucket = bucket_of(connection)
        self._key = lease_key(name)
        self._record = LeaseRecord(holder, secrets.token_hex(8), lease_s)
        self._replicas = replicas
        self._caller = caller or ParentProcess()
        self._revision: int | None = None
        self._renewed_at = 0.0
        self._lost: str | None = None
        self._ending = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        if self._revision is None and self._lost is None:
            return f"<Lease {self.name} not taken>"
        return f"<Lease {self.name} {self._reason_lost() or 'held'}>"

    # ---- the driver's side --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `QueryFenced` unless the lease is held now. May be called from any thread; asks no server."""
        reason = self._reason_lost()
        if reason is not None:
            raise QueryFenced(
                f"this driver does not hold the lease of query {self.name!r}: {reason}. It does nothing more, because "
                "another driver of that name may run the query. Start it again if none does"
            )

    async def take(self, on_waiting: Callable[[str], None] | None = None) -> None:
        """Get the lease; waits without limit while another driver holds it. Renews it from then on.

        `on_waiting` is called once with the holder's name, if there is one. Raises `QueryFenced` when the JVM of this
        process ends meanwhile. Errors of the server are retried for a minute.
        """
        assert self._renewing is None, "a lease is taken once"
        changed = asyncio.Event()
        expiry = LeaseExpiry()
        trouble = _Trouble(self.name, _LONGEST_TROUBLE_S)
        waiting = hinted = False
        early = iter(_EARLY_S)
        async with self._bucket.hints(self._key, changed.set):
            while self._revision is None:
                if self._caller.is_gone():
                    self._lost = "its JVM ended, or the query was stopped, while it waited for the lease"
                    self.check()
                changed.clear()
                before = expiry.revision
                try:
                    if await self._take_if_free(expiry):
                        break
                    trouble.over()
                except RevisionConflict:
                    continue
                except _PASSING as error:
                    if self._connection.is_closed or isinstance(error, PermissionDenied):
                        raise
                    trouble.saw(error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                if not waiting:
                    waiting = True
                    self._tell_waiting(expiry.holder, on_waiting)
                if hinted and expiry.revision == before and (pause_s := next(early, None)) is not None:
                    await asyncio.sleep(pause_s)
                    continue
                early = iter(_EARLY_S)
                await self._wait_for_change(changed, expiry)
                hinted = changed.is_set()
        self._renewing = asyncio.get_running_loop().create_task(self._renew_until_lost())
        if waiting:
            _log.warning("query %r: this driver has the lease now", self.name)

    async def release(self) -> None:
        """Let a standby take over at once. Safe to repeat, and after the lease was lost."""
        self._ending.set()
        if self._renewing is not None:
            await self._renewing
        await self._let_go("it was released")

    # ---- getting it ---------------------------------------------------------------------------------

    async def _take_if_free(self, expiry: LeaseExpiry) -> bool:
        entry = await self._bucket.get(self._key)
        if entry is None:
            await self._bucket.ensure(replicas=self._replicas)
        # Our own token: an earlier try was stored, and only its answer was lost.
        if not expiry.saw(entry) and not self._is_ours(entry):
            return False
        await self._write(entry.revision if entry is not None else 0)
        return True

    async def _write(self, revision: int) -> None:
        started_at = _clock()
        self._revision = await self._bucket.put(
            self._key, self._record.to_json(), revision=revision, timeout_s=self._attempt_s
        )
        self._renewed_at = started_at

    async def _wait_for_change(self, changed: asyncio.Event, expiry: LeaseExpiry) -> None:
        """Until the record was written, or has not been for its whole lease, or the JVM is gone."""
        while not changed.is_set() and expiry.left_s and not self._caller.is_gone():
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(expiry.left_s, _LOOK_S))

    def _tell_waiting(self, holder: str, on_waiting: Callable[[str], None] | None) -> None:
        _log.warning("query %r is run by %s: this driver waits and takes over if that one ends", self.name, holder)
        if on_waiting is not None:
            on_waiting(holder)

    # ---- keeping it ---------------------------------------------------------------------------------

    async def _renew_until_lost(self) -> None:
        trouble = _Trouble(self.name)
        pause_s = self.lease_s / 3
        while await self._pause(pause_s):
            try:
                await self._write(self._held_revision())
                trouble.over()
                pause_s = self.lease_s / 3
            except RevisionConflict:
                pause_s = _RETRY_S if await self._still_ours() else 0.0
            except (
                KeylaneError,
                nats.errors.Error,
            ) as error:  # whatever it is: without a renewal the lease runs out by itself
                trouble.saw(error)
                pause_s = _RETRY_S

    async def _pause(self, pause_s: float) -> bool:
        """Wait; returns whether the lease is to be renewed then."""
        end = time.monotonic() + pause_s
        while self._reason_lost() is None and not self._ending.is_set() and not self._connection.is_closed:
            if self._caller.is_gone():
                await self._let_go("its JVM ended, or the query was stopped")
                return False
            left_s = end - time.monotonic()
            if left_s <= 0:
                return True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), min(left_s, _LOOK_S))
        return False

    async def _still_ours(self) -> bool:
        """After a refused renewal: it may be that one of our own was stored and only its answer was lost."""
        try:
            entry = await self._bucket.get(self._key)
        except _PASSING:
            return True  # not known: the lease runs on until it is, or is over
        if entry is not None and self._is_ours(entry):
            self._revision = entry.revision
            return True
        record = LeaseRecord.of(entry)
        self._lost = f"{record.holder} took it" if record is not None else "somebody deleted it"
        return False

    async def _let_go(self, reason: str) -> None:
        if self._reason_lost() is not None:
            return
        revision, self._lost = self._held_revision(), reason
        try:
            await self._bucket.delete(self._key, revision=revision, timeout_s=self._attempt_s)
        except (*_PASSING, RevisionConflict) as error:
            _log.warning("query %r: its lease was not released, it runs out by itself: %s", self.name, error)

    # ---- facts --------------------------------------------------------------------------------------

    @property
    def _attempt_s(self) -> float:
        return self.lease_s / 3

    def _held_revision(self) -> int:
        assert self._revision is not None
        return self._revision

    def _is_ours(self, entry: KvEntry | None) -> bool:
        record = LeaseRecord.of(entry)
        return record is not None and record.token == self._record.token

    def _reason_lost(self) -> str | None:
        """Why the lease is not held. A lease that ran out stays lost, whatever a late answer says."""
        if self._revision is None:
            return self._lost or "it was not taken"
        if self._lost is None and _clock() - self._renewed_at >= self.lease_s:
            self._lost = (
                f"it could not be renewed for {self.lease_s:g} s, because the server did not answer or this process "
                "was suspended"
            )
        return self._lost


class _Trouble:
    """Errors of the server: logged once, and raised when they last too long."""

    def __init__(self, query: str, longest_s: float = math.inf) -> None:
        self._query = query
        self._longest_s = longest_s
        self._since: float | None = None

    def saw(self, error: Exception) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
            _log.warning("query %r: its lease cannot be read or written: %s", self._query, error)
        elif now - self._since > self._longest_s:
            raise error

    def over(self) -> None:
        self._since = None


def holder_name(application: str | None = None) -> str:
    """The name of a driver in records, logs and errors: where its JVM runs, and its id in Spark where known."""
    called = f", application {application}" if application else ""
    return f"the driver on {socket.gethostname()}, process {os.getppid()}{called}"


def _clock() -> float:
    """Seconds that also count while the machine sleeps: a holder must not think that it has time left."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
