"""Where a query with startingOffsets=latest starts: decided once, forgotten when the checkpoint knows better."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from keylane import Connection
from keylane.errors import InvalidInput
from keylane.spark.query_records import bucket_of, durable_start, forget_start, start_key

Unique = Callable[..., str]


def offset(sequence: int, stream: str = "ORDERS", created: str = "2025-01-01T00:00:00Z") -> dict[str, Any]:
    return {"stream": stream, "created": created, "sequence": sequence}


async def test_the_first_start_is_the_one_that_counts(connection: Connection, unique: Unique) -> None:
    query = unique("query")
    assert await durable_start(connection, query, offset(7)) == offset(7)
    again = await durable_start(connection, query, offset(9))
    assert again == offset(7)
    assert list(again) == ["stream", "created", "sequence"]  # Spark compares the text


async def test_of_two_drivers_that_start_at_once_both_get_one_start(connection: Connection, unique: Unique) -> None:
    query = unique("query")
    found = await asyncio.gather(*(durable_start(connection, query, offset(n)) for n in range(1, 9)))
    assert all(one == found[0] for one in found)


async def test_after_it_is_forgotten_a_new_start_counts(connection: Connection, unique: Unique) -> None:
    query = unique("query")
    await durable_start(connection, query, offset(7))
    await forget_start(connection, query)
    await forget_start(connection, query)
    assert await durable_start(connection, query, offset(9)) == offset(9)


async def test_to_forget_what_was_never_there_is_fine(connection: Connection, unique: Unique) -> None:
    await forget_start(connection, unique("query"))


async def test_a_start_in_another_stream_is_replaced_and_one_in_a_stream_made_anew_is_not(
    connection: Connection, unique: Unique
) -> None:
    query = unique("query")
    await durable_start(connection, query, offset(7, "REFUNDS"))
    assert await durable_start(connection, query, offset(3)) == offset(3)
    newer = offset(1, created="2025-02-02T00:00:00Z")
    assert await durable_start(connection, query, newer) == offset(3)


async def test_a_start_in_the_queue_of_the_group_is_refused(connection: Connection, unique: Unique) -> None:
    """It would skip what came since: a query that used to read the queue now reads the stream."""
    query = unique("query")
    await durable_start(connection, query, offset(7, "ORDERS-billing"))
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"queue of the group, and now reads stream 'ORDERS'.*Give queue=true"):
            await durable_start(connection, query, offset(90), queue="ORDERS-billing")
    of_queue = offset(90, "ORDERS-billing")
    assert await durable_start(connection, query, of_queue, queue="ORDERS-billing") == offset(7, "ORDERS-billing")


async def test_a_record_that_is_no_offset_is_named(connection: Connection, unique: Unique) -> None:
    query = unique("query")
    bucket = bucket_of(connection)
    await bucket.ensure(replicas=1)
    await bucket.put(start_key(query), b"7", revision=0)
    with pytest.raises(InvalidInput, match=rf"record 'start\.{query}' in bucket 'keylane-spark' is not an offset"):
        await durable_start(connection, query, offset(1))


async def test_a_name_that_is_no_key_is_refused(connection: Connection) -> None:
    with pytest.raises(InvalidInput, match="queryName"):
        await durable_start(connection, "a.b", offset(1))
    with pytest.raises(InvalidInput, match="queryName"):
        await forget_start(connection, ">")
