"""The driver's part of a query against a real server, without a JVM: losses, waiting, starts, limits."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import keylane
import keylane.errors
from keylane import Connection, groups
from keylane.core.partitions import Partitioning
from keylane.errors import (
    AuthenticationFailed,
    DataLost,
    InvalidInput,
    NoSuchGroup,
    NotFound,
    QueryFenced,
    ServerUnreachable,
)
from keylane.jetstream import Outgoing, publish_many, streams
from keylane.server import NatsServer
from keylane.spark import retry, stream_state
from keylane.spark.address import Address
from keylane.spark.driver import query, source_stream
from keylane.spark.driver.batch_plan import plan_batch
from keylane.spark.driver.lease import LeaseRecord
from keylane.spark.driver.query import Query
from keylane.spark.driver.source_stream import SourceStream
from keylane.spark.executor.split_reader import read_watched
from keylane.spark.options import read_options
from keylane.spark.query_records import bucket_of, lease_key
from keylane.spark.stream_state import StreamSnapshot
from keylane.spark.sync_connection import shared_connection
from keylane.spark.tasks import Split
from tests.peers.store import REPOSITORY
from tests.waiter import until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]

Unique = Callable[..., str]


class Rig:
    """A stream, and queries on it. Calls that wait run in a thread, as in a process of Spark's."""

    def __init__(self, connection: Connection, url: str, name: str) -> None:
        self.connection = connection
        self.url = url
        self.name = name

    async def make(self, **config: Any) -> None:
        wire = {"name": self.name, "subjects": [f"{self.name}.*"], "storage": "memory", "allow_direct": True}
        await self.connection.api.request(f"STREAM.CREATE.{self.name}", wire | config)

    async def publish(self, count: int) -> None:
        await publish_many(self.connection, [Outgoing(f"{self.name}.k{n % 3}", b"x") for n in range(count)])

    async def purge(self, before: int) -> None:
        await streams.purge(self.connection, self.name, before_sequence=before)

    async def delete(self) -> None:
        await streams.delete(self.connection, self.name)

    def options(self, **options: str | int) -> dict[str, str]:
        return {"url": self.url, "stream": self.name} | {key: str(value) for key, value in options.items()}

    def query(self, **options: str | int) -> Query:
        return Query(read_options(self.options(**options), "streaming"))

    async def sequences(self, **options: str | int) -> list[int]:
        """A batch read, whole."""

        def read() -> list[int]:
            batch = read_options(self.options(**options), "batch")
            return [
                sequence
                for split in plan_batch(batch)
                for found in read_watched(split, fatal=batch.fail_on_data_loss)
                for sequence in found.column("sequence").to_pylist()
            ]

        return sorted(await asyncio.to_thread(read))


@pytest.fixture
def links(nats_server: NatsServer) -> Iterator[None]:
    yield
    shared_connection(Address(url=nats_server.url)).close()


@pytest.fixture
async def rig(connection: Connection, nats_server: NatsServer, unique: Unique, links: None) -> AsyncIterator[Rig]:
    made = Rig(connection, nats_server.url, unique("S"))
    yield made
    try:
        await made.delete()
    except NotFound:
        return


def step(one: Query, start: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[int]]:
    """What Spark does for a batch: the offsets, the splits, their rows."""
    one.begin()
    begin = start or one.initial().to_wire()
    end = one.latest(begin, limited=True).to_wire()
    if start is None:
        begin = one.initial().to_wire()
    return end, rows(one, begin, end)


def rows(one: Query, begin: dict[str, Any], end: dict[str, Any]) -> list[int]:
    return sorted(
        sequence
        for split in one.splits(begin, end)
        for found in read_watched(split, fatal=one.options.fail_on_data_loss)
        for sequence in found.column("sequence").to_pylist()
    )


def read_all(split: Split, *, fatal: bool) -> int:
    return sum(found.num_rows for found in read_watched(split, fatal=fatal))


async def test_batches_follow_each_other(rig: Rig) -> None:
    await rig.make()
    await rig.publish(25)
    one = rig.query(maxOffsetsPerTrigger=10)
    end, found = await asyncio.to_thread(step, one)
    assert list(end) == ["stream", "created", "sequence"]
    read = [found]
    while found:
        end, found = await asyncio.to_thread(step, one, end)
        read.append(found)
    assert read == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26)), []]


