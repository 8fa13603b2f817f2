"""Which query acknowledges which messages of a work queue: one record per stream, changed by compare-and-set.

Two queries that purge the same messages would delete what the other has not read. A claim counts for as long as the
lease of the query is renewed: another query can take that of a dead or stopped one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from keylane.core.subjects import is_subset, overlaps
from keylane.errors import AcknowledgeRefused, InvalidInput
from keylane.jetstream import Connection, KvEntry, change
from keylane.spark.driver.lease import Lease, LeaseExpiry
from keylane.spark.query_records import BUCKET, bucket_of, claim_key, lease_key

_log = logging.getLogger("keylane.spark.driver.acknowledgement")

_LOOK_S = 0.5
_LONGEST_LOOK_S = 30.0


@dataclass(frozen=True, slots=True)
class QueueClaim:
    """What one query acknowledges. No filters: the whole stream. `created` is the stream's: a recreated one differs."""

    query: str
    filters: tuple[str, ...]
    created: str

    def overlaps(self, other: QueueClaim) -> bool:
        if self.created != other.created:
            return False
        if not self.filters or not other.filters:
            return True
        return any(overlaps(mine, theirs) for mine in self.filters for theirs in other.filters)

    def covers(self, other: QueueClaim) -> bool:
        """Whether all that `other` would acknowledge was read under this claim."""
        if not self.filters:
            return True
        return bool(other.filters) and all(any(is_subset(one, mine) for mine in self.filters) for one in other.filters)


async def claim(connection: Connection, stream: str, created: str, filters: Sequence[str], lease: Lease) -> None:
    """Claim these filters for the query that holds `lease`.

    Raises `AcknowledgeRefused` while another query that lives has claimed some of them: whether it lives can take that
    query's lease to find out. Raises `InvalidInput` if this query acknowledged less before: what it has not read lies
    below its offsets, and would be deleted.
    """
    bucket = bucket_of(connection)
    key = claim_key(stream)
    mine = QueueClaim(lease.name, tuple(filters), created)

    async def write(entry: KvEntry | None) -> None:
        known = [one for one in _read(entry, key) if one.created == created]
        for one in known:
            if one.query == mine.query and not one.covers(mine):
                raise InvalidInput(
                    f"query {mine.query!r} acknowledged {_shown(one.filters)} of stream {stream!r} before, and now "
                    f"would acknowledge {_shown(mine.filters)}: older messages that it never read would be deleted. "
                    "Give the old filters or partitions, or a new queryName and a new checkpoint directory"
                )
        rivals = [one for one in known if one.query != mine.query and one.overlaps(mine)]
        for one in rivals:
            holder = await living_holder(connection, one.query, lease)
            if holder is not None:
                raise AcknowledgeRefused(
                    f"query {one.query!r} ({holder}) acknowledges {_shown(one.filters)} of stream {stream!r}, and "
                    f"query {mine.query!r} would acknowledge {_shown(mine.filters)}: each would delete what the other "
                    "has not read. Stop that query, or read other partitions, or leave 'acknowledge' out"
                )
            _log.warning("query %r takes over the claim of query %r, which does not run", mine.query, one.query)
        kept = [one for one in known if one.query != mine.query and one not in rivals]
        # Written even if nothing changes: a rival that found us dead a moment ago must be refused.
        await bucket.put(key, _to_json([*kept, mine]), revision=entry.revision if entry is not None else 0)

    await change(lambda: bucket.get(key), write)


async def living_holder(connection: Connection, query: str, lease: Lease) -> str | None:
    """Who runs the query, or None: nobody has its lease, or nobody renewed it for as long as it lasts.

    A lease that may last longer than half a minute is believed after that. `lease` is the asker's own, which is checked
    meanwhile.
    """
    bucket = bucket_of(connection)
    changed = asyncio.Event()
    expiry = LeaseExpiry()
    believed_at = time.monotonic() + _LONGEST_LOOK_S
    async with bucket.hints(lease_key(query), changed.set):
        first: int | None = None
        while True:
            changed.clear()
            entry = await bucket.get(lease_key(query))
            if expiry.saw(entry):
                return None
            revision = entry.revision if entry is not None else 0
            if (first is not None and revision != first) or time.monotonic() > believed_at:
                return expiry.holder
            first = revision
            while expiry.left_s and not changed.is_set() and time.monotonic() <= believed_at:
                lease.check()
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(expiry.left_s, _LOOK_S))


def _shown(filters: Sequence[str]) -> str:
    return ", ".join(repr(one) for one in filters) if filters else "all"


def _to_json(claims: Sequence[QueueClaim]) -> bytes:
    wire = [{"query": one.query, "filters": list(one.filters), "created": one.created} for one in claims]
    return json.dumps({"claims": wire}).encode()


def _read(entry: KvEntry | None, key: str) -> list[QueueClaim]:
    if entry is None or entry.value is None:
        return []
    try:
        return [
            QueueClaim(str(one["query"]), tuple(map(str, one["filters"])), str(one["created"]))
            for one in json.loads(entry.value)["claims"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"record {key!r} in bucket {BUCKET!r} is no list of claims ({entry.value[:80]!r}): stop the queries that "
            "acknowledge this stream, delete this key, and start them again"
        ) from error
