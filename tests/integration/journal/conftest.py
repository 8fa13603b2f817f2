"""A stream to keep a journal of, removed with its journal after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
from nats.js.api import StorageType, StreamConfig

from keylane import Connection
from keylane.errors import NotFound
from keylane.jetstream import streams
from keylane.journal import journal_stream


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    name = unique("orders")
    await streams.create(
        connection,
        StreamConfig(name=name, subjects=[f"{name}.>"], storage=StorageType.MEMORY, allow_direct=True),
    )
    try:
        yield name
    finally:
        for one in (name, journal_stream(name)):
            with suppress(NotFound):
                await streams.delete(connection, one)