@pytest.mark.parametrize("down", [False, True], ids=["running", "down"])
@pytest.mark.parametrize("how", ["purged", "trimmed"])
async def test_a_stream_that_lost_its_beginning(
    rig: Rig, how: str, down: bool, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.make(max_msgs=10)
    await rig.publish(10)
    strict, lenient = rig.query(), rig.query(failOnDataLoss="false")
    end, found = await asyncio.to_thread(step, strict)
    assert len(found) == 10
    await rig.publish(9)
    if how == "purged":
        await rig.purge(15)
    else:
        await rig.publish(5)
    if down:
        strict, lenient = rig.query(), rig.query(failOnDataLoss="false")
    lost = r"was trimmed or purged and begins at 15 now; sequences 11 to 14, at most 4 messages, are gone.*failOnData"
    with pytest.raises(DataLost, match=lost):
        await asyncio.to_thread(step, strict, end)
    last = 19 if how == "purged" else 24
    assert (await asyncio.to_thread(step, lenient, end))[1] == list(range(15, last + 1))
    assert caplog.text.count("sequences 11 to 14, at most 4 messages, are gone") == 1
    assert "4 lost so far" in caplog.text


@pytest.mark.parametrize("down", [False, True], ids=["running", "down"])
async def test_a_stream_that_was_made_anew(rig: Rig, down: bool) -> None:
    await rig.make()
    await rig.publish(10)
    strict, lenient = rig.query(), rig.query(failOnDataLoss="false")
    end, _ = await asyncio.to_thread(step, strict)
    await asyncio.to_thread(step, lenient)
    await rig.delete()
    await rig.make()
    await rig.publish(12)
    if down:
        strict, lenient = rig.query(), rig.query(failOnDataLoss="false")
    with pytest.raises(DataLost, match=r"was deleted and recreated.*what came after sequence 10 in it is gone"):
        await asyncio.to_thread(step, strict, end)
    after, found = await asyncio.to_thread(step, lenient, end)
    assert found == list(range(1, 13))
    assert (await asyncio.to_thread(step, lenient, after))[1] == []


async def test_what_leaves_a_queue_is_no_loss(rig: Rig) -> None:
    """Others handle its messages while Spark looks on; that is what a queue is for."""
    await rig.make(retention="workqueue")
    await rig.publish(10)
    one = rig.query(maxOffsetsPerTrigger=4)
    end, found = await asyncio.to_thread(step, one)
    assert found == [1, 2, 3, 4]
    await rig.purge(8)
    assert (await asyncio.to_thread(step, one, end))[1] == [8, 9, 10]
    assert await rig.sequences(startingOffsets=2) == [8, 9, 10]


async def test_a_stream_made_anew_that_is_still_empty(rig: Rig) -> None:
    await rig.make()
    await rig.publish(10)
    lenient = rig.query(failOnDataLoss="false")
    end, _ = await asyncio.to_thread(step, lenient)
    await rig.delete()
    await rig.make()
    after, found = await asyncio.to_thread(step, lenient, end)
    assert (after["sequence"], found) == (0, [])
    await rig.publish(3)
    assert (await asyncio.to_thread(step, lenient, after))[1] == [1, 2, 3]


async def test_a_planned_batch_that_is_gone(rig: Rig) -> None:
    """Spark has the batch in its log; the driver comes back after a purge, or on another stream."""
    await rig.make()
    await rig.publish(20)
    one = rig.query()
    begin = (await asyncio.to_thread(one.initial)).to_wire()
    end = (await asyncio.to_thread(one.latest, begin, limited=True)).to_wire()
    middle = {**end, "sequence": 5}
    await rig.purge(11)
    with pytest.raises(DataLost, match="sequences 6 to 10, at most 5"):
        await asyncio.to_thread(rig.query().splits, middle, end)
    lenient = rig.query(failOnDataLoss="false")
    assert await asyncio.to_thread(rows, lenient, middle, end) == list(range(11, 21))
    await rig.delete()
    await rig.make()
    await rig.publish(30)
    with pytest.raises(DataLost, match=r"recreated.*sequences 6 to 20, at most 15"):
        await asyncio.to_thread(rig.query().splits, middle, end)
    assert await asyncio.to_thread(rows, rig.query(failOnDataLoss="false"), middle, end) == []


@pytest.fixture
async def elastic(rig: Rig) -> AsyncIterator[Rig]:
    """README's stream and group: the group knows the key, the stream does not."""
    await rig.make()
    await groups.create_elastic(rig.connection, rig.name, "g", partitions=10, partition_by=f"{rig.name}.*")
    yield rig
    await groups.delete(rig.connection, rig.name, "g")


async def filled(rig: Rig, count: int, *, upto: int) -> None:
    """Messages in the stream, and copied to the queue of the group, whose last sequence is `upto` then."""
    await rig.publish(count)
    queue = groups.queue_stream(rig.name, "g")
    await until(lambda: streams.state(rig.connection, queue), lambda seen: seen.last_sequence >= upto, deadline_s=20)


def keys_of(one: Query) -> list[tuple[str, int]]:
    one.begin()
    start = one.initial().to_wire()
    return sorted(
        (row["key"], row["partition"])
        for split in one.splits(start, one.latest(start, limited=True).to_wire())
        for found in read_watched(split, fatal=True)
        for row in found.to_pylist()
    )


async def test_a_stream_is_read_with_the_keys_of_its_elastic_group(
    elastic: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await elastic.publish(9)
    keys = Partitioning(f"{elastic.name}.*", (1,), 10)
    expected = [(key, keys.partition(f"{elastic.name}.{key}")) for key in ("k0", "k1", "k2") for _ in range(3)]
    assert await asyncio.to_thread(keys_of, elastic.query(group="g")) == expected
    assert "does not say what the key" not in caplog.text


async def test_an_unknown_key_is_told_once_with_what_to_do(elastic: Rig, caplog: pytest.LogCaptureFixture) -> None:
    await elastic.publish(3)
    for _ in range(2):
        assert await elastic.sequences() == [1, 2, 3]
        await asyncio.to_thread(elastic.query().begin)
    [told] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told.startswith(f"stream '{elastic.name}' does not say what the key of a message is")
    assert f"option 'group' for the keys of one of its groups (`keylane elastic ls {elastic.name}`" in told
    assert await elastic.sequences(keyFilter=">", keyPartitions=1) == [1, 2, 3]


async def test_a_checkpoint_of_the_queue_never_becomes_one_of_the_stream(elastic: Rig) -> None:
    """Option `group` alone read the queue once: its sequences are other messages in the stream."""
    await filled(elastic, 6, upto=6)
    end, found = await asyncio.to_thread(step, elastic.query(group="g", queue="true"))
    assert (end["stream"], found) == (f"{elastic.name}-g", [1, 2, 3, 4, 5, 6])
    refused = rf"checkpoint is of '{elastic.name}-g', the queue of the group.*Give queue=true to go on with the queue"
    one = elastic.query(group="g")
    for call in (lambda: one.latest(end, limited=True), lambda: one.splits(end, end), lambda: one.commit(end)):
        with pytest.raises(InvalidInput, match=refused):
            await asyncio.to_thread(call)
    await filled(elastic, 3, upto=9)
    assert (await asyncio.to_thread(step, elastic.query(group="g", queue="true"), end))[1] == [7, 8, 9]


async def test_a_latest_start_in_the_queue_is_never_replaced_by_one_in_the_stream(elastic: Rig, unique: Unique) -> None:
    await filled(elastic, 6, upto=6)
    name = unique("q")
    latest = {"group": "g", "queryName": name, "startingOffsets": "latest"}
    one = elastic.query(**latest, queue="true")
    assert (await asyncio.to_thread(one.initial)).sequence == 6
    await asyncio.to_thread(one.end)
    other = elastic.query(**latest)
    with pytest.raises(InvalidInput, match=r"and now reads stream.*Give queue=true"):
        await asyncio.to_thread(other.initial)
    await asyncio.to_thread(other.end)


async def test_a_static_group_has_no_queue(rig: Rig) -> None:
    dest = f"{{{{Partition(2,1)}}}}.{rig.name}.{{{{Wildcard(1)}}}}"
    await rig.make(subject_transform={"src": f"{rig.name}.*", "dest": dest})
    await groups.create_static(rig.connection, rig.name, "g", partitions=2, members=["a"])
    try:
        with pytest.raises(InvalidInput, match=r"group 'g' of stream .* is static and has no queue"):
            await asyncio.to_thread(rig.query(group="g", queue="true").begin)
    finally:
        await groups.delete(rig.connection, rig.name, "g")


async def test_a_deleted_stream_and_group(rig: Rig) -> None:
    await rig.make()
    one = rig.query()
    end, _ = await asyncio.to_thread(step, one)
    with pytest.raises(NoSuchGroup, match="has no group 'nobody'"):
        await asyncio.to_thread(rig.query(group="nobody").begin)
    await rig.delete()
    with pytest.raises(NotFound, match=rf"there is no stream '{rig.name}'; there is: "):
        await asyncio.to_thread(step, one, end)
    with pytest.raises(NotFound, match="there is no stream"):
        await asyncio.to_thread(rig.query().begin)


async def test_batch_reads_that_lost_something(rig: Rig) -> None:
    await rig.make()
    await rig.publish(20)
    await rig.purge(11)
    assert await rig.sequences() == list(range(11, 21))
    with pytest.raises(DataLost, match="sequences 3 to 10, at most 8"):
        await rig.sequences(startingOffsets=3)
    assert await rig.sequences(startingOffsets=3, failOnDataLoss="false") == list(range(11, 21))
    with pytest.raises(DataLost, match="sequences 3 to 5, at most 3"):
        await rig.sequences(startingOffsets=3, endingOffsets=5)
    assert await rig.sequences(startingOffsets=3, endingOffsets=5, failOnDataLoss="false") == []
    assert await rig.sequences(startingTimestamp=0) == list(range(11, 21))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"startingOffsets": 22}, r"'startingOffsets' is 22: stream .* holds 1 to 20; give at most 21"),
        ({"endingOffsets": 21}, r"'endingOffsets' is 21: the newest message of stream .* is 20"),
        ({"startingTimestamp": "2100-01-01T00:00:00Z"}, r"'startingTimestamp' is .*which is in the future"),
        ({"startingOffsets": 5, "endingTimestamp": 0}, r"would start at sequence 5 and end at 0"),
    ],
)
async def test_places_that_are_not_there(rig: Rig, options: dict[str, str | int], told: str) -> None:
    await rig.make()
    await rig.publish(20)
    with pytest.raises(InvalidInput, match=told):
        await rig.sequences(**options)


