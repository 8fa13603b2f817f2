"""The durable start of a query that begins at `latest`.

Spark asks for the first offset again after every restart until the first batch is committed. Were `latest` worked out
anew each time, what arrived in between would be lost. So the first answer is written down, and forgotten once Spark's
own checkpoint holds a commit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from keylane.core.names import check_query_name
from keylane.errors import InvalidInput, RevisionConflict
from keylane.jetstream.connection import Connection
from keylane.jetstream.kv import KvEntry, change
from keylane.spark.driver.room import BUCKET, bucket_of, start_key


async def durable_start(
    connection: Connection,
    query: str,
    offset_if_new: Mapping[str, Any],
    *,
    replicas: int = 1,
    queue: str | None = None,
) -> dict[str, Any]:
    """The offset that the query starts at: the one written down before, or this one, written down now.

    A record of another stream is replaced: the query's name was used for something else. One of the same stream
    stands, even if the stream was made anew since: what that means is for `failOnDataLoss` to say. `replicas` is for
    the bucket, if it has to be made. `queue` is the queue of the group that names the keys: a start in it is refused,
    since messages that arrived after it would be skipped.
    """
    bucket = bucket_of(connection)
    key = start_key(check_query_name(query))
    await bucket.ensure(replicas=replicas)
    decided: list[dict[str, Any]] = []

    async def write(entry: KvEntry | None) -> None:
        known = _read(entry, key)
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
        return  # another driver of the query forgot it, or begins anew: its record stands


def _read(entry: KvEntry | None, key: str) -> dict[str, Any] | None:
    if entry is None or entry.value is None:
        return None
    try:
        known = json.loads(entry.value)
    except ValueError:
        known = None
    if not isinstance(known, dict) or not isinstance(known.get("sequence"), int):
        raise InvalidInput(
            f"record {key!r} in bucket {BUCKET!r} is no offset ({entry.value[:80]!r}): delete this key if the query "
            "has a checkpoint or may start anew"
        )
    return known
