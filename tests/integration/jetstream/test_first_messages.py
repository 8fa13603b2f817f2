"""`first_messages`: many questions for the first message of a filter, on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import pytest

from keylane import Connection
from keylane.errors import NotFound
from keylane.jetstream import Outgoing, PublishAck, first_messages, publish_many, streams


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    name = unique("first")
    await streams.create_json(
        connection, {"name": name, "subjects": [f"{name}.>"], "storage": "memory", "allow_direct": True}
    )
    yield name
    await streams.delete(connection, name)


async def test_each_filter_has_its_first_message(connection: Connection, stream: str) -> None:
    sent = await publish_many(connection, [Outgoing(f"{stream}.{one % 600}", b"x") for one in range(1200)])
    assert all(isinstance(one, PublishAck) for one in sent)
    questions = [(f"{stream}.{one}", 1) for one in range(600)] + [(f"{stream}.7", 9), (f"{stream}.none", 1)]
    found = await first_messages(connection, stream, questions)
    assert [one.sequence if one else None for one in found] == [*range(1, 601), 608, None]
    assert all(one is None or abs((datetime.now(UTC) - one.time).total_seconds()) < 60 for one in found)
    assert {one.more for one in found if one is not None} == {None}


async def test_those_that_come_after_are_counted_on_request(connection: Connection, stream: str) -> None:
    await publish_many(connection, [Outgoing(f"{stream}.{one % 2}", b"x") for one in range(9)])
    asked = [(f"{stream}.0", 1), (f"{stream}.1", 1), (f"{stream}.1", 8), (f"{stream}.1", 9)]
    found = await first_messages(connection, stream, asked, counted=True)
    assert [(one.sequence, one.more) if one else None for one in found] == [(1, 4), (2, 3), (8, 0), None]
    assert await first_messages(connection, stream, []) == []


async def test_a_stream_that_is_not_there(connection: Connection, unique: Callable[..., str]) -> None:
    with pytest.raises(NotFound, match="it does not exist or lacks allow_direct"):
        await first_messages(connection, unique("none"), [("a.>", 1)])