@pytest.mark.parametrize("how", ["purged", "recreated"])
async def test_what_goes_while_a_split_is_read(rig: Rig, how: str, caplog: pytest.LogCaptureFixture) -> None:
    await rig.make()
    await rig.publish(20)
    for options, lenient in (({"startingOffsets": 1}, False), ({"startingOffsets": 1}, True), ({}, how == "purged")):
        batch = read_options(rig.options(**options), "batch")
        [split] = await asyncio.to_thread(plan_batch, batch)
        if how == "purged":
            await rig.purge(split.upto - 4)
        else:
            await rig.delete()
            await rig.make()
            await rig.publish(split.upto)
        if lenient:
            found = await asyncio.to_thread(read_all, split, fatal=not options)
            assert found == (5 if how == "purged" else split.upto)
        else:
            with pytest.raises(DataLost, match="while it was read"):
                await asyncio.to_thread(read_all, split, fatal=True)
        await rig.delete()
        await rig.make()
        await rig.publish(20)
    assert "while it was read" in caplog.text


async def test_an_idle_query_asks_at_its_own_pace_and_a_busy_one_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.make()
    await rig.publish(5)
    monkeypatch.setattr(query, "IDLE_S", 40)  # one such wait and the busy part takes too long
    one = rig.query(maxOffsetsPerTrigger=1)
    end, _ = await asyncio.to_thread(step, one)
    started = time.monotonic()
    for _ in range(4):
        end, found = await asyncio.to_thread(step, one, end)
        assert found
    assert time.monotonic() - started < 40
    monkeypatch.setattr(query, "IDLE_S", 0.3)
    started = time.monotonic()
    for _ in range(5):
        assert (await asyncio.to_thread(one.latest, end, limited=True)).to_wire() == end
    assert time.monotonic() - started >= 4 * 0.3


