"""Progress told to the stream: purges of a queue, interest given up, lag shown; and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

import keylane
from keylane import Connection, groups
from keylane.errors import (
    AcknowledgeRefused,
    ApiError,
    InvalidInput,
    NotFound,
    QueryFenced,
    RequestTimeout,
    ServerTooOld,
)
from keylane.jetstream import (
    ConsumerConfig,
    Outgoing,
    RetentionPolicy,
    StreamConfig,
    consumers,
    features,
    publish_many,
    streams,
)
from keylane.server import NatsCluster
from keylane.spark.driver import acknowledgement
from keylane.spark.driver.acknowledgement import Acknowledgement
from keylane.spark.driver.lease import Lease
from keylane.spark.query_records import bucket_of, claim_key, lease_key
from tests.waiter import until

Unique = Callable[..., str]
PARTITIONS = 3


@dataclass
class Rig:
    """A stream with three partitions, and queries on it."""

    connection: Connection
    stream: str
    leases: list[Lease] = field(default_factory=list)
    begun: list[Acknowledgement] = field(default_factory=list)

    async def publish(self, count: int) -> None:
        """Sequence n goes to partition (n - 1) modulo three, on an empty stream."""
        sent = await publish_many(
            self.connection, [Outgoing(f"{number % PARTITIONS}.{self.stream}.{number}") for number in range(count)]
        )
        assert all(not isinstance(one, Exception) for one in sent)

    async def lease(self, query: str, lease_s: float = 60.0) -> Lease:
        lease = Lease(self.connection, query, f"the driver of {query}", lease_s)
        await asyncio.wait_for(lease.take(), 30)
        self.leases.append(lease)
        return lease

    async def begin(
        self,
        query: str | Lease,
        filters: Sequence[str | None] = (None,),
        *,
        whole: bool = False,
        acknowledge: bool = True,
        from_earliest: bool = True,
    ) -> Acknowledgement:
        lease = query if isinstance(query, Lease) else await self.lease(query)
        begun = await Acknowledgement.prepare(
            self.connection,
            stream=self.stream,
            filters=filters,
            whole=whole or None in filters,
            from_earliest=from_earliest,
            lease=lease,
            acknowledge=acknowledge,
        )
        self.begun.append(begun)
        return begun

    async def created(self) -> str:
        return str((await self.connection.api.request(f"STREAM.INFO.{self.stream}"))["created"])

    async def left(self) -> list[int]:
        """The sequences that the stream still has."""
        found: list[int] = []
        state = await streams.state(self.connection, self.stream)
        for sequence in range(max(1, state.first_sequence), state.last_sequence + 1):
            try:
                await self.connection.api.request(f"STREAM.MSG.GET.{self.stream}", {"seq": sequence})
                found.append(sequence)
            except NotFound:
                pass
        return found

    async def lag(self, query: str) -> int:
        return (await consumers.info(self.connection, self.stream, f"spark-{query}")).num_pending

    async def lag_becomes(self, query: str, lag: int) -> None:
        async def look() -> int | None:
            try:
                return await self.lag(query)
            except NotFound:  # where there is no reset, the cursor is deleted and made again
                return None

        await until(look, lambda seen: seen == lag)


@asynccontextmanager
async def rig_on(connection: Connection, stream: str, retention: str, **settings: Any) -> AsyncIterator[Rig]:
    await streams.create(
        connection,
        StreamConfig(
            name=stream,
            subjects=[f"{number}.{stream}.>" for number in range(PARTITIONS)],
            retention=RetentionPolicy(retention),
            **settings,
        ),
    )
    rig = Rig(connection, stream)
    try:
        yield rig
    finally:
        for begun in rig.begun:
            await begun.finish()
        for lease in rig.leases:
            await lease.release()
        await streams.delete(connection, stream)


@pytest.fixture
async def queue(connection: Connection, unique: Unique) -> AsyncIterator[Rig]:
    async with rig_on(connection, unique("queue"), "workqueue") as rig:
        yield rig


@pytest.fixture
async def limits(connection: Connection, unique: Unique) -> AsyncIterator[Rig]:
    async with rig_on(connection, unique("limits"), "limits") as rig:
        yield rig


@pytest.fixture
async def interest(connection: Connection, unique: Unique) -> AsyncIterator[Rig]:
    async with rig_on(connection, unique("interest"), "interest") as rig:
        yield rig


# ---- work queue -------------------------------------------------------------------------------------------


async def test_a_queue_loses_exactly_what_was_committed(queue: Rig, unique: Unique) -> None:
    await queue.publish(30)
    query = await queue.begin(unique("query"))
    assert await queue.left() == list(range(1, 31))
    await query.mirror(10, await queue.created())
    assert await queue.left() == list(range(11, 31))
    await query.mirror(30, await queue.created())
    assert await queue.left() == []
    await queue.publish(3)
    await query.mirror(31, await queue.created())
    assert await queue.left() == [32, 33]


async def test_filters_leave_other_partitions_alone(queue: Rig, unique: Unique) -> None:
    await queue.publish(30)
    query = await queue.begin(unique("query"), ["0.>", "2.>"])
    await query.mirror(15, await queue.created())
    others = [sequence for sequence in range(1, 31) if (sequence - 1) % 3 == 1]
    assert await queue.left() == sorted({*others, *range(16, 31)})
    await query.mirror(30, await queue.created())
    assert await queue.left() == others


async def test_without_acknowledge_a_queue_is_left_alone(queue: Rig, unique: Unique) -> None:
    await queue.publish(6)
    query = await queue.begin(unique("query"), acknowledge=False)
    await query.mirror(6, await queue.created())
    assert len(await queue.left()) == 6
    assert await consumers.names(queue.connection, queue.stream) == []


async def test_nothing_is_asked_where_nothing_changed(
    queue: Rig, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.publish(6)
    query, created = await queue.begin(unique("query")), await queue.created()
    await query.mirror(3, created)

    async def no_request(*_: Any, **__: Any) -> dict[str, Any]:
        raise AssertionError("the server was asked")

    monkeypatch.setattr(queue.connection.api, "request", no_request)
    for _ in range(3):
        await query.mirror(3, created)


async def test_the_past_of_a_stream_made_anew_is_not_purged(queue: Rig, unique: Unique) -> None:
    await queue.publish(6)
    query, old = await queue.begin(unique("query")), await queue.created()
    config = (await streams.info(queue.connection, queue.stream)).config
    await streams.delete(queue.connection, queue.stream)
    await streams.create(queue.connection, config)
    await queue.publish(6)
    await query.mirror(5, old)
    assert len(await queue.left()) == 6


async def test_a_queue_shorter_than_the_offset_is_left_alone(queue: Rig, unique: Unique) -> None:
    """As after an older copy of it was restored: the sequences would be those of other messages."""
    await queue.publish(6)
    query = await queue.begin(unique("query"))
    await query.mirror(40, await queue.created())
    assert len(await queue.left()) == 6
    assert (await streams.state(queue.connection, queue.stream)).last_sequence == 6


async def test_a_query_that_skips_the_oldest_messages_may_not_acknowledge(queue: Rig, unique: Unique) -> None:
    with pytest.raises(InvalidInput, match=r"older would be deleted from queue .* Give startingOffsets=earliest"):
        await queue.begin(unique("query"), from_earliest=False)


async def test_a_queue_that_cannot_be_purged_says_so_at_the_start(connection: Connection, unique: Unique) -> None:
    async with rig_on(connection, unique("queue"), "workqueue", deny_purge=True) as rig:
        await rig.publish(3)
        with pytest.raises(ApiError, match="purge not permitted"):
            await rig.begin(unique("query"))


async def test_trouble_is_tried_again_and_does_not_end_the_query(
    queue: Rig, unique: Unique, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await queue.publish(9)
    query, created = await queue.begin(unique("query")), await queue.created()
    request = queue.connection.api.request

    async def no_answer(*_: Any, **__: Any) -> dict[str, Any]:
        raise RequestTimeout("no answer on STREAM.INFO")

    monkeypatch.setattr(queue.connection.api, "request", no_answer)
    for sequence in (3, 3, 6):
        await query.mirror(sequence, created)
    assert caplog.text.count("its progress could not be reported to the stream: no answer on STREAM.INFO") == 1
    monkeypatch.setattr(queue.connection.api, "request", request)
    async with asyncio.timeout(10):
        while len(await queue.left()) > 3:
            await query.mirror(6, created)
            await asyncio.sleep(0.05)


async def test_the_end_of_a_query_tells_what_trouble_kept_back(
    queue: Rig, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.publish(6)
    query, created = await queue.begin(unique("query")), await queue.created()
    request = queue.connection.api.request

    async def no_answer(*_: Any, **__: Any) -> dict[str, Any]:
        raise RequestTimeout("no answer")

    monkeypatch.setattr(queue.connection.api, "request", no_answer)
    await query.mirror(6, created)
    monkeypatch.setattr(queue.connection.api, "request", request)
    await query.finish()
    assert await queue.left() == []


# ---- a queue that others read -------------------------------------------------------------------------------


@asynccontextmanager
async def elastic_group(connection: Connection, source: str, members: Sequence[str]) -> AsyncIterator[Rig]:
    await streams.create(connection, StreamConfig(name=source, subjects=[f"{source}.*"]))
    await groups.create_elastic(connection, source, "g", partitions=3, partition_by=f"{source}.*", members=members)
    rig = Rig(connection, groups.queue_stream(source, "g"))
    try:
        yield rig
    finally:
        for lease in rig.leases:
            await lease.release()
        await groups.delete(connection, source, "g")
        await streams.delete(connection, source)


async def fill(rig: Rig, source: str, count: int) -> None:
    """Publish below a group and wait until its queue has copied everything."""
    await publish_many(rig.connection, [Outgoing(f"{source}.{number}") for number in range(count)])
    await until(
        lambda: streams.state(rig.connection, rig.stream), lambda seen: seen.last_sequence >= count, deadline_s=20
    )


async def test_a_group_with_members_is_refused_also_when_none_of_them_runs(
    connection: Connection, unique: Unique
) -> None:
    source = unique("orders")
    async with elastic_group(connection, source, ["alice", "bob"]) as queue:
        await fill(queue, source, 9)
        with pytest.raises(AcknowledgeRefused, match=r"group 'g' .* has the members alice, bob\. Nothing is purged"):
            await queue.begin(unique("query"))
        assert len(await queue.left()) == 9


async def test_a_member_that_is_added_ends_the_acknowledging_and_nothing_more_is_purged(
    connection: Connection, unique: Unique
) -> None:
    source = unique("orders")
    async with elastic_group(connection, source, []) as queue:
        await fill(queue, source, 9)
        query, created = await queue.begin(unique("query")), await queue.created()
        await query.mirror(4, created)
        assert await queue.left() == [5, 6, 7, 8, 9]
        await groups.add_members(connection, source, "g", ["alice"])
        for _ in range(2):
            with pytest.raises(AcknowledgeRefused, match="has the members alice"):
                await query.mirror(7, created)
        await query.finish()
        assert await queue.left() == [5, 6, 7, 8, 9]


async def test_a_consumer_of_the_same_messages_is_refused_and_one_of_others_is_not(queue: Rig, unique: Unique) -> None:
    await queue.publish(9)
    await consumers.create(
        queue.connection, queue.stream, ConsumerConfig(durable_name="theirs", filter_subjects=("1.>",))
    )
    lease = await queue.lease(unique("query"))
    for filters in ([None], ["0.>", "1.>"], ["*.*.7"]):
        with pytest.raises(AcknowledgeRefused, match=r"consumer 'theirs' has not handled\. Nothing is purged"):
            await queue.begin(lease, filters)
    query = await queue.begin(lease, ["0.>", "2.>"])
    await query.mirror(9, await queue.created())
    assert await queue.left() == [2, 5, 8]


async def test_a_consumer_that_appears_ends_the_acknowledging(queue: Rig, unique: Unique) -> None:
    await queue.publish(9)
    query, created = await queue.begin(unique("query")), await queue.created()
    await query.mirror(3, created)
    await consumers.create(queue.connection, queue.stream, ConsumerConfig(durable_name="theirs"))
    with pytest.raises(AcknowledgeRefused, match="consumer 'theirs'"):
        await query.mirror(6, created)
    await consumers.delete(queue.connection, queue.stream, "theirs")
    with pytest.raises(AcknowledgeRefused, match="consumer 'theirs'"):
        await query.mirror(6, created)  # what it took meanwhile is not known
    assert await queue.left() == list(range(4, 10))


# ---- several queries on one queue -----------------------------------------------------------------------------


async def test_a_second_query_with_overlapping_filters_is_refused_by_name(queue: Rig, unique: Unique) -> None:
    first, second = unique("first"), unique("second")
    await queue.publish(9)
    await queue.begin(await queue.lease(first, 6.0), ["0.>", "1.>"])
    lease = await queue.lease(second)
    with pytest.raises(AcknowledgeRefused, match=rf"query '{first}' \(the driver of {first}\) acknowledges '0.>', '1"):
        await asyncio.wait_for(queue.begin(lease, ["1.>", "2.>"]), 20)
    await queue.begin(lease, ["2.>"])
    assert len(await queue.left()) == 9


async def test_the_claim_of_a_query_that_was_stopped_is_taken_at_once(queue: Rig, unique: Unique) -> None:
    first = await queue.lease(unique("first"))
    await queue.begin(first)
    await first.release()
    second = await queue.lease(unique("second"))
    await asyncio.wait_for(queue.begin(second), 10)
    # And the first, started again, meets the second.
    again = await queue.lease(first.name)
    with pytest.raises(AcknowledgeRefused, match=f"query '{second.name}'"):
        await asyncio.wait_for(_refused_by_renewal(queue, again, second), 30)


async def _refused_by_renewal(queue: Rig, asking: Lease, living: Lease) -> None:
    """Lets the living lease be written once more, instead of waiting for the third of a minute that it takes."""
    began = asyncio.create_task(queue.begin(asking))
    bucket = bucket_of(queue.connection)
    while not began.done():
        await asyncio.sleep(0.1)
        entry = await bucket.get(lease_key(living.name))
        assert entry is not None
        assert entry.value is not None
        await bucket.put(lease_key(living.name), entry.value, revision=entry.revision)
    await began


async def test_the_claim_of_a_query_that_died_is_taken_after_its_lease(
    queue: Rig, unique: Unique, nats_server: keylane.server.NatsServer
) -> None:
    dead = await keylane.connect(nats_server.url)
    first = Lease(dead, unique("first"), "a driver that dies", 1.0)
    await first.take()
    await acknowledgement.claim(queue.connection, queue.stream, await queue.created(), (), first)
    await dead.close()
    await queue.publish(3)
    second = await asyncio.wait_for(queue.begin(unique("second")), 20)
    await second.mirror(3, await queue.created())
    assert await queue.left() == []
    with pytest.raises(QueryFenced):
        first.check()


async def test_a_rival_that_claims_at_the_same_time_is_seen(queue: Rig, unique: Unique) -> None:
    """Many at once: exactly one may have the queue."""
    leases = [await queue.lease(unique("query"), 6.0) for _ in range(4)]
    results = await asyncio.wait_for(asyncio.gather(*(queue.begin(one) for one in leases), return_exceptions=True), 40)
    assert sum(isinstance(one, Acknowledgement) for one in results) == 1
    assert sum(isinstance(one, AcknowledgeRefused) for one in results) == 3


async def test_a_query_that_comes_back_while_a_rival_takes_its_claim_keeps_it(
    queue: Rig, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await queue.lease(unique("first"), 6.0)
    await queue.begin(first)
    await first.release()
    look = acknowledgement.living_holder

    async def comes_back_after_the_look(connection: Connection, query: str, lease: Lease) -> str | None:
        found = await look(connection, query, lease)
        if found is None:
            again = await queue.lease(query, 6.0)
            await acknowledgement.claim(connection, queue.stream, await queue.created(), (), again)
        return found

    monkeypatch.setattr(acknowledgement, "living_holder", comes_back_after_the_look)
    with pytest.raises(AcknowledgeRefused, match=f"query '{first.name}'"):
        await asyncio.wait_for(queue.begin(unique("second")), 20)


async def test_a_query_that_would_acknowledge_more_than_it_read_is_refused(queue: Rig, unique: Unique) -> None:
    lease = await queue.lease(unique("query"))
    await queue.begin(lease, ["0.>", "1.>"])
    await queue.begin(lease, ["1.>"])
    for filters in (["1.>", "2.>"], ["0.>"], [None]):
        with pytest.raises(InvalidInput, match=r"acknowledged '1\.>' of stream .* never read would be deleted"):
            await queue.begin(lease, filters)


async def test_a_claim_on_a_stream_that_was_made_anew_is_void(queue: Rig, unique: Unique) -> None:
    await queue.begin(unique("first"), ["0.>"])
    config = (await streams.info(queue.connection, queue.stream)).config
    await streams.delete(queue.connection, queue.stream)
    await streams.create(queue.connection, config)
    await asyncio.wait_for(queue.begin(unique("second")), 10)


async def test_a_claim_record_that_cannot_be_read_is_named(queue: Rig, unique: Unique) -> None:
    lease = await queue.lease(unique("query"))
    await bucket_of(queue.connection).put(claim_key(queue.stream), b"{}", revision=0)
    with pytest.raises(InvalidInput, match=rf"record 'claim\.{queue.stream}' .* is not a list of claims"):
        await queue.begin(lease)


async def test_a_fenced_query_purges_nothing(queue: Rig, unique: Unique) -> None:
    await queue.publish(6)
    lease = await queue.lease(unique("query"))
    query, created = await queue.begin(lease), await queue.created()
    await lease.release()
    with pytest.raises(QueryFenced):
        await query.mirror(3, created)
    assert len(await queue.left()) == 6


async def test_a_lease_lost_while_the_server_answers_stops_the_purge(
    queue: Rig, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.publish(6)
    lease = await queue.lease(unique("query"))
    query, created = await queue.begin(lease), await queue.created()
    request = queue.connection.api.request

    async def lost_meanwhile(subject: str, *arguments: Any, **named: Any) -> dict[str, Any]:
        answer = await request(subject, *arguments, **named)
        if subject.startswith("STREAM.INFO"):
            await lease.release()
        return answer

    monkeypatch.setattr(queue.connection.api, "request", lost_meanwhile)
    with pytest.raises(QueryFenced):
        await query.mirror(3, created)
    monkeypatch.setattr(queue.connection.api, "request", request)
    assert len(await queue.left()) == 6


# ---- interest ------------------------------------------------------------------------------------------------


async def test_interest_is_given_up_as_far_as_the_query_is_and_others_keep_theirs(
    interest: Rig, unique: Unique
) -> None:
    query = await interest.begin(unique("query"))
    await consumers.create(
        interest.connection, interest.stream, ConsumerConfig(durable_name="theirs", filter_subjects=("1.>",))
    )
    await interest.publish(9)
    assert len(await interest.left()) == 9
    await query.mirror(6, await interest.created())
    assert await interest.left() == [2, 5, 7, 8, 9]
    await query.mirror(9, await interest.created())
    assert await interest.left() == [2, 5, 8]


async def test_without_acknowledge_an_interest_stream_gets_no_consumer(interest: Rig, unique: Unique) -> None:
    await interest.begin(unique("query"), acknowledge=False)
    assert await consumers.names(interest.connection, interest.stream) == []


async def test_other_filters_on_an_interest_stream_are_refused(interest: Rig, unique: Unique) -> None:
    lease = await interest.lease(unique("query"))
    await interest.begin(lease, ["0.>"])
    await interest.begin(lease, ["0.>"])
    with pytest.raises(InvalidInput, match=r"kept 0\.> of stream .* now reads 0\.>, 1\.>: what it did not keep is"):
        await interest.begin(lease, ["0.>", "1.>"])


async def test_interest_needs_a_server_with_resets(
    interest: Rig, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(features.SINCE, "consumer_reset", (99, 0, 0))
    with pytest.raises(ServerTooOld, match="consumer reset needs nats-server"):
        await interest.begin(unique("query"))


# ---- limits: the lag ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acknowledge", [False, True])
async def test_the_lag_of_a_query_is_what_is_pending_and_nothing_is_deleted(
    limits: Rig, unique: Unique, acknowledge: bool
) -> None:
    await limits.publish(30)
    name = unique("query")
    query = await limits.begin(name, ["0.>", "1.>"], acknowledge=acknowledge)
    assert await limits.lag(name) == 20
    await query.mirror(15, await limits.created())
    await limits.lag_becomes(name, 10)
    await query.mirror(30, await limits.created())
    await limits.lag_becomes(name, 0)
    await limits.publish(3)
    await limits.lag_becomes(name, 2)
    assert len(await limits.left()) == 33


async def test_a_whole_stream_is_counted_without_filters(limits: Rig, unique: Unique) -> None:
    name = unique("query")
    await limits.begin(name, [f"{number}.>" for number in range(3)], whole=True)
    info = await consumers.info(limits.connection, limits.stream, f"spark-{name}")
    assert not info.config.filter_subjects
    assert not info.config.filter_subject
    assert info.config.ack_policy == "none"


async def test_the_end_of_a_query_shows_its_last_progress(limits: Rig, unique: Unique) -> None:
    await limits.publish(9)
    name = unique("query")
    query, created = await limits.begin(name), await limits.created()
    for sequence in range(1, 8):
        await query.mirror(sequence, created)
    await query.finish()
    assert await limits.lag(name) == 2


async def test_a_lag_cursor_that_was_deleted_comes_back(limits: Rig, unique: Unique) -> None:
    await limits.publish(9)
    name = unique("query")
    query, created = await limits.begin(name), await limits.created()
    await query.mirror(3, created)
    await limits.lag_becomes(name, 6)
    await consumers.delete(limits.connection, limits.stream, f"spark-{name}")
    await query.mirror(6, created)
    async with asyncio.timeout(30):
        while True:
            try:
                if await limits.lag(name) == 3:
                    break
            except NotFound:
                pass
            await asyncio.sleep(0.1)


async def test_other_filters_move_the_lag_cursor_over(limits: Rig, unique: Unique) -> None:
    await limits.publish(9)
    lease = await limits.lease(unique("query"))
    await limits.begin(lease, ["0.>"])
    assert await limits.lag(lease.name) == 3
    await limits.begin(lease, ["0.>", "1.>"])
    assert await limits.lag(lease.name) == 6


async def test_a_consumer_of_that_name_that_is_not_ours_is_left_alone(
    limits: Rig, unique: Unique, caplog: pytest.LogCaptureFixture
) -> None:
    await limits.publish(9)
    name = unique("query")
    await consumers.create(limits.connection, limits.stream, ConsumerConfig(durable_name=f"spark-{name}"))
    query = await limits.begin(name)
    await query.mirror(5, await limits.created())
    await query.finish()
    assert await limits.lag(name) == 9
    assert "that is not the query's: delete it, or give the query another name" in caplog.text


async def test_without_resets_the_lag_cursor_is_made_anew(
    limits: Rig, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(features.SINCE, "consumer_reset", (99, 0, 0))
    await limits.publish(9)
    name = unique("query")
    query, created = await limits.begin(name, ["0.>"]), await limits.created()
    for sequence, lag in ((4, 1), (9, 0)):
        await query.mirror(sequence, created)
        await limits.lag_becomes(name, lag)


# ---- a cluster ---------------------------------------------------------------------------------------------------


async def test_purges_in_a_cluster_survive_a_change_of_leader(nats_cluster: NatsCluster, unique: Unique) -> None:
    async with (
        await keylane.connect(nats_cluster.urls) as connection,
        rig_on(connection, unique("queue"), "workqueue", num_replicas=3) as queue,
    ):
        await queue.publish(30)
        lease = Lease(connection, unique("query"), "me", 30, replicas=3)
        await lease.take()
        queue.leases.append(lease)
        query, created = await queue.begin(lease, ["0.>", "2.>"]), await queue.created()
        await query.mirror(9, created)
        await streams.step_down(connection, queue.stream)
        others = [sequence for sequence in range(1, 31) if (sequence - 1) % 3 == 1]
        wanted = sorted({*others, *range(22, 31)})
        async with asyncio.timeout(30):
            while await _left(queue) != wanted:
                await query.mirror(21, created)
                await asyncio.sleep(0.2)


async def _left(queue: Rig) -> list[int] | None:
    try:
        return await queue.left()
    except (ApiError, RequestTimeout):
        return None  # between two leaders
