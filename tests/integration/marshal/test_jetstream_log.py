"""The coordination log in a stream of a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from nats.js.api import PersistMode, RetentionPolicy, StorageType, StreamConfig, SubjectTransform

import keylane
from keylane import Connection
from keylane.core.claim_records import ClaimingPartition, Heartbeat, Message, ReleaseGroup, ReleasingPartition
from keylane.errors import InvalidInput, LogReplaced, NotFound, ReadIncomplete, RevisionConflict, UnsafeLog
from keylane.jetstream import Outgoing, StoredMessage, publish_many, read_batch, streams
from keylane.marshal import (
    Bounds,
    CoordinationLog,
    JetStreamLog,
    Newest,
    Verdict,
    World,
    catch_up,
    jetstream_log,
    open_jetstream_log,
)
from keylane.marshal.jetstream_log import subject_of
from keylane.server import NatsCluster
from tests.waiter import until

INTERVAL_S = 10.0
Unique = Callable[..., str]


def claim(who: str, partition: int = 0, *, group: str = "billing") -> ClaimingPartition:
    return ClaimingPartition("i", who, group, "orders", partition, 1)


def new_world() -> World:
    return World(INTERVAL_S, first_offset=1)


@pytest.fixture
async def name(connection: Connection, unique: Unique) -> AsyncIterator[str]:
    """The name of a log that is gone after the test."""
    chosen = unique("claims")
    try:
        yield chosen
    finally:
        with suppress(NotFound):
            await streams.delete(connection, chosen)


@pytest.fixture
async def log(connection: Connection, name: str) -> AsyncIterator[JetStreamLog]:
    async with open_jetstream_log(connection, name, interval_s=INTERVAL_S) as opened:
        yield opened


async def test_claims_are_judged_from_the_stream(log: JetStreamLog) -> None:
    port: CoordinationLog = log
    world = new_world()
    messages: list[Message] = [
        claim("anna"),
        claim("bert"),
        Heartbeat("i", "anna", "billing", "orders", 0, 50, 1),
        ReleaseGroup("i", "admin", "paused", 1 << 40, 1),
        claim("carl", group="paused"),
        ReleasingPartition("i", "anna", "billing", "orders", 0, 60, 1),
        claim("bert"),
    ]
    positions = [await port.append(message, 0) for message in messages]
    assert [position.offset for position in positions] == list(range(1, 8))
    await catch_up(port, world)
    assert [world.verdict_of(*position) for position in positions] == [
        Verdict.WON,
        Verdict.LOST,
        None,
        None,
        Verdict.PAUSED,
        None,
        Verdict.WON,
    ]
    owned = world.claim_of("billing", "orders", 0)
    assert owned is not None
    assert (owned.token, owned.offset) == (7, 60)
    assert repr(log) == f"<JetStreamLog {log.name}>"


async def test_time_is_the_servers(log: JetStreamLog, connection: Connection) -> None:
    position = await log.append(claim("anna"))
    [record] = [record async for record in log.read()]
    stored = await connection.api.request(f"STREAM.MSG.GET.{log.name}", {"seq": position.offset})
    assert record.offset == position.offset
    seconds, _, fraction = stored["message"]["time"].rstrip("Z").partition(".")
    whole_ms = int(datetime.fromisoformat(seconds).replace(tzinfo=UTC).timestamp()) * 1000
    assert record.time_ms == whole_ms + int(fraction.ljust(9, "0")[:3])


async def test_thirty_racers_one_winner_and_one_record(log: JetStreamLog) -> None:
    outcomes = await asyncio.gather(
        *(log.append(claim(f"c{number}"), expect=Newest(None)) for number in range(30)), return_exceptions=True
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, RevisionConflict)]
    assert len(refused) == 29
    assert await log.bounds() == Bounds(1, 2)
    world = new_world()
    await catch_up(log, world)
    assert len(list(world.claims())) == 1


async def test_thirty_racers_without_comparing_have_one_winner_too(log: JetStreamLog) -> None:
    positions = await asyncio.gather(*(log.append(claim(f"c{number}")) for number in range(30)))
    world = new_world()
    await catch_up(log, world)
    verdicts = [world.verdict_of(*position) for position in positions]
    assert sorted(verdict.value for verdict in verdicts if verdict) == ["lost"] * 29 + ["won"]


async def test_comparing_with_what_the_world_has_read(log: JetStreamLog) -> None:
    world = new_world()
    await log.append(claim("anna"), expect=Newest(world.newest_of("billing", "orders", 0)))
    with pytest.raises(RevisionConflict, match="read the log"):
        await log.append(claim("bert"), expect=Newest(world.newest_of("billing", "orders", 0)))
    await log.append(claim("bert", 1))
    await catch_up(log, world)
    beat = Heartbeat("i", "anna", "billing", "orders", 0, 5, 1)
    await log.append(beat, expect=Newest(world.newest_of("billing", "orders", 0)))
    with pytest.raises(RevisionConflict):
        await log.append(beat, expect=Newest(world.newest_of("billing", "orders", 0)))


async def test_records_gone_by_age_are_no_conflict(connection: Connection, log: JetStreamLog) -> None:
    """The world remembers a record that the stream has lost: nobody was quicker, so the claim goes through."""
    world = new_world()
    await log.append(claim("anna"), expect=Newest(None))
    await log.append(ReleasingPartition("i", "anna", "billing", "orders", 0, 9, 1))
    await catch_up(log, world)
    await age_all(connection, log)
    won = await log.append(claim("bert"), expect=Newest(world.newest_of("billing", "orders", 0)))
    assert won.offset == 3
    await catch_up(log, world)
    assert world.verdict_of(*won) is Verdict.WON
    with pytest.raises(ReadIncomplete, match="records 1 to 2 have expired"):
        [record async for record in log.read(0, 1)]
    with pytest.raises(RevisionConflict):
        await log.append(claim("carl"), expect=Newest(2))
    late = new_world()
    await catch_up(log, late)
    assert late.verdict_of(*won) is Verdict.UNSURE, "a reader of what is left cannot know"


async def test_a_fleet_that_comes_back_to_an_empty_log(connection: Connection, log: JetStreamLog) -> None:
    await log.append(claim("anna"))
    await age_all(connection, log)
    world = new_world()
    await catch_up(log, world)
    won = await log.append(claim("bert"), expect=Newest(None))
    await catch_up(log, world)
    assert world.verdict_of(*won) is Verdict.WON


async def age_all(connection: Connection, log: JetStreamLog) -> None:
    """Let all records go by age, and put the old limit back."""
    config = (await streams.info(connection, log.name)).config
    await streams.update(connection, replace(config, max_age=0.1, duplicate_window=0.1))
    await until(lambda: streams.state(connection, log.name), lambda seen: not seen.messages, deadline_s=30)
    await streams.update(connection, config)


async def test_reading_from_a_place_to_the_end(log: JetStreamLog) -> None:
    for number in range(5):
        await log.append(claim("anna", number))
    assert [record.offset for record in [record async for record in log.read(0, 4)]] == [4, 5]
    assert [record async for record in log.read(0, 6)] == []
    seen = []
    async for record in log.read():
        seen.append(record.offset)
        await log.append(claim("bert"))
    assert seen == [1, 2, 3, 4, 5], "what comes meanwhile is for the next reading"


async def test_a_replica_that_lags_is_asked_again(log: JetStreamLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it answers is real, but for the records that have not reached it yet."""
    for number in range(3):
        await log.append(claim("anna", number))
    has = [0, 1, 1, 3]

    async def lagging(*args: Any, **options: Any) -> tuple[list[StoredMessage], int]:
        messages, _ = await read_batch(*args, **options)
        reached = has.pop(0)
        return [message for message in messages if message.sequence <= reached], 0

    monkeypatch.setattr(jetstream_log, "read_batch", lagging)
    assert [record.offset async for record in log.read()] == [1, 2, 3]
    assert has == []


