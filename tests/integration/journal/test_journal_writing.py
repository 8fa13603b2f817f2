"""What was noted is what is read: in order, in batches, by share of keys, and of several members at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from keylane import Connection
from keylane.core.journal_record import in_sample
from keylane.errors import InvalidInput
from keylane.journal import OUTCOMES, Journal, JournalRecord, journal_stream, read_batches, read_journal
from tests.integration.journal.rig import START_NS, Instance, Worker, messages_in, read
from tests.waiter import until


async def test_what_was_noted_is_what_is_read_in_order(connection: Connection, stream: str) -> None:
    async with Journal(connection, stream=stream, batch_records=100) as journal:
        worker = Worker(connection, journal, Instance(stream))
        noted = worker.work(1234)
        assert await journal.flush()
    records = await read(connection, stream)
    assert [record.sequence for record in records] == noted
    assert [(record.batch, record.row) for record in records] == [(n // 100 + 1, n % 100) for n in range(1234)]
    assert (journal.stored, journal.dropped) == (1234, 0)
    assert records[8] == JournalRecord(
        stream=stream,
        group="billing",
        member="alice",
        instance="i-1",
        pin="pin1",
        revision=4,
        sequence=9,
        source_sequence=9,
        key="customer-2",
        partition=2,
        delivered=1,
        started_ns=START_NS + 9000,
        ended_ns=START_NS + 9500,
        outcome="done",
        writer=records[0].writer,
        batch=1,
        row=8,
    )


async def test_a_full_batch_is_sent_at_once_and_a_small_one_after_a_while(connection: Connection, stream: str) -> None:
    async with Journal(connection, stream=stream, batch_records=50, flush_s=1.5) as journal:
        worker = Worker(connection, journal, Instance(stream))
        worker.work(49)
        await asyncio.sleep(0)
        assert journal.stored == 0
        worker.work(1)
        await until(lambda: journal.stored == 50)
        worker.work(3)
        await until(lambda: journal.stored == 53)
        assert await messages_in(connection, stream) == 2


async def test_the_time_of_a_batch_starts_with_its_first_record(connection: Connection, stream: str) -> None:
    async with Journal(connection, stream=stream, batch_records=50, flush_s=60) as journal:
        worker = Worker(connection, journal, Instance(stream))
        worker.work(1)
        first = journal._timer
        assert first is not None
        worker.work(54)
        assert first.cancelled()
        assert journal._timer not in (None, first)
        await until(lambda: journal.stored == 50)
        assert await messages_in(connection, stream) == 1
    assert journal.stored == 55


async def test_close_stores_what_is_left(connection: Connection, stream: str) -> None:
    journal = await Journal(connection, stream=stream, flush_s=60).start()
    noted = Worker(connection, journal, Instance(stream)).work(17)
    await journal.stop()
    await journal.stop()
    assert [record.sequence for record in await read(connection, stream)] == noted
    assert repr(journal) == f"<Journal {journal_stream(stream)} ended held=0 dropped=0>"


async def test_what_is_noted_after_the_end_is_counted(
    connection: Connection, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Journal(connection, stream=stream) as journal:
        worker = Worker(connection, journal, Instance(stream))
    worker.work(2)
    assert journal.dropped == 2
    assert [record.message.count("it is closed") for record in caplog.records] == [1]
    assert await read(connection, stream) == []


async def test_every_outcome_is_kept(connection: Connection, stream: str) -> None:
    async with Journal(connection, stream=stream) as journal:
        worker = Worker(connection, journal, Instance(stream))
        for number, outcome in enumerate(OUTCOMES, start=1):
            journal.note(worker.message(number), outcome, 1, 2)
        with pytest.raises(InvalidInput, match="outcome is 'fine': use one of done, failed"):
            journal.note(worker.message(9), "fine", 1, 2)
    assert [record.outcome for record in await read(connection, stream)] == list(OUTCOMES)


async def test_a_sample_holds_whole_keys(connection: Connection, stream: str) -> None:
    async with Journal(connection, stream=stream, sample=0.3) as journal:
        worker = Worker(connection, journal, Instance(stream), keys=100)
        noted = worker.work(1000)
    records = await read(connection, stream)
    chosen = {f"customer-{number}" for number in range(100) if in_sample(f"customer-{number}", 0.3)}
    assert {record.key for record in records} == chosen
    assert 0 < len(chosen) < 100
    assert [record.sequence for record in records] == [one for one in noted if f"customer-{one % 100}" in chosen]
    async for _, batch in read_batches(connection, stream):
        assert batch.head.sample == 0.3


async def test_two_members_with_a_journal_each(connection: Connection, stream: str) -> None:
    journals = [Journal(connection, stream=stream, batch_records=10) for _ in range(2)]
    async with journals[0] as one, journals[1] as other:
        alice = Worker(connection, one, Instance(stream))
        bob = Worker(connection, other, Instance(stream, member="bob", instance="i-2"))
        for _ in range(20):
            alice.work(7)
            bob.work(7)
            await asyncio.sleep(0)
    records = await read(connection, stream)
    for member in ("alice", "bob"):
        own = [record for record in records if record.member == member]
        assert [record.sequence for record in own] == list(range(1, 141))
        assert [(record.batch, record.row) for record in own] == [(n // 10 + 1, n % 10) for n in range(140)]
    assert len({record.writer for record in records}) == 2


async def test_members_and_groups_share_a_journal(connection: Connection, stream: str) -> None:
    async with Journal(connection, stream=stream, batch_records=64) as journal:
        workers = [
            Worker(connection, journal, Instance(stream, group=group, member=member, instance=f"{group}-{member}"))
            for group in ("billing", "mail")
            for member in ("alice", "bob")
        ]
        for _ in range(100):
            for worker in workers:
                worker.work(1)
    for group in ("billing", "mail"):
        records = await read(connection, stream, group)
        assert {record.group for record in records} == {group}
        for member in ("alice", "bob"):
            own = [record for record in records if record.member == member]
            assert [record.sequence for record in own] == list(range(1, 101))
            assert sorted({record.batch for record in own}) == list(range(1, max(r.batch for r in own) + 1))
    only = [record async for record in read_journal(connection, stream, group="mail", member="bob")]
    assert {(record.group, record.member) for record in only} == {("mail", "bob")}
    assert len(only) == 100


async def test_a_journal_is_for_one_stream(connection: Connection, stream: str) -> None:
    async with Journal(connection, stream=stream) as journal:
        stranger = Worker(connection, journal, Instance("OTHER"))
        with pytest.raises(InvalidInput, match=f"stream 'OTHER' for the journal of '{stream}'"):
            stranger.work(1)


async def test_batches_that_are_too_large_for_the_server_are_halved(connection: Connection, stream: str) -> None:
    async with Journal(connection, stream=stream, batch_records=2000) as journal:
        long_keys = Worker(
            connection, journal, Instance(stream), keys=2000, key_of=lambda number: f"{number:05d}" + "x" * 3000
        )
        noted = long_keys.work(2000)
        assert await journal.flush(20)
    records = await read(connection, stream)
    assert [record.sequence for record in records] == noted
    assert await messages_in(connection, stream) == 8


async def test_a_member_that_never_waits_does_not_keep_the_journal_from_writing(
    connection: Connection, stream: str
) -> None:
    async with Journal(connection, stream=stream, batch_records=100, max_waiting=5000) as journal:
        worker = Worker(connection, journal, Instance(stream))
        while journal.stored < 1000:
            worker.work(300)
            await asyncio.sleep(0)
            assert journal.dropped < 100_000, "nothing is stored while members work"


async def test_the_clock_of_a_journal_is_that_of_the_day(connection: Connection, stream: str) -> None:
    journal = Journal(connection, stream=stream)
    before, told, after = time.time_ns(), journal.now_ns(), time.time_ns()
    assert before - 10**9 < told < after + 10**9
    assert journal.now_ns() > told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sample": 0}, "sample is 0"),
        ({"batch_records": 0}, "1 to 10000 records"),
        ({"batch_records": 10_001}, "1 to 10000 records"),
        ({"batch_records": True}, "whole number"),
        ({"max_waiting": 999}, "one batch"),
        ({"flush_s": 0}, "flush_s=0"),
        ({"stream": "a.b"}, "stream name"),
    ],
)
async def test_options_are_checked(connection: Connection, options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Journal(connection, **{"stream": "ORDERS", **options})  # type: ignore[arg-type]
