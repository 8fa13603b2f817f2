"""The mark that a streaming query leaves when a micro-batch is written as a whole.

Spark repeats a batch whose end it could not write down, and does so whenever the driver comes back: perhaps long after
the server has forgotten the message ids. The mark `batch.<queryName>` tells the tasks that nothing is left to do. It
counts for the query's own checkpoint only: another checkpoint has another query id, and its batch 7 is another batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from keylane.jetstream.connection import Connection
from keylane.jetstream.kv import KvEntry, change
from keylane.spark.address import Address
from keylane.spark.driver.room import bucket_of
from keylane.spark.patience import ask


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch of the query with this id, which lives in its checkpoint."""

    query_id: str
    number: int


def batch_key(query_name: str) -> str:
    return f"batch.{query_name}"


def is_written(address: Address, query_name: str, stream: str, batch: Batch) -> bool:
    """Whether the whole batch, or a later one, was written to this stream before."""

    async def look(connection: Connection) -> KvEntry | None:
        return await bucket_of(connection).get(batch_key(query_name))

    written = _read(ask(address, look, f"read the batch mark of query {query_name!r}"), stream)
    return written is not None and written.query_id == batch.query_id and written.number >= batch.number


def mark_written(address: Address, query_name: str, stream: str, batch: Batch, *, replicas: int) -> None:
    """Write down that the whole batch is stored."""
    value = json.dumps({"query": batch.query_id, "batch": batch.number, "stream": stream}).encode()

    async def mark(connection: Connection) -> None:
        bucket = bucket_of(connection)
        await bucket.ensure(replicas=replicas)

        async def write(newest: KvEntry | None) -> None:
            await bucket.put(batch_key(query_name), value, revision=newest.revision if newest is not None else 0)

        await change(lambda: bucket.get(batch_key(query_name)), write)

    ask(address, mark, f"write the batch mark of query {query_name!r}")


def _read(entry: KvEntry | None, stream: str) -> Batch | None:
    """The batch in a mark; None for anything that is not one for this stream, which then skips nothing."""
    if entry is None or entry.value is None:
        return None
    try:
        mark = json.loads(entry.value)
        return Batch(str(mark["query"]), int(mark["batch"])) if mark["stream"] == stream else None
    except (ValueError, KeyError, TypeError):
        return None
