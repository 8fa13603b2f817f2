"""Handling a message once although two consumers deliver it: for the time in which a migration runs both.

Each side asks before it handles a message and says when it is done. The records are in a KV bucket, by subject and
sequence; delete the bucket when the migration is over. The other side takes over from one that died while it was
handling, after `begun_s`. Two programs side by side keep no order between them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256

from keylane.errors import InvalidInput, RevisionConflict
from keylane.jetstream import Bucket, Connection, check_seconds

_DONE = b"done"


class Deduplicator:
    """Shared by both sides of a migration, which give it the same `name`.

    >>> once = Deduplicator(connection, "billing-migration", side="fleet")
    >>> async with once.handling(message.subject, message.sequence) as is_ours:
    ...     if is_ours:
    ...         await bill(message)
    """

    def __init__(self, connection: Connection, name: str, *, side: str, begun_s: float = 60.0) -> None:
        """`begun_s`: longer than any handler takes."""
        check_seconds(begun_s, "begun_s")
        if not side or "\n" in side:
            raise InvalidInput(f"side is {side!r}: name the program, such as 'fleet' or 'legacy'")
        self._bucket = Bucket(connection, name)
        self._side = side
        self._begun_s = begun_s

    async def ensure(self, *, replicas: int = 1) -> None:
        """Create the bucket if it is missing."""
        await self._bucket.ensure(replicas=replicas)

    @asynccontextmanager
    async def handling(self, subject: str, sequence: int) -> AsyncIterator[bool]:
        """Whether the message is this side's to handle. Left without an error, the message counts as handled."""
        key = sha256(f"{subject} {sequence}".encode()).hexdigest()[:32]
        revision = await self._begin(key)
        if revision is None:
            yield False
            return
        yield True
        await self._bucket.put(key, _DONE, revision=revision)

    async def _begin(self, key: str) -> int | None:
        entry = await self._bucket.get(key)
        if entry is not None and entry.value is not None:
            side, _, began = entry.value.decode().partition("\n")
            if entry.value == _DONE or (side != self._side and time.time() - float(began) < self._begun_s):
                return None
        try:
            begun = f"{self._side}\n{time.time()}".encode()
            return await self._bucket.put(key, begun, revision=entry.revision if entry is not None else 0)
        except RevisionConflict:
            return None
