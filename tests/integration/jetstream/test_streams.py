"""Streams: create, update, look at, list, purge, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from nats.js.api import RetentionPolicy, StorageType, StreamConfig, SubjectTransform

from keylane import Connection
from keylane.errors import ApiError, InvalidInput, NotFound
from keylane.jetstream import Outgoing, publish_many, read_all, streams
from tests.integration.jetstream.rig import fill, make_consumer, make_stream

Unique = Callable[..., str]


async def test_what_is_asked_for_is_what_is_made(connection: Connection, unique: Unique) -> None:
    name = unique("stream")
    config = StreamConfig(
        name=name,
        description="é",
        subjects=[f"{name}.a.*", f"{name}.b.>"],
        storage=StorageType.MEMORY,
        retention=RetentionPolicy.WORK_QUEUE,
        max_age=1.5,
        duplicate_window=0.5,
        max_msgs=1000,
        allow_direct=True,
        allow_atomic=True,
        subject_transform=SubjectTransform(src=f"{name}.a.*", dest=f"{name}.b.{{{{wildcard(1)}}}}"),
        metadata={"team": "x"},
    )
    made = await streams.create(connection, config)
    seen = (await streams.info(connection, name)).config
    assert made.config == seen
    assert seen.metadata is not None
    assert seen.metadata["team"] == "x"
    for field in ("description", "subjects", "storage", "retention", "max_age", "duplicate_window", "max_msgs"):
        assert getattr(seen, field) == getattr(config, field), field
    assert (seen.allow_direct, seen.allow_atomic) == (True, True)
    await publish_many(connection, [Outgoing(f"{name}.a.1")])
    assert [message.subject async for message in read_all(connection, name)] == [f"{name}.b.1"]


async def test_create_again_and_update(connection: Connection, unique: Unique) -> None:
    name = unique("stream")
    config = StreamConfig(name=name, subjects=[name], storage=StorageType.MEMORY)
    await streams.create(connection, config)
    await streams.create(connection, config)
    changed = StreamConfig(name=name, subjects=[name, f"{name}.more"], storage=StorageType.MEMORY)
    with pytest.raises(ApiError) as refused:
        await streams.create(connection, changed)
    assert refused.value.err_code == 10058
    assert "stream name already in use" in str(refused.value)
    updated = await streams.update(connection, changed)
    assert updated.config.subjects == [name, f"{name}.more"]
    with pytest.raises(NotFound, match="there is no stream"):
        await streams.update(connection, StreamConfig(name=unique("none"), subjects=[unique("s")]))


async def test_state_counts(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("stream"))
    empty = await streams.state(connection, stream)
    assert (empty.messages, empty.bytes, empty.first_sequence, empty.last_sequence) == (0, 0, 0, 0)
    await fill(connection, stream, 10, size=100)
    await make_consumer(connection, stream)
    full = await streams.state(connection, stream)
    assert (full.messages, full.first_sequence, full.last_sequence, full.consumers) == (10, 1, 10, 1)
    assert full.bytes > 1000
    assert full.leader == "keylane"  # of a server on its own: its name


async def test_purge_takes_what_it_is_told(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("stream"))

    async def left() -> list[int]:
        return [message.sequence async for message in read_all(connection, stream)]

    await publish_many(connection, [Outgoing(f"{stream}.{'ab'[number % 2]}") for number in range(10)])
    assert await streams.purge(connection, stream, before_sequence=1) == 0
    assert await streams.purge(connection, stream, subject_filter=f"{stream}.a", before_sequence=4) == 2
    assert await left() == [2, 4, 5, 6, 7, 8, 9, 10]
    assert await streams.purge(connection, stream, before_sequence=6) == 3
    assert await streams.purge(connection, stream, subject_filter=f"{stream}.b") == 3
    assert await left() == [7, 9]
    assert await streams.purge(connection, stream, subject_filter=f"{stream}.none") == 0
    assert await streams.purge(connection, stream) == 2
    assert (await streams.state(connection, stream)).last_sequence == 10


@pytest.mark.parametrize("sequence", [0, -1])
async def test_purge_before_nothing_is_refused(connection: Connection, unique: Unique, sequence: int) -> None:
    """The server reads 0 as "no limit" and would delete everything."""
    stream = await make_stream(connection, unique("stream"))
    await fill(connection, stream, 3)
    with pytest.raises(InvalidInput, match=f"purge before sequence {sequence}: sequences start at 1"):
        await streams.purge(connection, stream, before_sequence=sequence)
    assert (await streams.state(connection, stream)).messages == 3


async def test_lists_have_every_page(connection: Connection, unique: Unique) -> None:
    prefix = unique("many")
    made = {f"{prefix}_{number}" for number in range(270)}  # a page of STREAM.LIST has 256
    await asyncio.gather(*(make_stream(connection, name) for name in made))
    try:
        assert made <= set(await streams.names(connection))
        assert made <= {info.config.name async for info in streams.list_all(connection)}
    finally:
        await asyncio.gather(*(streams.delete(connection, name) for name in made))
    assert not made & set(await streams.names(connection))


async def test_delete(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("stream"))
    await streams.delete(connection, stream)
    for gone in (streams.delete, streams.info, streams.state, streams.purge):
        with pytest.raises(NotFound, match="there is no stream") as missing:
            await gone(connection, stream)
        assert (missing.value.code, missing.value.err_code) == (404, 10059)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a*", "a>", "a/b", "a\\b", "a\n", "x" * 256])
async def test_names_are_checked(connection: Connection, name: str) -> None:
    for call in (streams.info, streams.state, streams.delete, streams.purge, streams.step_down):
        with pytest.raises(InvalidInput):
            await call(connection, name)
    for apply in (streams.create, streams.update):
        with pytest.raises(InvalidInput):
            await apply(connection, StreamConfig(name=name, subjects=["x"]))


async def test_subjects_are_checked(connection: Connection, unique: Unique) -> None:
    with pytest.raises(InvalidInput, match=r"filter 'a\.\.b'"):
        await streams.create(connection, StreamConfig(name=unique("stream"), subjects=["a..b"]))
    with pytest.raises(InvalidInput, match="has no name"):
        await streams.create(connection, StreamConfig(subjects=["x"]))
    stream = await make_stream(connection, unique("stream"))
    with pytest.raises(InvalidInput, match="filter 'a b'"):
        await streams.purge(connection, stream, subject_filter="a b")
