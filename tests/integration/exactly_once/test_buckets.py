"""Groups that write exactly once, and a KV bucket that is made anew or restored under them: the table is right."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import pytest

import keylane
from keylane import groups
from keylane.exactly_once import ExactlyOnce
from keylane.groups import Member
from keylane.groups.store import bucket_of
from keylane.jetstream import streams
from keylane.server import NatsServer
from tests.integration.exactly_once.rig import CALM, Database, drained, write
from tests.integration.groups.rig import Ground, active, flawless, make_ground
from tests.waiter import until

BUCKET = "elastic-consumer-groups"


@pytest.fixture
async def own(databases: list[Database], unique: Callable[..., str]) -> AsyncIterator[tuple[Ground, NatsServer]]:
    """A server whose buckets the test may delete, with a stream in files."""
    assert databases is not None
    async with AsyncExitStack() as stack:
        server = stack.enter_context(NatsServer.start())
        connection = await stack.enter_async_context(await keylane.connect(server.url))
        yield await make_ground(stack, connection, unique("once"), server.url, storage="file"), server


async def write_record_often(ground: Ground, times: int = 4) -> None:
    """So that the database knows a revision that a new bucket does not reach."""
    for _ in range(times):
        await groups.add_members(ground.connection, ground.stream, "g", ["m9"])
        await groups.drop_members(ground.connection, ground.stream, "g", ["m9"])


async def revision(ground: Ground) -> int:
    entry = await bucket_of(ground.connection, "elastic").get(f"{ground.stream}.g")
    assert entry is not None
    return entry.revision


@asynccontextmanager
async def load(ground: Ground) -> AsyncIterator[list[int]]:
    """Messages all the time; the sequences are complete after the block."""
    sent: list[int] = []
    over = asyncio.Event()

    async def publish() -> None:
        for number in count():
            sent.extend(await ground.publish([f"k{number % 30}"]))
            if over.is_set():
                return
            await asyncio.sleep(0.002)

    loading = asyncio.create_task(publish())
    try:
        yield sent
    finally:
        over.set()
        await loading


async def make_bucket_anew(ground: Ground) -> None:
    """Between two looks of the members: they never see that it was gone."""
    config = await groups.get_config(ground.connection, ground.stream, "g")
    await streams.delete(ground.connection, f"KV_{BUCKET}")
    bucket = bucket_of(ground.connection, "elastic")
    await bucket.ensure(replicas=1)
    await bucket.put(f"{ground.stream}.g", config.to_json(), revision=0)


async def test_a_bucket_made_anew_while_nobody_runs(own: tuple[Ground, NatsServer], database: Database) -> None:
    ground, _ = own
    await ground.elastic(members=["m1", "m2"])
    await write_record_often(ground)
    first = [await ground.join(name, ExactlyOnce(database.engine()).handler(write)) for name in ("m1", "m2")]
    sent = await ground.publish(f"k{number % 20}" for number in range(40))
    await drained(ground, 40)
    for member in first:
        await member.stop()
    await streams.delete(ground.connection, f"KV_{BUCKET}")
    await ground.elastic(members=["m1", "m2"])
    assert await revision(ground) == 1
    for name in ("m1", "m2"):
        await ground.join(name, ExactlyOnce(database.engine()).handler(write))
    sent += await ground.publish(f"k{number % 20}" for number in range(40))
    await drained(ground, 80)
    assert flawless(database.verdict(sent)), database.verdict(sent)


@pytest.mark.timeout(120)
@pytest.mark.long("members under a load that goes on")
async def test_a_bucket_made_anew_under_load(own: tuple[Ground, NatsServer], on_postgres: Database) -> None:
    """Instances from before go on, new ones take over from them, partitions move: each row once, in order."""
    ground, _ = own
    await ground.elastic(partitions=6, members=["m1", "m2"])
    await write_record_often(ground)

    async def joined(name: str) -> Member:
        # Timers so long that no member looks while there is no bucket: it would end, as its group is gone.
        return await ground.join(name, ExactlyOnce(on_postgres.engine()).handler(write), settings=CALM)

    await joined("m2")
    first = await joined("m1")
    async with load(ground) as sent:
        await on_postgres.wait_for(50)
        for _ in range(2):
            await make_bucket_anew(ground)
            await on_postgres.wait_for(len(on_postgres.rows()) + 50)
            before, first = first, await joined("m1")
            await before.stop()
            await on_postgres.wait_for(len(on_postgres.rows()) + 50)
            await groups.add_members(ground.connection, ground.stream, "g", ["m3"])
            third = await joined("m3")
            await on_postgres.wait_for(len(on_postgres.rows()) + 50)
            await groups.drop_members(ground.connection, ground.stream, "g", ["m3"])
            await on_postgres.wait_for(len(on_postgres.rows()) + 50)
            await third.stop()
    await drained(ground, len(sent))
    assert flawless(on_postgres.verdict(sent)), on_postgres.verdict(sent)
    assert on_postgres.ask("SELECT number FROM keylane_epoch") == [(3,)]


async def test_a_restored_bucket_says_so_once_and_goes_on_when_it_is_accepted(
    own: tuple[Ground, NatsServer], database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The files of the bucket are those of an earlier moment: the same bucket, with a lower revision."""
    ground, server = own
    await ground.elastic(members=["m1"])
    files = server.store_dir / "jetstream" / "$G" / "streams" / f"KV_{BUCKET}"
    await asyncio.to_thread(server._end_process)
    shutil.copytree(files, server.store_dir / "backup")
    await asyncio.to_thread(server.restart)
    await until(lambda: ground.connection.is_connected)
    await write_record_often(ground)
    member = await ground.join("m1", ExactlyOnce(database.engine()).handler(write))
    sent = await ground.publish(f"k{number % 20}" for number in range(40))
    await drained(ground, 40)
    await member.stop()
    await asyncio.to_thread(server._end_process)
    shutil.rmtree(files)
    shutil.copytree(server.store_dir / "backup", files)
    await asyncio.to_thread(server.restart)
    await until(lambda: ground.connection.is_connected)
    assert await revision(ground) == 1

    caplog.set_level(logging.WARNING, "keylane")
    caplog.clear()
    once = ExactlyOnce(database.engine())
    again = await ground.join("m1", once.handler(write))
    sent += await ground.publish(f"k{number % 20}" for number in range(40))
    await until(lambda: again.waiting_for is not None and "keylane exactly-once accept" in again.waiting_for)
    assert "revision 1, and m1 has worked with revision 9 of the same bucket" in str(again.waiting_for)
    await asyncio.sleep(1.5)  # what repeats itself would be heard again
    assert len(database.rows()) == 40
    told = [record.getMessage() for record in caplog.records]
    assert len([text for text in told if "worked with revision 9" in text]) == 1, told
    await once.accept(ground.stream, "g")
    await drained(ground, 80)
    assert flawless(database.verdict(sent)), database.verdict(sent)
    assert active(again)
    assert again.waiting_for is None


async def test_a_server_that_lost_everything_is_not_taken_for_the_old_one(
    own: tuple[Ground, NatsServer], database: Database
) -> None:
    """The messages of the new stream have known sequences: taken for done, they would be lost in silence."""
    ground, _ = own
    await ground.elastic(members=["m1"])
    once = ExactlyOnce(database.engine())
    member = await ground.join("m1", once.handler(write))
    await ground.publish(f"k{number}" for number in range(20))
    await drained(ground, 20)
    await groups.delete(ground.connection, ground.stream, "g")
    await member.wait()
    for stream in (ground.stream, f"KV_{BUCKET}"):
        await streams.delete(ground.connection, stream)
    database.do("DELETE FROM effects")
    wiped = await make_ground(ground.stack, ground.connection, ground.stream, ground.url, storage="file")
    await wiped.elastic(members=["m1"])
    again = await wiped.join("m1", once.handler(write))
    sent = await wiped.publish(f"k{number}" for number in range(20))
    await until(lambda: again.waiting_for is not None and "keylane exactly-once forget" in again.waiting_for)
    assert database.rows() == []
    await once.forget(ground.stream, "g")
    await drained(wiped, 20)
    assert flawless(database.verdict(sent)), database.verdict(sent)