async def test_a_query_with_a_filter_does_not_follow_others_but_not_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.make()
    await rig.publish(3)
    monkeypatch.setattr(query, "IDLE_S", 0.01)
    monkeypatch.setattr(query, "QUIET_S", 0.5)
    one = rig.query(filter=f"{rig.name}.k0")
    end, found = await asyncio.to_thread(step, one)
    assert (end["sequence"], found) == (3, [1])
    await publish_many(rig.connection, [Outgoing(f"{rig.name}.other", b"x")] * 5)
    assert (await asyncio.to_thread(one.latest, end, limited=True)).sequence == 3
    deadline = time.monotonic() + 30
    while (after := (await asyncio.to_thread(one.latest, end, limited=True)).to_wire()) == end:
        assert time.monotonic() < deadline
    assert after["sequence"] == 8
    assert await asyncio.to_thread(rows, one, end, after) == []


async def test_a_leader_that_has_not_everything_yet_gets_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.make()
    await rig.publish(10)
    one = rig.query()
    end, _ = await asyncio.to_thread(step, one)
    await rig.publish(5)
    real = stream_state.state_of
    behind = [True, True]

    def at_first_behind(address: Address, stream: str) -> StreamSnapshot:
        found = real(address, stream)
        return replace(found, last=7) if behind and behind.pop() else found

    monkeypatch.setattr(source_stream, "state_of", at_first_behind)
    assert (await asyncio.to_thread(step, one, end))[1] == [11, 12, 13, 14, 15]
    assert not behind
    monkeypatch.setattr(source_stream, "state_of", lambda address, stream: replace(real(address, stream), last=7))
    monkeypatch.setattr(source_stream, "LEADER_PATIENCE_S", 0.3)
    with pytest.raises(DataLost, match=r"ends at 7, and 10 was read before.*what came after sequence 7 in it is gone"):
        await asyncio.to_thread(step, one, end)