async def test_a_replica_that_lags_too_long_is_an_error(
    connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def behind(*_: Any, **__: Any) -> tuple[list[StoredMessage], int]:
        return [], 0

    async with open_jetstream_log(connection, name, interval_s=INTERVAL_S, timeout_s=5) as log:
        await log.append(claim("anna"))
        monkeypatch.setattr(jetstream_log, "read_batch", behind)
        with pytest.raises(ReadIncomplete, match=r"record 1 of 1 did not come within 5 s"):
            [record async for record in log.read()]


async def test_what_comes_between_the_look_and_the_reading_is_for_the_next(
    log: JetStreamLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(*args: Any, **options: Any) -> tuple[list[StoredMessage], int]:
        await log.append(claim("bert"))
        return await read_batch(*args, **options)

    await log.append(claim("anna"))
    monkeypatch.setattr(jetstream_log, "read_batch", busy)
    assert [record.offset async for record in log.read()] == [1]


async def test_a_long_log_is_read_in_batches(connection: Connection, log: JetStreamLog) -> None:
    subject = subject_of(log.name, claim("anna"))
    await publish_many(connection, [Outgoing(subject, b"noise") for _ in range(10_050)])
    world = new_world()
    await catch_up(log, world)
    assert (world.unreadable, world.next_offset(0)) == (10_050, 10_051)


async def test_ids_of_any_kind_have_a_subject_of_their_own(log: JetStreamLog) -> None:
    names = ["billing", "billing.eu", "billing*", ">", "a b", "zoë", "a=2Eb", "a.b", "BILLING"]
    assert len({subject_of(log.name, claim("anna", group=name)) for name in names}) == len(names)
    for group in names:
        await log.append(claim("anna", group=group), expect=Newest(None))
    world = new_world()
    await catch_up(log, world)
    assert sorted(one.key.group for one in world.claims()) == sorted(names)
    with pytest.raises(InvalidInput, match="a slash separates"):
        await log.append(claim("anna", group="a/b"))


async def test_a_stream_is_one_partition(log: JetStreamLog) -> None:
    for asked in (log.bounds(1), log.append(claim("anna"), 1), anext(log.read(1))):
        with pytest.raises(InvalidInput, match="a stream is one partition, 0"):
            await asked


# ---- the stream -------------------------------------------------------------------------------------


async def test_the_stream_is_made_with_safe_settings(connection: Connection, log: JetStreamLog) -> None:
    config = (await streams.info(connection, log.name)).config
    assert config.subjects == [f"keylane.marshal.{log.name}.>"]
    assert (config.storage, config.retention) == (StorageType.FILE, RetentionPolicy.LIMITS)
    assert (config.max_msgs, config.max_bytes, config.max_msgs_per_subject) == (-1, -1, -1)
    assert config.max_age == 7 * 24 * 3600
    assert config.deny_delete
    assert config.deny_purge
    assert config.num_replicas == 1, "there is one server"


async def test_opening_it_again_and_all_at_once(connection: Connection, name: str) -> None:
    async def use(number: int) -> int:
        async with open_jetstream_log(connection, name, interval_s=INTERVAL_S) as log:
            return (await log.append(claim(f"c{number}"))).offset

    assert sorted(await asyncio.gather(*(use(number) for number in range(8)))) == list(range(1, 9))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_msgs_per_subject": 1}, "max_msgs_per_subject is 1, which drops the first claim"),
        ({"max_msgs": 1000}, "max_msgs is 1000"),
        ({"max_bytes": 1 << 20}, "max_bytes is 1048576"),
        ({"max_age": 15.0}, "max_age is 15.0 s, less than two intervals of 10.0 s"),
        ({"retention": RetentionPolicy.WORK_QUEUE}, "retention is"),
        ({"retention": RetentionPolicy.INTEREST}, "retention is"),
        ({"storage": StorageType.MEMORY}, "storage is memory"),
        ({"persist_mode": PersistMode.ASYNC}, "persist_mode is async"),
        ({"deny_delete": False}, "deny_delete is off"),
        ({"deny_purge": False}, "deny_purge is off"),
        ({"deny_purge": False, "allow_rollup_hdrs": True}, "allow_rollup_hdrs is on"),
        ({"allow_msg_ttl": True}, "allow_msg_ttl is on"),
        ({"allow_direct": False}, "allow_direct is off"),
        ({"no_ack": True}, "no_ack is on"),
        ({"subject_transform": SubjectTransform(src=">", dest="x.>")}, "it has a subject transform"),
        ({"subjects": ["other.*"]}, "without keylane.marshal."),
    ],
)
async def test_a_stream_that_breaks_the_rules_is_refused(
    connection: Connection, name: str, changes: dict[str, Any], said: str
) -> None:
    safe = StreamConfig(
        name=name,
        subjects=[f"keylane.marshal.{name}.>"],
        storage=StorageType.FILE,
        deny_delete=True,
        deny_purge=True,
        allow_direct=True,
    )
    await streams.create(connection, replace(safe, **changes))
    with pytest.raises(UnsafeLog) as refused:
        async with open_jetstream_log(connection, name, interval_s=INTERVAL_S):
            pass
    assert said in str(refused.value)
    assert (await streams.state(connection, name)).messages == 0


