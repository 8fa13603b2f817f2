"""Reading stored messages without a consumer: complete, in order, or with an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

import keylane
from keylane import Connection
from keylane.errors import ApiError, InvalidInput, NotFound, ReadIncomplete
from keylane.jetstream import Outgoing, StoredMessage, publish_many, read_all, read_batch, streams
from keylane.server import NatsServer
from tests.integration.jetstream.rig import Link, fill, frozen, make_stream

Unique = Callable[..., str]


async def everything(connection: Connection, stream: str, **options: object) -> list[StoredMessage]:
    return [message async for message in read_all(connection, stream, **options)]  # type: ignore[arg-type]


async def test_what_was_published_is_what_is_read(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("direct"))
    sent = [
        Outgoing(f"{stream}.{number % 5}", b"%d" % number, {"N": str(number)} if number % 2 else None)
        for number in range(1000)
    ]
    await publish_many(connection, sent)
    messages, pending = await read_batch(connection, stream)
    assert pending == 0
    assert [(one.subject, one.data, one.headers) for one in messages] == [
        (one.subject, one.data, one.headers or {}) for one in sent
    ]
    assert [one.sequence for one in messages] == list(range(1, 1001))
    assert all(abs(one.timestamp - datetime.now(UTC)) < timedelta(minutes=1) for one in messages)


@pytest.mark.parametrize("batch", [1, 7, 100, 101, 1000])
async def test_paging_reads_everything_once(connection: Connection, unique: Unique, batch: int) -> None:
    count = 20 if batch == 1 else 101
    stream = await make_stream(connection, unique("direct"))
    await fill(connection, stream, count)
    sequences = [one.sequence for one in await everything(connection, stream, batch=batch)]
    assert sequences == list(range(1, count + 1))
    messages, pending = await read_batch(connection, stream, sequence=5, batch=10)
    assert [one.sequence for one in messages] == list(range(5, 15))
    assert pending == count - 14


async def test_gaps_are_no_losses(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("direct"))
    await fill(connection, stream, 100)
    for sequence in (1, 2, 50, 51, 52, 99, 100):
        await connection.api.request(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    await streams.purge(connection, stream, before_sequence=11)
    await fill(connection, stream, 2)
    left = [*range(11, 50), *range(53, 99), 101, 102]
    for batch in (1000, 10):
        assert [one.sequence for one in await everything(connection, stream, batch=batch)] == left


async def test_a_filter_reads_its_own(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("direct"))
    subjects = [f"{stream}.eu.1", f"{stream}.us.1", f"{stream}.eu.2"]
    await publish_many(connection, [Outgoing(subjects[number % 3]) for number in range(60)])
    for subject_filter, chosen in (
        (subjects[0], {0}),
        (f"{stream}.eu.*", {0, 2}),
        (f"{stream}.>", {0, 1, 2}),
        (f"{stream}.none", set[int]()),
    ):
        found = await everything(connection, stream, subject_filter=subject_filter, batch=8)
        assert [one.sequence for one in found] == [seq for seq in range(1, 61) if (seq - 1) % 3 in chosen]


async def test_nothing_to_read_is_no_error(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("direct"))
    assert await read_batch(connection, stream) == ([], 0)
    await fill(connection, stream, 3)
    assert await read_batch(connection, stream, sequence=4) == ([], 0)
    assert await everything(connection, stream, sequence=10_000) == []


async def test_headers_like_the_servers_own_are_kept(connection: Connection, unique: Unique) -> None:
    """A message that was republished from another stream carries the names that direct get uses."""
    stream = await make_stream(connection, unique("direct"))
    strange = {
        "Name": "é",
        "Nats-Stream": "OTHER",
        "Nats-Subject": "other.subject",
        "Nats-Sequence": "77",
        "Nats-Last-Sequence": "70",
    }
    await publish_many(connection, [Outgoing(f"{stream}.a", b"1", strange), Outgoing(f"{stream}.b", b"2", strange)])
    messages, _ = await read_batch(connection, stream)
    assert [(one.subject, one.sequence, one.headers) for one in messages] == [
        (f"{stream}.a", 1, strange),
        (f"{stream}.b", 2, strange),
    ]


async def test_large_messages_come_in_more_batches(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("direct"))
    await fill(connection, stream, 20, size=1_000_000)
    messages, pending = await read_batch(connection, stream)
    assert (len(messages), pending) == (9, 11)
    assert [one.sequence for one in await everything(connection, stream)] == list(range(1, 21))


async def test_a_message_larger_than_a_batch_comes_alone(unique: Unique) -> None:
    with NatsServer.start(extra_config="max_payload: 12MB") as server:
        async with await keylane.connect(server.url) as connection:
            stream = await make_stream(connection, unique("direct"))
            await fill(connection, stream, 3, size=10_000_000)
            messages, pending = await read_batch(connection, stream)
            assert (len(messages), pending) == (1, 2)
            assert [one.sequence for one in await everything(connection, stream)] == [1, 2, 3]


async def test_many_readers_at_once(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("direct"))
    await fill(connection, stream, 500)
    all_read = await asyncio.gather(*(everything(connection, stream, batch=50) for _ in range(8)))
    assert all([one.sequence for one in read] == list(range(1, 501)) for read in all_read)


# ---- errors -----------------------------------------------------------------------------------------------


async def test_no_such_stream_or_no_direct_access(connection: Connection, unique: Unique) -> None:
    closed = await make_stream(connection, unique("direct"), allow_direct=False)
    for stream in (unique("none"), closed):
        with pytest.raises(NotFound, match=f"'{stream}': it does not exist or lacks allow_direct"):
            await read_batch(connection, stream)
        with pytest.raises(NotFound):
            await everything(connection, stream)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"stream": "a.b"}, "stream name 'a.b'"),
        ({"sequence": 0}, "sequences start at 1"),
        ({"batch": 0}, "at least 1 message"),
        ({"subject_filter": "a..b"}, "filter 'a..b'"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
async def test_input_is_checked(connection: Connection, options: dict[str, object], rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        await read_batch(connection, **{"stream": "S", **options})  # type: ignore[arg-type]


async def test_silence_has_a_deadline() -> None:
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            stream = await make_stream(connection, "S")
            await fill(connection, stream, 10)
            with frozen(server):
                started = time.monotonic()
                with pytest.raises(ReadIncomplete, match=r"silence for 0\.3 s after 0 messages"):
                    await read_batch(connection, stream, timeout_s=0.3)
                assert 0.3 <= time.monotonic() - started < 5
            assert len(await everything(connection, stream)) == 10


async def test_a_link_cut_half_way_is_no_complete_read(nats_server: NatsServer, unique: Unique) -> None:
    async with Link.to(nats_server) as link, await keylane.connect(link.url) as connection:
        stream = await make_stream(connection, unique("direct"))
        await fill(connection, stream, 60, size=500_000)
        reading = asyncio.ensure_future(read_batch(connection, stream, timeout_s=5))
        await asyncio.sleep(0.01)
        await link.cut()
        started = time.monotonic()
        with pytest.raises(ReadIncomplete, match="the connection was lost after"):
            await reading
        assert time.monotonic() - started < 4


async def test_an_error_of_the_server_is_told(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("direct"))
    await fill(connection, stream, 1)
    with pytest.raises(ApiError) as refused:
        await read_batch(connection, stream, sequence=1 << 70)
    assert refused.value.code == 408
    assert "Malformed Request" in str(refused.value)