async def test_the_newest_messages_are_asked_for_again_if_the_leader_changed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.make()
    await rig.publish(10)
    source = SourceStream(read_options(rig.options(), "batch"))
    before = replace(await asyncio.to_thread(source.state), leader="a")
    real, asked = stream_state.state_of, []

    def from_b(address: Address, stream: str) -> StreamSnapshot:
        asked.append(stream)
        return replace(real(address, stream), leader="b")

    monkeypatch.setattr(source_stream, "state_of", from_b)
    assert await asyncio.to_thread(source.newest, before) == {None: 10}
    assert len(asked) == 2


async def test_a_checkpoint_of_another_stream(rig: Rig) -> None:
    await rig.make()
    one = rig.query()
    with pytest.raises(InvalidInput, match="checkpoint is of stream 'OLD'"):
        await asyncio.to_thread(one.latest, {"stream": "OLD", "created": "x", "sequence": 1}, limited=True)


async def test_a_lost_lease_ends_the_query(rig: Rig, unique: Unique) -> None:
    name = unique("q")
    await rig.make()
    await rig.publish(5)
    one = rig.query(queryName=name, leaseSeconds=9)
    end, _ = await asyncio.to_thread(step, one)
    bucket = bucket_of(rig.connection)
    entry = await bucket.get(lease_key(name))
    assert entry is not None
    thief = LeaseRecord("another driver", "another token", 9)
    await bucket.put(lease_key(name), thief.to_json(), revision=entry.revision)

    def ask_on() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            one.latest(end, limited=True)

    with pytest.raises(QueryFenced, match=f"lease of query '{name}': another driver took it"):
        await asyncio.to_thread(ask_on)
    with pytest.raises(QueryFenced):
        await asyncio.to_thread(one.commit, end)
    with pytest.raises(QueryFenced):
        await asyncio.to_thread(one.splits, end, end)


async def test_a_wrong_address_is_told_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_DEADLINE_S", 1.0)
    options = read_options({"url": "nats://127.0.0.1:1", "stream": "S"}, "streaming")
    started = time.monotonic()
    with pytest.raises(ServerUnreachable, match=r"gave up after \d+ s trying to look at stream 'S': .*127\.0\.0\.1:1"):
        await asyncio.to_thread(Query(options).begin)
    assert time.monotonic() - started < 30


