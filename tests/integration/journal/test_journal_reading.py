"""Reading a journal: all of it or an error, repeated batches once, broken ones told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from keylane import Connection
from keylane.core.journal_record import BatchHead, Columns, pack, seal
from keylane.errors import BrokenJournal, InvalidInput, JournalError, JournalTooNew, NotFound
from keylane.jetstream import Outgoing, PublishAck, publish_many
from keylane.journal import Journal, read_batches, read_journal
from keylane.journal.arrow import ARROW_COLUMNS, to_arrow
from tests.integration.journal.rig import Instance, Worker, read


def batch(stream: str, number: int, first: int, count: int = 3, **changes: object) -> Outgoing:
    head = BatchHead(
        writer="w", batch=number, stream=stream, group="billing", member="alice", instance="i", sample=1.0, dropped=0
    )
    ones = [1] * count
    columns = Columns(
        sequences=list(range(first, first + count)),
        source_sequences=ones,
        started_ns=ones,
        ended_ns=ones,
        keys=["k"] * count,
        partitions=ones,
        delivered=ones,
        tenures=[("p", 1)] * count,
        outcomes=ones,
    )
    subject = f"keylane.journal.{stream}.billing.alice"
    return Outgoing(subject, seal(replace(head, **changes), pack(columns)))  # type: ignore[arg-type]


async def store(connection: Connection, stream: str, *messages: Outgoing) -> None:
    async with Journal(connection, stream=stream):
        pass
    for result in await publish_many(connection, messages):
        assert isinstance(result, PublishAck), result


async def test_batches_that_are_there_twice_or_late_come_once(connection: Connection, stream: str) -> None:
    first, second, third = (batch(stream, number, number * 10) for number in (1, 2, 3))
    await store(connection, stream, second, first, second, third, first, third)
    assert [record.sequence for record in await read(connection, stream)] == [20, 21, 22, 10, 11, 12, 30, 31, 32]


async def test_other_instances_and_writers_have_numbers_of_their_own(connection: Connection, stream: str) -> None:
    await store(
        connection,
        stream,
        batch(stream, 1, 10),
        batch(stream, 1, 20, instance="other"),
        batch(stream, 1, 30, writer="other"),
    )
    assert [record.sequence for record in await read(connection, stream)] == [10, 11, 12, 20, 21, 22, 30, 31, 32]


async def test_more_batches_than_one_request_brings(connection: Connection, stream: str) -> None:
    async with Journal(connection, stream=stream, batch_records=5) as journal:
        noted = Worker(connection, journal, Instance(stream)).work(1000)
    assert [record.sequence for record in await read(connection, stream)] == noted
    later = [record.sequence async for record in read_journal(connection, stream, from_sequence=151)]
    assert later == noted[750:]
    assert [sequence async for sequence, _ in read_batches(connection, stream)] == list(range(1, 201))


async def test_an_empty_journal_and_an_empty_part_of_it(connection: Connection, stream: str) -> None:
    await store(connection, stream)
    assert await read(connection, stream) == []
    await store(connection, stream, batch(stream, 1, 1))
    assert await read(connection, stream, "mail") == []


async def test_no_journal(connection: Connection, stream: str) -> None:
    with pytest.raises(NotFound, match="there is no stream"):
        await read(connection, stream)


async def test_a_member_without_its_group_is_refused(connection: Connection, stream: str) -> None:
    with pytest.raises(InvalidInput, match="member is 'alice' without a group"):
        _ = [record async for record in read_journal(connection, stream, member="alice")]


def newer(stream: str) -> Outgoing:
    good = batch(stream, 1, 1)
    return good._replace(data=b"KLJ\x02" + good.data[4:])


def cut(stream: str) -> Outgoing:
    good = batch(stream, 1, 1)
    return good._replace(data=good.data[:-9])


def of_another(stream: str) -> Outgoing:
    return batch(stream, 1, 1, member="bob")


def text(stream: str) -> Outgoing:
    return Outgoing(f"keylane.journal.{stream}.billing.alice", b"hello")


@pytest.mark.parametrize(
    ("bad", "kind", "said"),
    [
        (newer, JournalTooNew, "sequence 2 on .*: a journal batch of version 2"),
        (cut, BrokenJournal, "sequence 2 on .*: the checksum"),
        (text, BrokenJournal, "sequence 2 on .* are not a journal batch"),
        (of_another, BrokenJournal, "sequence 2 on .* holds a batch of group 'billing', member 'bob'"),
    ],
)
async def test_what_cannot_be_read_is_told(
    connection: Connection,
    stream: str,
    bad: Callable[[str], Outgoing],
    kind: type[JournalError],
    said: str,
) -> None:
    await store(connection, stream, batch(stream, 1, 10), bad(stream), batch(stream, 2, 20))
    strict = read_journal(connection, stream)
    assert [(await anext(strict)).sequence for _ in range(3)] == [10, 11, 12]
    with pytest.raises(kind, match=said):
        await anext(strict)
    told: list[tuple[int, JournalError]] = []
    reading = read_journal(connection, stream, on_broken=lambda sequence, error: told.append((sequence, error)))
    assert [record.sequence async for record in reading] == [10, 11, 12, 20, 21, 22]
    assert [(sequence, type(error)) for sequence, error in told] == [(2, kind)]


async def test_a_batch_as_arrow_has_the_same_records(connection: Connection, stream: str) -> None:
    async with Journal(connection, stream=stream, batch_records=500) as journal:
        worker = Worker(connection, journal, Instance(stream))
        worker.work(499)
        worker.origin.revision = 5
        journal.note(worker.message(500), "dead", 7, 9)
    [one] = [batch async for _, batch in read_batches(connection, stream)]
    table = to_arrow(one)
    assert tuple(table.schema.names) == ARROW_COLUMNS
    assert table.to_pylist() == [record._asdict() for record in one.rows()]
    assert [row["revision"] for row in table.slice(498).to_pylist()] == [4, 5]
