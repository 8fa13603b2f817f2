"""The records that queries keep in the KV bucket `keylane-spark`: names, the durable start, and the last written batch.

- `lease.<query>` and `claim.<stream>` belong to `driver.lease` and `driver.acknowledgement`.
- `start.<query>`: where a query with `startingOffsets=latest` starts. Spark asks for the first offset again after every
  restart until the first batch is committed; a new `latest` each time would lose what arrived in between. The record
  is deleted once Spark's own checkpoint holds a commit.
- `batch.<query>`: the last micro-batch that the sink wrote as a whole. Spark repeats a batch whose commit it could not
  write, perhaps long after the server has forgotten the message ids. The record counts for the query's own checkpoint
  only: another checkpoint has another query id, and its batch 7 is another batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from keylane.core.names import check_query_name
from keylane.errors import InvalidInput, RevisionConflict
from keylane.jetstream import Bucket, Connection, KvEntry, change
from keylane.spark.address import Address
from keylane.spark.retry import ask
from keylane.spark.tasks import MicroBatch

BUCKET = "keylane-spark"


def bucket_of(connection: Connection) -> Bucket:
    return Bucket(connection, BUCKET)


def lease_key(query: str) -> str:
    return f"lease.{query}"


def start_key(query: str) -> str:
    return f"start.{query}"


def claim_key(stream: str) -> str:
    return f"claim.{stream}"


# ---- the durable start ---------------------------------------------------------------------------------------


async def durable_start(
    connection: Connection, query: str, offset_if_new: Mapping[str, Any], *, replicas: int = 1, queue: str | None = None
) -> dict[str, Any]:
    """The offset that the query starts at: the one recorded before, or this one, recorded now.

    A record of another stream is replaced: the query's name was used for something else. One of the same stream
    stays, even if the stream was recreated since: `failOnDataLoss` decides what that means. `replicas` is for
    the bucket, if it has to be made. `queue` is the queue of the group that names the keys: a start in it is refused,
    since messages that arrived after it would be skipped.
    """
    bucket = bucket_of(connection)
    key = start_key(check_query_name(query))
    await bucket.ensure(replicas=replicas)
    decided: list[dict[str, Any]] = []

    async def write(entry: KvEntry | None) -> None:
        known = _read_start(entry, key)
        if known is not None and known.get("stream") == offset_if_new["stream"]:
            decided.append(known)
            return
        if known is not None and queue is not None and known.get("stream") == queue != offset_if_new["stream"]:
            raise InvalidInput(
                f"query {query!r} began to read {queue!r}, the queue of the group, and now reads stream "
                f"{offset_if_new['stream']!r}: option 'group' alone names the keys of the stream. Give queue=true to "
                f"go on with the queue, or delete the key {key!r} from bucket {BUCKET!r} to begin with the stream"
            )
        await bucket.put(
            key, json.dumps(dict(offset_if_new)).encode(), revision=entry.revision if entry is not None else 0
        )
        decided.append(dict(offset_if_new))

    await change(lambda: bucket.get(key), write)
    return decided[-1]


async def forget_start(connection: Connection, query: str) -> None:
    """Delete the record, if there is one: after the first durable commit, when the checkpoint knows the place."""
    bucket = bucket_of(connection)
    key = start_key(check_query_name(query))
    entry = await bucket.get(key)
    if entry is None or entry.value is None:
        return
    try:
        await bucket.delete(key, revision=entry.revision)
    except RevisionConflict:
        return  # another driver of the query deleted it, or starts again: its record stays


def _read_start(entry: KvEntry | None, key: str) -> dict[str, Any] | None:
    if entry is None or entry.value is None:
        return None
    try:
        known = json.loads(entry.value)
    except ValueError:
        known = None
    if not isinstance(known, dict) or not isinstance(known.get("sequence"), int):
        raise InvalidInput(
            f"record {key!r} in bucket {BUCKET!r} is not an offset ({entry.value[:80]!r}): delete this key if the "
            "query has a checkpoint or may start again from the beginning"
        )
    return known


# ---- the last batch that was written -------------------------------------------------------------------------


def batch_key(query_name: str) -> str:
    return f"batch.{query_name}"


def is_written(address: Address, query_name: str, stream: str, batch: MicroBatch) -> bool:
    """Whether the whole batch, or a later one, was written to this stream before."""

    async def look(connection: Connection) -> KvEntry | None:
        return await bucket_of(connection).get(batch_key(query_name))

    written = _read_batch(ask(address, look, f"read the batch mark of query {query_name!r}"), stream)
    return written is not None and written.query_id == batch.query_id and written.number >= batch.number


def mark_written(address: Address, query_name: str, stream: str, batch: MicroBatch, *, replicas: int) -> None:
    """Record that the whole batch is stored."""
    value = json.dumps({"query": batch.query_id, "batch": batch.number, "stream": stream}).encode()

    async def mark(connection: Connection) -> None:
        bucket = bucket_of(connection)
        await bucket.ensure(replicas=replicas)

        async def write(newest: KvEntry | None) -> None:
            await bucket.put(batch_key(query_name), value, revision=newest.revision if newest is not None else 0)

        await change(lambda: bucket.get(batch_key(query_name)), write)

    ask(address, mark, f"write the batch mark of query {query_name!r}")


def _read_batch(entry: KvEntry | None, stream: str) -> MicroBatch | None:
    """The batch in a mark; None for anything that is not one for this stream, which then skips nothing."""
    if entry is None or entry.value is None:
        return None
    try:
        mark = json.loads(entry.value)
        return MicroBatch(str(mark["query"]), int(mark["batch"])) if mark["stream"] == stream else None
    except (ValueError, KeyError, TypeError):
        return None