async def test_another_stream_with_its_subjects(connection: Connection, name: str, unique: Unique) -> None:
    other = unique("other")
    await streams.create(connection, StreamConfig(name=other, subjects=[f"keylane.marshal.{name}.claims.>"]))
    try:
        with pytest.raises(UnsafeLog, match="take these subjects out of the other stream"):
            async with open_jetstream_log(connection, name, interval_s=INTERVAL_S):
                pass
    finally:
        await streams.delete(connection, other)


@pytest.mark.parametrize(
    "options", [{"interval_s": 0}, {"interval_s": 10, "max_age_s": 19}, {"interval_s": 10, "timeout_s": -1}]
)
async def test_options_that_cannot_be(connection: Connection, name: str, options: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        async with open_jetstream_log(connection, name, **options):  # type: ignore[arg-type]
            pass
    with pytest.raises(NotFound):
        await streams.state(connection, name)


async def test_a_log_that_was_deleted_or_made_anew(connection: Connection, log: JetStreamLog) -> None:
    await log.append(claim("anna"))
    await streams.delete(connection, log.name)
    with pytest.raises(LogReplaced, match="was deleted"):
        await log.bounds()
    async with open_jetstream_log(connection, log.name, interval_s=INTERVAL_S) as anew:
        await anew.append(claim("bert"))
        with pytest.raises(LogReplaced, match="was recreated"):
            await log.bounds()


async def test_in_a_cluster_what_was_appended_is_read_whoever_answers(
    nats_cluster: NatsCluster, unique: Unique
) -> None:
    """Direct gets are answered by any replica; none of them may hide the newest record."""
    name = unique("claims")
    async with await keylane.connect(nats_cluster.urls) as connection:
        try:
            async with open_jetstream_log(connection, name, interval_s=INTERVAL_S) as log:
                assert (await streams.info(connection, name)).config.num_replicas == 3
                world = new_world()
                for number in range(60):
                    position = await log.append(claim("anna", number), expect=Newest(None))
                    await catch_up(log, world)
                    assert world.verdict_of(*position) is Verdict.WON
        finally:
            with suppress(NotFound):
                await streams.delete(connection, name)