async def test_a_refused_login_is_told_at_once() -> None:
    with NatsServer.start(extra_config='authorization { user: "u", password: "hunter2" }') as server:
        options = read_options({"url": server.url, "stream": "S"}, "streaming")
        with pytest.raises(AuthenticationFailed):
            await asyncio.to_thread(Query(options).begin)


async def test_what_a_user_must_be_allowed_is_in_the_guide(unique: Unique, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (REPOSITORY / "docs" / "spark.md").read_text().split("## What a user of the server must be allowed")[1]
    allowed = sorted(set(re.findall(r"`(\$[^`]+)`", guide)))
    users = f"""authorization {{ users: [
        {{ user: admin, password: admin }}
        {{ user: reader, password: reader, permissions: {{ publish: {json.dumps(allowed)}, subscribe: "_INBOX.>" }} }}
    ] }}"""
    with NatsServer.start(extra_config=users) as server:
        async with await keylane.connect(server.url, user="admin", password="admin") as connection:  # noqa: S106 - made up
            plain = Rig(connection, server.url, unique("S"))
            queue = Rig(connection, server.url, unique("S"))
            await plain.make(
                subject_transform={
                    "src": f"{plain.name}.*",
                    "dest": f"{{{{Partition(2,1)}}}}.{plain.name}.{{{{Wildcard(1)}}}}",
                }
            )
            await queue.make(retention="workqueue")
            await plain.publish(10)
            await queue.publish(10)
            await groups.create_static(connection, plain.name, "g", partitions=2, members=["a"])
            await groups.create_elastic(connection, plain.name, "e", partitions=2)
            copied = groups.queue_stream(plain.name, "e")
            await until(lambda: streams.state(connection, copied), lambda state: state.messages == 10)
            monkeypatch.setenv("NATS_USER", "reader")
            monkeypatch.setenv("NATS_PASSWORD", "reader")
            try:
                assert len(await plain.sequences()) == 10
                assert len(await plain.sequences(group="g")) == 10
                assert len(await queue.sequences()) == 10
                assert len(await plain.sequences(group="e")) == 10
                assert len(await plain.sequences(group="e", queue="true")) == 10
                for one in (
                    plain.query(queryName=unique("q")),
                    plain.query(queryName=unique("q"), startingOffsets="latest"),
                ):
                    end, _ = await asyncio.to_thread(step, one)
                    await asyncio.to_thread(one.latest, end | {"sequence": 9}, limited=True)
                    await asyncio.to_thread(one.end)
                    cursor = await connection.api.request(f"CONSUMER.INFO.{plain.name}.spark-{one.options.query_name}")
                    assert cursor["num_pending"] == 1
            finally:
                shared_connection(Address(url=server.url)).close()


async def test_a_server_that_comes_back_is_waited_for(tmp_path: Path, unique: Unique) -> None:
    with NatsServer.start(store_dir=tmp_path / "store") as server:
        async with await keylane.connect(server.url) as connection:
            rig = Rig(connection, server.url, unique("S"))
            await rig.make(storage="file")
            await rig.publish(5)
            one = rig.query()
            end, _ = await asyncio.to_thread(step, one)
            await rig.publish(5)
        server.kill()
        back = threading.Timer(1.5, server.restart)
        back.start()
        try:
            assert (await asyncio.to_thread(step, one, end))[1] == [6, 7, 8, 9, 10]
        finally:
            back.join()
            shared_connection(Address(url=server.url)).close()


async def test_a_server_that_stays_away_is_told_after_a_while(
    tmp_path: Path, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "DEADLINE_S", 2.0)
    with NatsServer.start() as server:
        async with await keylane.connect(server.url) as connection:
            rig = Rig(connection, server.url, unique("S"))
            await rig.make()
            await rig.publish(5)
            one = rig.query()
            end, _ = await asyncio.to_thread(step, one)
        server.kill()
        with pytest.raises(
            keylane.errors.KeylaneError, match=rf"gave up after \d+ s trying to look at stream '{rig.name}'"
        ):
            await asyncio.to_thread(step, one, end)
        shared_connection(Address(url=server.url)).close()
