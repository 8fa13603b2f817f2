"""A server that is away, hangs or refuses: handlers never wait, nothing is stored twice, and every loss is told."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from nats.js.api import StreamConfig

import keylane
from keylane import Connection
from keylane.core.journal_record import open_batch
from keylane.jetstream import streams
from keylane.journal import Journal, journal_stream, read_batches
from keylane.server import NatsServer
from keylane.server.node import CONFIG_NAME
from tests.integration.jetstream.rig import frozen, link_is
from tests.integration.journal.rig import Instance, Worker, held, in_doubt, in_flight, messages_in, read
from tests.waiter import until

STREAM = "ORDERS"


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    with NatsServer.start() as server:
        yield server


@pytest.fixture
async def own(own_server: NatsServer) -> AsyncIterator[Connection]:
    async with await keylane.connect(own_server.url) as connection:
        await streams.create(connection, StreamConfig(name=STREAM, subjects=["orders.>"]))
        yield connection


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.message for record in caplog.records if record.name == "keylane.journal")


async def back(server: NatsServer, connection: Connection) -> None:
    await asyncio.to_thread(server.restart)
    await link_is(connection, up=True)


async def test_a_restart_loses_nothing_that_fits(own_server: NatsServer, own: Connection) -> None:
    async with Journal(own, stream=STREAM, batch_records=50) as journal:
        worker = Worker(own, journal, Instance(STREAM))
        worker.work(500)
        own_server.kill()
        worker.work(500)
        await link_is(own, up=False)
        worker.work(500)
        await back(own_server, own)
        worker.work(500)
        assert await journal.flush(20)
    records = await read(own, STREAM)
    assert [record.sequence for record in records] == list(range(1, 2001))
    assert journal.dropped == 0


async def test_what_is_dropped_is_told_in_the_next_batch_and_logged_once(
    own_server: NatsServer, own: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with Journal(own, stream=STREAM, batch_records=50, max_waiting=1000) as journal:
        worker = Worker(own, journal, Instance(STREAM))
        worker.work(500)
        assert await journal.flush(20)
        own_server.kill()
        await link_is(own, up=False)
        for _ in range(100):
            worker.work(50)
            await asyncio.sleep(0)
        assert held(journal) <= 1000
        assert warnings_of(caplog, "the oldest are dropped") == 1
        await back(own_server, own)
        assert await journal.flush(20)
        worker.work(10)
        assert await journal.flush(20)
    records = await read(own, STREAM)
    # The first 500 were stored, then the newest 1000 were kept.
    assert [record.sequence for record in records] == [*range(1, 501), *range(4501, 5511)]
    drops = [(batch.head.batch, batch.head.dropped) async for _, batch in read_batches(own, STREAM)]
    assert drops == [*((number, 0) for number in range(1, 11)), (11, 4000), *((number, 0) for number in range(12, 32))]
    assert journal.dropped == 4000
    assert warnings_of(caplog, "the oldest are dropped") == 1


async def test_a_member_that_never_yields_is_bounded_too(own: Connection) -> None:
    async with Journal(own, stream=STREAM, batch_records=50, max_waiting=200) as journal:
        worker = Worker(own, journal, Instance(STREAM))
        worker.work(1000)
        assert held(journal) == 200
        assert await journal.flush(20)
    records = await read(own, STREAM)
    assert [record.sequence for record in records] == list(range(801, 1001))
    assert journal.dropped == 800


@pytest.mark.timeout(90)
async def test_a_batch_that_was_sent_twice_is_stored_once(own_server: NatsServer, own: Connection) -> None:
    async with Journal(own, stream=STREAM, batch_records=50) as journal:
        worker = Worker(own, journal, Instance(STREAM))
        worker.work(100)
        assert await journal.flush(20)
        with frozen(own_server):
            worker.work(300)
            # The answers fail to come; what was sent lies in the server's socket and is sent once more.
            await until(lambda: in_doubt(journal) == 6)
        assert await journal.flush(30)
    assert [record.sequence for record in await read(own, STREAM)] == list(range(1, 401))
    assert await messages_in(own, STREAM) == 8
    assert journal.dropped == 0


@pytest.mark.timeout(90)
async def test_what_may_be_stored_is_not_dropped(own_server: NatsServer, own: Connection) -> None:
    async with Journal(own, stream=STREAM, batch_records=50, max_waiting=500) as journal:
        worker = Worker(own, journal, Instance(STREAM))
        with frozen(own_server):
            worker.work(300)
            await until(lambda: in_doubt(journal) == 6)
            for _ in range(20):
                worker.work(50)
                await asyncio.sleep(0)
        assert await journal.flush(30)
    sequences = [record.sequence for record in await read(own, STREAM)]
    assert sequences[:300] == list(range(1, 301))
    assert len(sequences) == len(set(sequences))
    told = sum([batch.head.dropped async for _, batch in read_batches(own, STREAM)])
    assert told == journal.dropped == 1300 - len(sequences) > 0


async def test_what_is_dropped_last_is_told_in_a_batch_without_records(own_server: NatsServer, own: Connection) -> None:
    async with Journal(own, stream=STREAM, batch_records=50, max_waiting=500) as journal:
        worker = Worker(own, journal, Instance(STREAM))
        with frozen(own_server):
            worker.work(500)
            await until(lambda: in_flight(journal) == 10)
            worker.work(100)
        assert await journal.flush(30)
        batches = [batch async for _, batch in read_batches(own, STREAM)]
    assert [(batch.records, batch.head.dropped) for batch in batches] == [*[(50, 0)] * 10, (0, 100)]
    assert [record.sequence for record in await read(own, STREAM)] == list(range(1, 501))
    assert journal.dropped == 100


async def test_close_tells_what_was_dropped_last(own_server: NatsServer, own: Connection) -> None:
    async with Journal(own, stream=STREAM, batch_records=50, max_waiting=100) as journal:
        first, second = (Worker(own, journal, Instance(STREAM, member=name)) for name in ("alice", "bob"))
        with frozen(own_server):
            first.work(50)
            second.work(50)
            await until(lambda: in_flight(journal) == 2)
            first.work(50)
            second.work(100)
    told = [(batch.head.member, batch.head.dropped) async for _, batch in read_batches(own, STREAM)]
    assert sorted(told) == [("alice", 0), ("alice", 50), ("bob", 0), ("bob", 100)]


async def test_a_refused_batch_that_is_dropped_takes_no_count_with_it(own: Connection) -> None:
    async with Journal(own, stream=STREAM, batch_records=10, max_waiting=100) as journal:
        worker = Worker(own, journal, Instance(STREAM))
        config = (await streams.info(own, journal_stream(STREAM))).config
        await streams.delete(own, journal_stream(STREAM))
        worker.work(150)
        await until(lambda: any(batch.data and open_batch(batch.data).head.dropped for batch in journal._waiting))
        worker.work(100)
        await streams.create(own, config)
        assert await journal.flush(20)
        told = sum([batch.head.dropped async for _, batch in read_batches(own, STREAM)])
    assert told == journal.dropped == 150


async def test_what_failed_is_sent_again_in_the_old_order(own: Connection, caplog: pytest.LogCaptureFixture) -> None:
    async with Journal(own, stream=STREAM, batch_records=10) as journal:
        config = (await streams.info(own, journal_stream(STREAM))).config
        await streams.delete(own, journal_stream(STREAM))
        Worker(own, journal, Instance(STREAM)).work(50)
        await until(lambda: warnings_of(caplog, "a batch was not stored and is retried") == 1)
        await streams.create(own, config)
        assert await journal.flush(20)
    assert [record.sequence for record in await read(own, STREAM)] == list(range(1, 51))


async def test_answers_that_are_not_allowed_any_more_lose_nothing(caplog: pytest.LogCaptureFixture) -> None:
    user = "{ user: u, password: p, permissions: { subscribe: { deny: other } } }"
    with NatsServer.start(extra_config=f"authorization {{ users: [{user}] }}") as server:
        async with keylane.connect(server.url, user="u", password="p") as connection:  # noqa: S106 - made up
            await streams.create(connection, StreamConfig(name=STREAM, subjects=["orders.>"]))
            async with Journal(connection, stream=STREAM, batch_records=10) as journal:
                worker = Worker(connection, journal, Instance(STREAM))
                config = server.store_dir / CONFIG_NAME
                config.write_text(config.read_text().replace("deny: other", 'deny: "_INBOX.>"'))
                os.kill(server.pid, signal.SIGHUP)
                await until(lambda: worker.work(10) and warnings_of(caplog, "may not subscribe") == 1)
                await asyncio.to_thread(server.restart)  # with the permissions of the beginning
                assert await journal.flush(20)
            noted = next(worker.sequences) - 1
            assert [record.sequence for record in await read(connection, STREAM)] == list(range(1, noted + 1))
    assert (journal.stored, journal.dropped) == (noted, 0)


async def test_close_has_a_deadline(own_server: NatsServer, own: Connection, caplog: pytest.LogCaptureFixture) -> None:
    journal = await Journal(own, stream=STREAM).start()
    worker = Worker(own, journal, Instance(STREAM))
    own_server.kill()
    await link_is(own, up=False)
    worker.work(70)
    async with asyncio.timeout(15):
        await journal.stop(timeout_s=0.2)
    assert journal.dropped == 70
    assert warnings_of(caplog, "its last 70 records were not stored") == 1
    assert await journal.flush(0.1)  # nothing is left to wait for
    assert "held=0" in repr(journal)


async def test_close_logs_how_many_dropped_records_no_batch_tells(
    own_server: NatsServer, own: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    journal = await Journal(own, stream=STREAM, batch_records=10, max_waiting=20).start()
    worker = Worker(own, journal, Instance(STREAM))
    own_server.kill()
    await link_is(own, up=False)
    worker.work(50)
    await journal.stop(timeout_s=0.2)
    assert journal.dropped == 50
    assert warnings_of(caplog, "its last 20 records were not stored") == 1
    assert warnings_of(caplog, "no batch carries the number of 30 dropped records") == 1


async def test_a_connection_that_is_closed_ends_the_journal(own: Connection, caplog: pytest.LogCaptureFixture) -> None:
    journal = await Journal(own, stream=STREAM, flush_s=60).start()
    worker = Worker(own, journal, Instance(STREAM))
    worker.work(30)
    await own.close()
    await until(lambda: journal.dropped == 30)
    worker.work(1)
    await journal.stop()
    assert journal.dropped == 31
    assert warnings_of(caplog, "its last 30 records were not stored") == 1


async def test_a_stream_that_is_deleted_is_told_and_costs_the_oldest(
    own: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="keylane.journal")
    async with Journal(own, stream=STREAM, batch_records=10, max_waiting=100) as journal:
        worker = Worker(own, journal, Instance(STREAM))
        config = (await streams.info(own, journal_stream(STREAM))).config
        await streams.delete(own, journal_stream(STREAM))
        worker.work(50)
        await until(lambda: warnings_of(caplog, "a batch was not stored and is retried") == 1)
        for _ in range(20):
            worker.work(10)
            await asyncio.sleep(0)
        assert 0 < journal.dropped <= 250
        await streams.create(own, config)
        assert await journal.flush(20)
        await until(lambda: warnings_of(caplog, "is written again") == 1)
    records = await read(own, STREAM)
    sequences = [record.sequence for record in records]
    assert sequences == sorted(set(sequences))
    assert sequences[-1] == 250
    assert len(sequences) + journal.dropped == 250
    told = sum([batch.head.dropped async for _, batch in read_batches(own, STREAM)])
    assert told == journal.dropped
    assert warnings_of(caplog, "a batch was not stored and is retried") == 1
