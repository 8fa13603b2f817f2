"""The records of one fleet in the bucket `keylane-fleets`: reads, compare-and-set writes, and hints of changes.

Performs `ReadRecords` and `WriteRecord` of `core/fleet_events.py` and keeps their contract: every request ends within
its deadline, and a write whose outcome nobody knows is reported as such.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from keylane.core.fleet_records import to_json
from keylane.errors import FleetError, KeylaneError, RequestTimeout, RevisionConflict
from keylane.jetstream import Bucket, Connection

FLEET_BUCKET = "keylane-fleets"


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
        self.failure: KeylaneError | None = None
        """Why the last request got no answer; None after one that did."""

    def __repr__(self) -> str:
        return f"<FleetStore {self._prefix}>"

    async def __aenter__(self) -> Self:
        await self._open.enter_async_context(self._bucket.hints(f"{self._prefix}>", self._take_hint))
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
                created, found = await asyncio.gather(
                    self._bucket.created(), asyncio.gather(*(self._entries(key) for key in request.keys))
                )
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
        return RecordsRead(
            request.keys, {key: entry for one in found for key, entry in one.items()}, created.isoformat()
        )

    async def _entries(self, key: str) -> dict[str, RecordEntry]:
        if key.endswith("*"):
            found = await self._bucket.get_matching(f"{self._prefix}{key}")
        else:
            entry = await self._bucket.get(f"{self._prefix}{key}")
            found = [entry] if entry is not None else []
        return {one.key.removeprefix(self._prefix): RecordEntry(one.revision, one.value) for one in found}

    async def newest(self, prefix: str) -> dict[str, RecordEntry]:
        """The records whose keys begin with `prefix.`, as the bucket's leader has them. Raises where it fails."""
        found = await self._bucket.entries(f"{self._prefix}{prefix}")
        return {one.key.removeprefix(self._prefix): RecordEntry(one.revision, one.value) for one in found}

    async def write(self, request: WriteRecord) -> WriteConfirmed | WriteConflict | WriteUnknown:
        value = to_json(request.record)
        try:
            revision = await self._bucket.put(
                f"{self._prefix}{request.key}", value, revision=request.revision, timeout_s=self._timeout_s
            )
        except RevisionConflict:
            return WriteConflict(request.key)
        except KeylaneError as error:
            self.failure = error
            return WriteUnknown(request.key)
        self.failure = None
        return WriteConfirmed(request.key, revision)
