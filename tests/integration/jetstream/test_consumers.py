"""Consumers: every call on them that nats-py lacks, with the server's own error codes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

import keylane
from keylane import Connection
from keylane.errors import ApiError, InvalidInput, NotFound
from keylane.jetstream import ConsumerConfig, FeedOptions, Outgoing, consumers, open_feed, publish_many
from keylane.server import NatsServer
from tests.integration.jetstream.rig import SECOND_NS, all_acked, fill, make_consumer, make_stream
from tests.waiter import until

Unique = Callable[..., str]


# ---- create and update ------------------------------------------------------------------------------------


async def test_create_is_idempotent_for_the_same_configuration_only(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    config = ConsumerConfig(durable_name="c", filter_subjects=(f"{stream}.a", f"{stream}.b"), ack_wait_s=5)
    first = await consumers.create(connection, stream, config, action="create")
    again = await consumers.create(connection, stream, config, action="create")
    assert first.created == again.created
    for other in (
        replace(config, ack_wait_s=6),
        replace(config, filter_subjects=(f"{stream}.b", f"{stream}.a")),
        replace(config, metadata={"a": "b"}),
    ):
        with pytest.raises(ApiError, match="consumer already exists") as refused:
            await consumers.create(connection, stream, other, action="create")
        assert refused.value.err_code == 10148


async def test_update_needs_a_consumer(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    config = ConsumerConfig(durable_name="c", ack_wait_s=5)
    with pytest.raises(ApiError, match="consumer does not exist") as refused:
        await consumers.update(connection, stream, config)
    assert refused.value.err_code == 10149
    await consumers.create(connection, stream, config)
    updated = await consumers.update(connection, stream, replace(config, ack_wait_s=7.5, max_ack_pending=3))
    assert (updated.config.ack_wait_s, updated.config.max_ack_pending) == (7.5, 3)
    either = await consumers.create(connection, stream, replace(config, ack_wait_s=8))
    assert either.config.ack_wait_s == 8


async def test_every_field_makes_the_round(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    await fill(connection, stream, 3)
    start = datetime.now(UTC).replace(microsecond=250_000)
    config = ConsumerConfig(
        name="all",
        durable_name="all",
        description="é",
        deliver_policy="by_start_time",
        opt_start_time=start,
        ack_policy="explicit",
        ack_wait_s=0.25,
        max_deliver=7,
        backoff_s=(0.25, 1.5, 60),
        filter_subjects=(f"{stream}.a", f"{stream}.b.>"),
        replay_policy="instant",
        max_waiting=9,
        max_ack_pending=8,
        headers_only=True,
        max_batch=6,
        max_expires_s=5.5,
        max_bytes=4_000,
        inactive_threshold_s=300,
        num_replicas=1,
        mem_storage=True,
        metadata={"team": "x"},
        priority_groups=("jobs",),
        priority_policy="pinned_client",
        priority_timeout_s=2.5,
    )
    made = await consumers.create(connection, stream, config)
    seen = await consumers.info(connection, stream, "all")
    assert replace(seen.config, metadata={"team": "x"}) == config
    assert made.config == seen.config
    assert seen.config.metadata is not None
    assert seen.config.metadata["team"] == "x"
    assert (seen.stream, seen.name, seen.paused, seen.leader) == (stream, "all", False, None)
    assert [(group.group, group.pinned_client_id, group.pinned_since) for group in seen.priority_groups] == [
        ("jobs", None, None)
    ]


@pytest.mark.parametrize("policy", ["overflow", "pinned_client", "prioritized"])
async def test_priority_policies_make_the_round(connection: Connection, unique: Unique, policy: str) -> None:
    stream = await make_stream(connection, unique("consumer"))
    config = ConsumerConfig(durable_name="c", priority_groups=("g",), priority_policy=policy)  # type: ignore[arg-type]
    seen = (await consumers.create(connection, stream, config)).config
    assert (seen.priority_groups, seen.priority_policy) == (("g",), policy)


async def test_a_consumer_without_a_name_gets_one(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    made = await consumers.create(connection, stream, ConsumerConfig(inactive_threshold_s=60))
    assert made.name
    assert await consumers.names(connection, stream) == [made.name]


async def test_filters_choose_the_messages(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    await publish_many(connection, [Outgoing(f"{stream}.{subject}") for subject in ("a", "b.1", "c", "b.2", "a")])
    await make_consumer(connection, stream, filter_subjects=(f"{stream}.a", f"{stream}.b.*"))
    await make_consumer(connection, stream, "one", filter_subject=f"{stream}.c")
    async with await open_feed(connection, stream, "reader") as feed:
        assert [(await anext(feed)).sequence for _ in range(4)] == [1, 2, 4, 5]
    async with await open_feed(connection, stream, "one") as feed:
        assert (await anext(feed)).sequence == 3


# ---- state ------------------------------------------------------------------------------------------------


async def test_info_follows_the_reading(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    await fill(connection, stream, 10)
    await make_consumer(connection, stream)
    async with await open_feed(connection, stream, "reader", FeedOptions(max_messages=4)) as feed:
        messages = [await anext(feed) for _ in range(4)]
        await messages[0].ack_confirmed()
        info = await consumers.info(connection, stream, "reader")
        assert info.ack_floor == 1
        assert info.delivered_sequence >= 4
        assert info.num_ack_pending == info.delivered_sequence - 1
        assert info.num_pending == 10 - info.delivered_sequence


async def test_missing_ones_are_named(nats_server: NatsServer, unique: Unique) -> None:
    # The server leaves a reset of a missing consumer without an answer: hence the short deadline.
    async with await keylane.connect(nats_server.url, request_timeout_s=2) as connection:
        stream = await make_stream(connection, unique("consumer"))
        for call in (consumers.info, consumers.delete, consumers.reset, consumers.resume):
            with pytest.raises(NotFound, match="has no consumer") as missing:
                await call(connection, stream, "nobody")
            assert (missing.value.code, missing.value.err_code) == (404, 10014)
            with pytest.raises(NotFound, match="there is no stream"):
                await call(connection, unique("none"), "nobody")
        with pytest.raises(NotFound, match="there is no stream"):
            await consumers.names(connection, unique("none"))


async def test_lists_have_every_page(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    assert await consumers.names(connection, stream) == []
    made = {f"c{number}" for number in range(600)}  # a page of CONSUMER.LIST has 256
    await asyncio.gather(*(make_consumer(connection, stream, name) for name in made))
    assert set(await consumers.names(connection, stream)) == made
    listed = [info.name async for info in consumers.list_all(connection, stream)]
    assert len(listed) == 600
    assert set(listed) == made


async def test_consumers_of_others_are_listed_whatever_their_names(connection: Connection, unique: Unique) -> None:
    """The server takes names that keylane would not make; reading them must not fail."""
    stream = await make_stream(connection, unique("consumer"))
    config = {"name": "a\x01b", "ack_policy": "explicit", "inactive_threshold": SECOND_NS * 60}
    body = json.dumps({"stream_name": stream, "config": config}).encode()
    subject = f"$JS.API.CONSUMER.CREATE.{stream}.a\x01b".encode()
    connection.nats.post(b"PUB %b %d\r\n%b\r\n" % (subject, len(body), body))

    async def listed() -> list[tuple[str, str | None]]:
        return [(info.name, info.config.name) async for info in consumers.list_all(connection, stream)]

    assert await until(listed, bool) == [("a\x01b", "a\x01b")]


# ---- reset, unpin, pause ----------------------------------------------------------------------------------


async def test_reset_delivers_again_from_the_ack_floor(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    await fill(connection, stream, 10)
    await make_consumer(connection, stream, ack_wait_s=600)
    async with await open_feed(connection, stream, "reader") as feed:
        messages = [await anext(feed) for _ in range(10)]
        for message in messages[:4]:
            await message.ack_confirmed()
        await messages[6].ack_confirmed()
        assert await consumers.reset(connection, stream, "reader") == 5
        again = [await anext(feed) for _ in range(6)]
        assert [message.sequence for message in again] == [5, 6, 7, 8, 9, 10]
        assert [message.delivery.consumer_sequence for message in again] == [1, 2, 3, 4, 5, 6]
        for message in again:
            message.ack()
        await all_acked(connection, stream, "reader")
        assert await consumers.reset(connection, stream, "reader", sequence=2) == 2
        assert [(await anext(feed)).sequence for _ in range(9)] == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    with pytest.raises(InvalidInput, match="sequences start at 1"):
        await consumers.reset(connection, stream, "reader", sequence=0)


async def test_unpin_without_a_pin_policy_is_refused(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    await make_consumer(connection, stream)
    await make_consumer(connection, stream, "pinned", priority_groups=("g",), priority_policy="pinned_client")
    with pytest.raises(ApiError) as refused:
        await consumers.unpin(connection, stream, "reader", "g")
    assert (refused.value.code, refused.value.err_code) == (400, 10160)
    with pytest.raises(ApiError) as refused:
        await consumers.unpin(connection, stream, "pinned", "other")
    assert refused.value.err_code == 10160
    await consumers.unpin(connection, stream, "pinned", "g")


async def test_pause_and_resume(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    await fill(connection, stream, 1)
    await make_consumer(connection, stream)
    until = datetime.now(UTC) + timedelta(seconds=60)
    left = await consumers.pause(connection, stream, "reader", until)
    assert timedelta(seconds=50) < left <= timedelta(seconds=60)
    assert (await consumers.info(connection, stream, "reader")).paused
    await consumers.resume(connection, stream, "reader")
    assert not (await consumers.info(connection, stream, "reader")).paused
    over = await consumers.pause(connection, stream, "reader", datetime.now(UTC) - timedelta(seconds=1))
    assert over <= timedelta(0)
    async with await open_feed(connection, stream, "reader") as feed:
        assert await feed.next(5) is not None
    with pytest.raises(InvalidInput, match="give a time with a time zone"):
        await consumers.pause(connection, stream, "reader", datetime(2030, 1, 1))


async def test_delete(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    await make_consumer(connection, stream)
    await consumers.delete(connection, stream, "reader")
    assert await consumers.names(connection, stream) == []


# ---- what is refused before it is sent --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"durable_name": "a.b"}, "consumer name 'a.b'"),
        ({"name": ""}, "is empty"),
        ({"name": "a", "durable_name": "b"}, "a durable consumer has one name"),
        ({"filter_subject": "a..b"}, "filter 'a..b'"),
        ({"filter_subjects": ("a", "b c")}, "filter 'b c'"),
        ({"filter_subjects": ("a.>", "a.b")}, "'a.b' also matches 'a.>'"),
        ({"filter_subject": "a", "filter_subjects": ("b",)}, "not both"),
        ({"ack_wait_s": -1}, "ack_wait_s is -1"),
        ({"ack_wait_s": float("nan")}, "ack_wait_s is nan"),
        ({"ack_wait_s": "5"}, "ack_wait_s is '5'"),
        ({"backoff_s": (1, -1)}, "backoff_s is -1"),
        ({"max_ack_pending": -2}, "max_ack_pending is -2"),
        ({"ack_policy": "maybe"}, "ack_policy is 'maybe': use one of explicit, all, none"),
        ({"deliver_policy": "some"}, "deliver_policy is 'some'"),
        ({"replay_policy": "slow"}, "replay_policy is 'slow'"),
        ({"priority_policy": "x"}, "priority_policy is 'x'"),
        ({"deliver_policy": "by_start_sequence"}, "'by_start_sequence' and opt_start_seq go together"),
        ({"opt_start_seq": 5}, "'by_start_sequence' and opt_start_seq go together"),
        ({"deliver_policy": "by_start_time"}, "'by_start_time' and opt_start_time go together"),
        (
            {"deliver_policy": "by_start_time", "opt_start_time": datetime(2030, 1, 1)},
            "give a time with a time zone",
        ),
    ],
)
async def test_configurations_are_checked(
    connection: Connection, unique: Unique, options: dict[str, object], rule: str
) -> None:
    stream = await make_stream(connection, unique("consumer"))
    with pytest.raises(InvalidInput, match=rule):
        await consumers.create(connection, stream, ConsumerConfig(**options))  # type: ignore[arg-type]
    assert await consumers.names(connection, stream) == []


async def test_names_are_checked(connection: Connection) -> None:
    for call in (consumers.info, consumers.delete, consumers.reset, consumers.resume, consumers.step_down):
        for stream, consumer in (("a.b", "c"), ("S", "a b"), ("", "c"), ("S", "")):
            with pytest.raises(InvalidInput):
                await call(connection, stream, consumer)
    for page in (consumers.names(connection, "a.b"), anext(consumers.list_all(connection, "a.b"))):
        with pytest.raises(InvalidInput):
            await page


async def test_errors_of_the_server_carry_code_and_words(connection: Connection, unique: Unique) -> None:
    stream = await make_stream(connection, unique("consumer"))
    with pytest.raises(ApiError) as refused:
        await consumers.create(connection, stream, ConsumerConfig(durable_name="c", max_deliver=1, backoff_s=(1, 2, 3)))
    assert (refused.value.code, refused.value.err_code) == (400, 10116)
    assert "max deliver is required to be > length of backoff values" in str(refused.value)
    assert f"CONSUMER.CREATE.{stream}.c" in str(refused.value)
