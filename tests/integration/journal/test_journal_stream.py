"""The journal's stream: made when it is missing, used when it will do, refused with a reason when it will not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StoreCompression, StreamConfig

from keylane import Connection
from keylane.errors import InvalidInput, JournalConflict, NotFound
from keylane.jetstream import streams
from keylane.journal import DEFAULT_MAX_AGE_S, Journal, journal_stream, journal_subject
from keylane.server import NatsCluster
from tests.integration.journal.rig import Instance, Worker, read


async def opened(connection: Connection, stream: str, **options: Any) -> StreamConfig:
    async with Journal(connection, stream=stream, **options):
        return (await streams.info(connection, journal_stream(stream))).config


async def test_it_is_made_when_it_is_missing(connection: Connection, stream: str) -> None:
    config = await opened(connection, stream)
    assert config.name == f"{stream}+journal"
    assert config.subjects == [f"keylane.journal.{stream}.>"]
    assert (config.retention, config.discard) == (RetentionPolicy.LIMITS, DiscardPolicy.OLD)
    assert (config.storage, config.compression) == (StorageType.FILE, StoreCompression.S2)
    assert (config.max_age, config.max_bytes) == (DEFAULT_MAX_AGE_S, -1)
    assert config.allow_direct
    assert config.duplicate_window == 120


async def test_limits_are_the_users(connection: Connection, stream: str) -> None:
    config = await opened(connection, stream, max_age_s=60, max_bytes=10_000_000)
    assert (config.max_age, config.max_bytes, config.duplicate_window) == (60, 10_000_000, 60)
    assert await opened(connection, stream) == config
    assert await opened(connection, stream, max_age_s=60) == config


async def test_many_at_once_make_one(connection: Connection, stream: str) -> None:
    journals = [Journal(connection, stream=stream) for _ in range(8)]
    await asyncio.gather(*(journal.start() for journal in journals))
    for number, journal in enumerate(journals):
        Worker(connection, journal, Instance(stream, instance=f"i-{number}")).work(1)
    await asyncio.gather(*(journal.stop() for journal in journals))
    listed = await connection.api.request("STREAM.NAMES")
    assert [name for name in listed["streams"] if stream in name] == [stream, journal_stream(stream)]
    assert {record.instance for record in await read(connection, stream)} == {f"i-{number}" for number in range(8)}


async def test_an_operator_may_change_its_limits(connection: Connection, stream: str) -> None:
    config = await opened(connection, stream)
    config.max_age = 3600
    await streams.update(connection, config)
    assert (await opened(connection, stream)).max_age == 3600
    with pytest.raises(JournalConflict, match=r"max_age is 3600.* s there and 60 s here; change one of the two"):
        await opened(connection, stream, max_age_s=60)
    with pytest.raises(JournalConflict, match="max_bytes is -1 there and 5 here"):
        await opened(connection, stream, max_bytes=5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"retention": RetentionPolicy.WORK_QUEUE}, "retention is workqueue, not limits"),
        ({"discard": DiscardPolicy.NEW}, "discard is new, not old"),
        ({"allow_direct": False}, "allow_direct is off"),
        ({"no_ack": True}, "no_ack is on"),
        ({"max_msgs_per_subject": 1}, "max_msgs_per_subject is 1"),
        ({"subjects": ["something.else"]}, r"without keylane\.journal\."),
    ],
)
async def test_a_stream_that_would_lose_records_is_refused(
    connection: Connection, stream: str, wrong: dict[str, Any], said: str
) -> None:
    name = journal_stream(stream)
    given: dict[str, Any] = {"subjects": [f"keylane.journal.{stream}.>"], "allow_direct": True, **wrong}
    if given["subjects"] == ["something.else"]:
        given["subjects"] = [f"{stream}_other.>"]
    await streams.create(connection, StreamConfig(name=name, storage=StorageType.MEMORY, **given))
    with pytest.raises(JournalConflict, match=said) as caught:
        await opened(connection, stream)
    assert repr(name) in str(caught.value)


async def test_another_stream_with_the_subjects_is_named_as_the_reason(connection: Connection, stream: str) -> None:
    other = f"{stream}_all"
    await streams.create(connection, StreamConfig(name=other, subjects=[f"keylane.journal.{stream}.x.>"]))
    try:
        with pytest.raises(JournalConflict, match=r"another stream has subjects below keylane\.journal"):
            await opened(connection, stream)
    finally:
        await streams.delete(connection, other)


async def test_a_journal_of_nothing_is_refused(connection: Connection) -> None:
    with pytest.raises(NotFound):
        await opened(connection, "no_such_stream")


@pytest.mark.parametrize(("options", "said"), [({"max_age_s": 0}, "max_age_s=0"), ({"max_bytes": 0}, "max_bytes is 0")])
async def test_limits_are_checked(connection: Connection, stream: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        await opened(connection, stream, **options)


async def test_it_has_as_many_replicas_as_its_stream(nats_cluster: NatsCluster) -> None:
    import keylane  # noqa: PLC0415

    async with await keylane.connect(nats_cluster.urls) as connection:
        await streams.create(connection, StreamConfig(name="replicated", subjects=["replicated.>"], num_replicas=3))
        try:
            assert (await opened(connection, "replicated")).num_replicas == 3
        finally:
            await streams.delete(connection, "replicated")
            await streams.delete(connection, journal_stream("replicated"))


def test_names() -> None:
    assert journal_stream("ORDERS") == "ORDERS+journal"
    assert journal_subject("ORDERS") == "keylane.journal.ORDERS.*.*"
    assert journal_subject("ORDERS", "billing", "alice") == "keylane.journal.ORDERS.billing.alice"
    with pytest.raises(InvalidInput):
        journal_subject("ORDERS", "billing", "")
