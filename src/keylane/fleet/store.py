"""The records of one fleet in the bucket `keylane-fleets`: reads, compare-and-set writes, and hints of changes.

Performs `ReadRecords` and `WriteRecord` of `core/fleet_events.py` and keeps their contract: every request ends within
its deadline, and a write whose outcome nobody knows is reported as such.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from keylane.core.fleet_events import (
    ReadFailed,
    ReadRecords,
    RecordEntry,
    RecordHint,
    RecordsRead,
    WriteConfirmed,
    WriteConflict,
    WriteRecord,
    WriteUnknown,
)
from keylane.core.fleet_records import DRAINS, to_json
from keylane.errors import FleetError, KeylaneError, RequestTimeout, RevisionConflict
from keylane.jetstream import Bucket, Connection, Publisher, open_publisher

FLEET_BUCKET = "keylane-fleets"

_FEW = 4
_WITH_PATTERNS = 20
"""Patterns come first, and match as many records as a fleet may have workers: 1,000 of the 1,024 of a request."""
_PER_REQUEST = 500


class FleetStore:
    """The records of one fleet. Enter it: it keeps a publisher and a subscription."""

    def __init__(
        self, connection: Connection, stream: str, fleet: str, *, timeout_s: float, hinted: Callable[[RecordHint], None]
    ) -> None:
        self._connection = connection
        self._bucket = Bucket(connection, FLEET_BUCKET)
        self._prefix = f"{stream}.{fleet}."
        self._timeout_s = timeout_s
        self._hinted = hinted
        self._open = AsyncExitStack()
        self._publisher: Publisher | None = None
        self._created: str | None = None
        self._created_at = 0.0
        self._newest = 0
        """The highest revision of the last look at all workers."""
        self.failure: KeylaneError | None = None
        """Why the last request got no answer; None after one that did."""

    def __repr__(self) -> str:
        return f"<FleetStore {self._prefix}>"

    async def __aenter__(self) -> Self:
        self._publisher = await self._open.enter_async_context(
            open_publisher(self._connection, timeout_s=self._timeout_s)
        )
        # Not the positions: they are many, and nobody waits for them.
        for keys in ("*", "worker.*", "claim.>"):
            await self._open.enter_async_context(self._bucket.hints(f"{self._prefix}{keys}", self._take_hint))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    def _take_hint(self, key: str, value: bytes | None) -> None:
        self._hinted(RecordHint(key.removeprefix(self._prefix), value))

    async def read(self, request: ReadRecords) -> RecordsRead | ReadFailed:
        try:
            async with asyncio.timeout(self._timeout_s):
                entries = await self._entries(request.keys)
                created = await self._made(request.keys, entries)
        except KeylaneError as error:
            self.failure = error
            return ReadFailed(request.keys)
        except TimeoutError:
            self.failure = RequestTimeout(f"bucket {FLEET_BUCKET!r} did not answer within {self._timeout_s:g} s")
            return ReadFailed(request.keys)
        if created is None:
            self.failure = FleetError(f"bucket {FLEET_BUCKET!r} does not exist any more")
            return ReadFailed(request.keys)
        self.failure = None
        return RecordsRead(request.keys, entries, created)

    async def _entries(self, keys: tuple[str, ...]) -> dict[str, RecordEntry]:
        """A few records as their leader has them; many in a few requests, from any replica."""
        if len(keys) <= _FEW and not any(key.endswith("*") for key in keys):
            alone = await asyncio.gather(*(self._bucket.get(f"{self._prefix}{key}") for key in keys))
            found = [one for one in alone if one is not None]
        else:
            asked = [f"{self._prefix}{key}" for key in keys]
            cuts = [0, *range(_WITH_PATTERNS, len(asked), _PER_REQUEST), len(asked)]
            parts = [asked[start:end] for start, end in itertools.pairwise(cuts)]
            answers = [await self._bucket.get_many(part, timeout_s=self._timeout_s) for part in parts]
            found = [one for answer in answers for one in answer]
        return {one.key.removeprefix(self._prefix): RecordEntry(one.revision, one.value) for one in found}

    async def newest(self, prefix: str) -> dict[str, RecordEntry]:
        """The records whose keys begin with `prefix.`, as the bucket's leader has them. Raises where it fails."""
        found = await self._bucket.entries(f"{self._prefix}{prefix}")
        return {one.key.removeprefix(self._prefix): RecordEntry(one.revision, one.value) for one in found}

    async def _made(self, keys: tuple[str, ...], entries: Mapping[str, RecordEntry]) -> str | None:
        """When the bucket was created, as the server says it now, or said it within the last three `_timeout_s`.

        One that was made anew lacks records, or counts its revisions from the beginning: then the server is asked.
        """
        now = asyncio.get_running_loop().time()
        is_odd = any(key not in entries for key in keys if not key.endswith("*") and key != DRAINS)
        if any(key.endswith("*") for key in keys):
            newest = max((one.revision for one in entries.values()), default=0)
            is_odd |= newest < self._newest
            self._newest = newest
        if self._created is None or is_odd or now >= self._created_at + 3 * self._timeout_s:
            made = await self._bucket.created()
            self._created, self._created_at = made.isoformat() if made is not None else None, now
        return self._created

    async def write(self, request: WriteRecord) -> WriteConfirmed | WriteConflict | WriteUnknown:
        assert self._publisher is not None
        value = to_json(request.record)
        try:
            revision = await self._bucket.put(
                f"{self._prefix}{request.key}", value, revision=request.revision, publisher=self._publisher
            )
        except RevisionConflict:
            return WriteConflict(request.key)
        except KeylaneError as error:
            self.failure = error
            return WriteUnknown(request.key)
        self.failure = None
        return WriteConfirmed(request.key, revision)
