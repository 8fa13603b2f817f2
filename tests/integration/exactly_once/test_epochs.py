"""Buckets and streams that are made anew or restored: tokens go on growing, or an operator is asked."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from keylane.errors import Fenced, InvalidInput, StreamMadeAnew, TokenWentBack
from keylane.exactly_once import ExactlyOnce
from keylane.groups import GroupMessage
from tests.integration.exactly_once.rig import Database, Instance, write

NEW_BUCKET = "2026-02-01T00:00:00+00:00"
NEW_STREAM = "2026-03-01T00:00:00+00:00"


def sequences(database: Database) -> list[int]:
    return [sequence for _, sequence, _ in database.rows()]


async def test_a_bucket_made_anew_counts_on(database: Database) -> None:
    before, after = ExactlyOnce(database.engine()), ExactlyOnce(database.engine())
    old, new = Instance(9, 100), Instance(1, 200, member="m2", bucket=NEW_BUCKET)
    await before.handler(write)(old.message(1))
    await after.handler(write)(new.message(2))
    old.record = 1
    with pytest.raises(Fenced, match="does not follow the newest record"):
        await before.handler(write)(old.message(3))
    new.revision = 2
    await ExactlyOnce(database.engine()).handler(write)(new.message(4))
    assert sequences(database) == [1, 2, 4]
    assert database.ask("SELECT number, base, bucket FROM keylane_epoch") == [(2, 9, NEW_BUCKET)]


async def test_an_instance_that_follows_the_old_bucket_cannot_claim_in_the_new_one(database: Database) -> None:
    """Also not what nobody has claimed yet: what it saw of the server is of an epoch that is over."""
    before, after = ExactlyOnce(database.engine()), ExactlyOnce(database.engine())
    old, new = Instance(9, 100), Instance(1, 200, bucket=NEW_BUCKET)
    await before.handler(write)(old.message(1, partition=1))
    await after.handler(write)(new.message(2, partition=1))
    old.record = 1
    for partition in (1, 2):
        with pytest.raises(Fenced):
            await before.handler(write)(old.message(3, partition=partition))
    old.record, old.revision, old.bucket = None, 1, NEW_BUCKET
    with pytest.raises(Fenced):
        await before.handler(write)(old.message(4, partition=1))
    await before.handler(write)(old.message(4, partition=2))
    assert sequences(database) == [1, 2, 4]
    assert database.ask("SELECT partition, revision FROM keylane_fence ORDER BY partition") == [(1, 10), (2, 10)]


async def test_buckets_that_take_turns_never_go_back(database: Database) -> None:
    """A new bucket, then the old one restored from a backup: each is an epoch of its own."""
    once = ExactlyOnce(database.engine())
    for number, (revision, bucket) in enumerate([(9, "a"), (1, "b"), (5, "a"), (2, "b")]):
        await once.handler(write)(Instance(revision, 100, member=f"m{number}", bucket=bucket).message(1 + number))
    assert sequences(database) == [1, 2, 3, 4]
    assert database.ask("SELECT revision FROM keylane_fence") == [(9 + 1 + 5 + 2,)]


async def test_a_restored_bucket_waits_for_an_operator(database: Database) -> None:
    once = ExactlyOnce(database.engine())
    await once.handler(write)(Instance(9, 100).message(1))
    restored = Instance(5, 200, member="m2")
    with pytest.raises(TokenWentBack, match="revision 5, and m1 has worked with revision 9 of the same bucket") as told:
        await once.handler(write)(restored.message(2))
    assert restored.waiting_for == str(told.value)
    assert "keylane exactly-once accept ORDERS billing --database URL" in str(told.value)
    await once.accept("ORDERS", "billing")
    again = Instance(5, 200, member="m2")
    await once.handler(write)(again.message(2))
    assert again.waiting_for is None
    assert sequences(database) == [1, 2]


async def test_a_mismatch_is_asked_for_once_a_second_and_ends_by_itself(database: Database) -> None:
    once = ExactlyOnce(database.engine())
    await once.handler(write)(Instance(9, 100).message(1))
    restored = Instance(5, 200, member="m2")
    for _ in range(50):
        with pytest.raises(TokenWentBack):
            await once.handler(write)(restored.message(2))
    assert restored.asked <= 3, "of 50 messages"
    restored.revision = 9  # the record was written some more times
    async with asyncio.timeout(10):
        while not sequences(database)[1:]:
            with suppress(TokenWentBack):
                await once.handler(write)(restored.message(2))
    assert restored.waiting_for is None


async def test_a_late_reader_is_not_taken_for_a_restored_bucket(database: Database) -> None:
    """It followed revision 5 when 9 was claimed, and the server has 9: it is refused, and goes on once it follows."""
    once = ExactlyOnce(database.engine())
    await once.handler(write)(Instance(9, 100).message(1))
    late = Instance(5, 200, member="m2", record=9)
    with pytest.raises(Fenced) as refused:
        await once.handler(write)(late.message(2))
    assert not isinstance(refused.value, TokenWentBack)
    late.revision = 9
    await once.handler(write)(late.message(2))
    assert sequences(database) == [1, 2]


@pytest.mark.parametrize("bucket", ["2026-01-01T00:00:00+00:00", NEW_BUCKET])
async def test_another_stream_is_not_taken_for_the_known_one(database: Database, bucket: str) -> None:
    once = ExactlyOnce(database.engine())
    await once.handler(write)(Instance(9, 100).message(7))
    wiped = Instance(9, 200, bucket=bucket, stream_created=NEW_STREAM, last_sequence=3)
    with pytest.raises(StreamMadeAnew, match="keylane exactly-once forget ORDERS billing"):
        await once.handler(write)(wiped.message(1))
    await once.forget("ORDERS", "billing")
    await once.handler(write)(Instance(9, 200, bucket=bucket, stream_created=NEW_STREAM).message(1))
    assert sequences(database) == [7, 1]


@pytest.mark.parametrize(
    "changed", [{"stream_created": NEW_STREAM}, {"last_sequence": 3}], ids=["made anew", "restored"]
)
async def test_a_stream_that_changes_under_an_owner_is_noticed_before_a_message_is_skipped(
    database: Database, changed: dict[str, Any]
) -> None:
    """The owner has its claim; what it would take for done is of another stream."""
    once = ExactlyOnce(database.engine())
    owner = Instance(9, 100)
    for sequence in (7, 7):
        await once.handler(write)(owner.message(sequence))
    for name, value in changed.items():
        setattr(owner, name, value)
    with pytest.raises(StreamMadeAnew, match="keylane exactly-once forget ORDERS billing"):
        await once.handler(write)(owner.message(3))
    assert "forget" in str(owner.waiting_for)
    await once.forget("ORDERS", "billing")
    async with asyncio.timeout(10):
        while len(sequences(database)) < 2:
            with suppress(StreamMadeAnew):
                await once.handler(write)(owner.message(3))
    assert sequences(database) == [7, 3]
    assert owner.waiting_for is None


async def test_a_copied_stream_is_accepted(database: Database) -> None:
    once = ExactlyOnce(database.engine())
    await once.handler(write)(Instance(9, 100).message(7))
    copy: dict[str, Any] = {"bucket": NEW_BUCKET, "stream_created": NEW_STREAM}
    with pytest.raises(StreamMadeAnew):
        await once.handler(write)(Instance(2, 200, **copy).message(7))
    await once.accept("ORDERS", "billing")
    for sequence in (7, 8):
        await once.handler(write)(Instance(2, 300 + sequence, **copy).message(sequence))
    assert sequences(database) == [7, 8]


async def test_nothing_to_accept(database: Database) -> None:
    with pytest.raises(InvalidInput, match="has no record of group 'nosuch'"):
        await ExactlyOnce(database.engine()).accept("ORDERS", "nosuch")


# ---- tables of version 0.1 ------------------------------------------------------------------------------------


async def tables_of_version_0_1(database: Database, revision: int = 9) -> None:
    await ExactlyOnce(database.engine()).create_tables()
    database.do("DROP TABLE keylane_epoch")
    database.do(f"INSERT INTO keylane_fence VALUES ('ORDERS', 'billing', 3, {revision}, 100, 'm1', 'x')")  # noqa: S608
    database.do("INSERT INTO keylane_progress VALUES ('ORDERS', 'billing', 3, 'k', 7)")


@pytest.mark.parametrize(("revision", "base"), [(9, 0), (12, 0), (1, 9)], ids=["same", "newer", "made anew"])
async def test_tables_of_version_0_1_go_on(database: Database, revision: int, base: int) -> None:
    await tables_of_version_0_1(database)
    once = ExactlyOnce(database.engine())
    for sequence in (7, 8):
        await once.handler(write)(Instance(revision, 200).message(sequence))
    assert sequences(database) == [8]
    assert database.ask("SELECT revision FROM keylane_fence") == [(base + revision,)]


async def test_a_stream_younger_than_what_version_0_1_did_is_another_one(database: Database) -> None:
    await tables_of_version_0_1(database)

    class Younger(Instance):
        async def source(self) -> Any:
            return (await Instance.source(self))._replace(stream_created_ns=500)

    with pytest.raises(StreamMadeAnew, match="after the last of them"):
        await ExactlyOnce(database.engine()).handler(write)(Younger(9, 600).message(8))


async def test_an_effect_never_sees_a_refused_message(database: Database) -> None:
    called: list[int] = []

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        called.append(message.delivery_sequence)
        await write(message, connection)

    once = ExactlyOnce(database.engine())
    await once.handler(effect)(Instance(9, 100).message(1))
    with pytest.raises(TokenWentBack):
        await once.handler(effect)(Instance(5, 200, member="m2").message(2))
    assert called == [1]
