"""Fixtures of the tests of Marshal on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from keylane import Connection
from keylane.errors import NotFound
from keylane.jetstream import streams
from keylane.server import NatsServer
from tests.integration.marshal.stream_rig import Ground, make


@pytest.fixture
async def ground(nats_server: NatsServer, connection: Connection, unique: Callable[..., str]) -> AsyncIterator[Ground]:
    stream, log_name = unique("orders"), unique("claims")
    try:
        yield await make(connection, nats_server, stream, log_name)
    finally:
        for name in (stream, log_name, f"KV_{log_name}"):
            with suppress(NotFound):
                await streams.delete(connection, name)
