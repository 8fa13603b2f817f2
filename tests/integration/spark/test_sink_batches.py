"""Batches of rows: what is stored when one does not go smoothly, and what leaves when the link breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import keylane
from keylane import Connection
from keylane.errors import PermissionDenied
from keylane.jetstream import streams
from keylane.server import NatsServer
from keylane.spark.sink.batch_publisher import AtomicPublisher, BatchInterrupted, BatchPublisher, IngestPublisher
from keylane.spark.sink.row_publisher import EncodedRow, Outlet, publish

pytestmark = pytest.mark.spark

LIMITS = {"max_rows": 4000, "max_bytes": 1_000_000}
Name = Callable[..., str]


async def made(connection: Connection, name: str, **config: Any) -> str:
    wanted = {"name": name, "subjects": [f"{name}.>"], "storage": "file", "num_replicas": 1} | config
    await connection.api.request(f"STREAM.CREATE.{name}", wanted)
    return name


def row(stream: str, number: int, size: int = 10, tag: str = "row") -> EncodedRow:
    head = f"NATS/1.0\r\nNats-Msg-Id: {tag}-{number}\r\n\r\n".encode()
    return f"{stream}.a".encode(), head, b"%d" % number + bytes(size)


async def count(connection: Connection, stream: str) -> int:
    return (await streams.state(connection, stream)).messages


async def send_all(publisher: BatchPublisher, rows: Sequence[EncodedRow]) -> None:
    await publisher.send(rows)
    await publisher.finish()


@pytest.fixture(params=["ingest", "atomic"])
def batches(request: pytest.FixtureRequest) -> Callable[[Connection], BatchPublisher]:
    kind = IngestPublisher if request.param == "ingest" else AtomicPublisher
    return lambda connection: kind(connection, **LIMITS)


async def test_nothing_behind_a_refused_row_is_stored(
    connection: Connection, unique: Name, batches: Callable[[Connection], BatchPublisher]
) -> None:
    stream = await made(connection, unique("sink"), allow_batched=True, allow_atomic=True, max_msg_size=1000)
    publisher = batches(connection)
    await publisher.open()
    rows = [row(stream, 0), row(stream, 1), row(stream, 2, size=2000), row(stream, 3), row(stream, 4)]
    with pytest.raises(BatchInterrupted) as raised:
        await send_all(publisher, rows)
    assert await count(connection, stream) == (2 if isinstance(publisher, IngestPublisher) else 0)
    assert list(raised.value.rows)[-3:] == rows[2:]
    await publisher.close()


async def test_a_batch_after_an_interruption_works(
    connection: Connection, unique: Name, batches: Callable[[Connection], BatchPublisher]
) -> None:
    stream = await made(connection, unique("sink"), allow_batched=True, allow_atomic=True, max_msg_size=1000)
    publisher = batches(connection)
    await publisher.open()
    with pytest.raises(BatchInterrupted):
        await send_all(publisher, [row(stream, 0, size=2000)])
    await send_all(publisher, [row(stream, number, tag="good") for number in range(2500)])
    assert publisher.stored == await count(connection, stream) == 2500
    await publisher.close()


async def test_stored_ids_count_as_confirmed_in_ingest_and_end_an_atomic_batch(
    connection: Connection, unique: Name, batches: Callable[[Connection], BatchPublisher]
) -> None:
    stream = await made(connection, unique("sink"), allow_batched=True, allow_atomic=True)
    publisher = batches(connection)
    await publisher.open()
    rows = [row(stream, number) for number in range(10)]
    await send_all(publisher, rows[:5])
    if isinstance(publisher, IngestPublisher):
        await send_all(publisher, rows)
        assert await count(connection, stream) == 10
    else:
        with pytest.raises(BatchInterrupted) as raised:
            await send_all(publisher, rows)
        assert raised.value.repeated
        assert list(raised.value.rows) == rows
        assert await count(connection, stream) == 5
    await publisher.close()


async def test_finish_without_rows(connection: Connection, batches: Callable[[Connection], BatchPublisher]) -> None:
    publisher = batches(connection)
    await publisher.open()
    await publisher.finish()
    await publisher.finish()
    assert publisher.stored == 0
    await publisher.close()


async def test_a_batch_that_the_server_forgot_is_interrupted(connection: Connection, unique: Name) -> None:
    """The server drops a batch that is idle for long; so does an update of the stream, at once."""
    stream = await made(connection, unique("sink"), allow_batched=True)
    publisher = IngestPublisher(connection, **LIMITS)
    await publisher.open()
    await publisher.send([row(stream, 0)])
    config = (await connection.api.request(f"STREAM.INFO.{stream}"))["config"]
    await connection.api.request(f"STREAM.UPDATE.{stream}", config | {"allow_batched": False})
    await connection.api.request(f"STREAM.UPDATE.{stream}", config)
    with pytest.raises(BatchInterrupted):
        await send_all(publisher, [row(stream, 1)])
    await publisher.close()


class Deaf:
    """A publisher that waits for the link only."""

    def __init__(self) -> None:
        self.back = asyncio.Event()

    def confirmed(self, tokens: Sequence[bytes]) -> None: ...

    def answered(self, token: bytes, headers: bytes, data: bytes) -> None: ...

    def all_answered(self) -> None: ...

    def link_changed(self, up: bool) -> None:
        if up:
            self.back.set()

    def refused(self, error: PermissionDenied) -> None: ...


async def test_what_has_not_left_when_the_link_breaks_never_leaves() -> None:
    """Sent after the reconnect, it would be stored ahead of what is sent again."""
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            stream = await made(connection, "SINK")
            deaf = Deaf()
            outlet = Outlet(connection, deaf)
            await outlet.open()
            client = connection.nats
            client._transport._wire.transport.abort()  # type: ignore[union-attr]  # the link ends, unnoticed so far
            subject, head, data = row(stream, 0)
            outlet.send(publish(subject, outlet.prefix + b"1", head, data))
            assert client.outbox, "it left: the test shows nothing"
            async with asyncio.timeout(20):
                await deaf.back.wait()
            await connection.flush()
            assert await count(connection, stream) == 0
            await outlet.close()
