"""Every refusal that the server has for pulls and consumers of priority groups, and its error here."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest
from nats.aio.msg import Msg

from keylane import Connection
from keylane.core.pulls import Meaning, Status, meaning_of
from keylane.errors import (
    ApiError,
    ConsumerGone,
    InvalidInput,
    MessageTooLarge,
    NotAnOverflowConsumer,
    NotAPinnedConsumer,
    PriorityGroupInvalid,
    PriorityGroupMissing,
    PriorityOutOfRange,
    PullRefused,
)
from keylane.jetstream import FeedOptions, Notice, consumers, open_feed
from keylane.priority import ConsumerConfig, consume, create, unpin, update
from tests.integration.priority.conftest import GROUP, MakeGround, OpenClient
from tests.integration.priority.rawpull import raw_puller

POLICIES = ("overflow", "pinned_client", "prioritized")


@pytest.mark.parametrize(
    ("policy", "request_fields", "text", "error"),
    [
        *((policy, {}, "Priority Group missing", PriorityGroupMissing) for policy in POLICIES),
        *((policy, {"group": "other"}, "Invalid Priority Group", PriorityGroupInvalid) for policy in POLICIES),
        (
            "pinned_client",
            {"group": GROUP, "min_pending": 1},
            "Not a Overflow Priority consumer",
            NotAnOverflowConsumer,
        ),
        (
            "prioritized",
            {"group": GROUP, "min_ack_pending": 1},
            "Not a Overflow Priority consumer",
            NotAnOverflowConsumer,
        ),
        (
            "overflow",
            {"group": GROUP, "id": "x"},
            "Not a Pinned Client Priority consumer",
            NotAPinnedConsumer,
        ),
        (
            "prioritized",
            {"group": GROUP, "priority": 10},
            "Priority must be between 0 and 9",
            PriorityOutOfRange,
        ),
        (
            "prioritized",
            {"group": GROUP, "priority": -1},
            "Priority must be between 0 and 9",
            PriorityOutOfRange,
        ),
        ("overflow", {"group": GROUP, "idle_heartbeat": int(4e9)}, "heartbeat value too large", None),
    ],
)
async def test_a_bad_request_is_refused_with_its_own_error(
    ground: MakeGround,
    policy: str,
    request_fields: dict[str, Any],
    text: str,
    error: type[PullRefused] | None,
) -> None:
    place = await ground(policy, storage="memory")
    async with raw_puller(place.connection, place.stream, place.consumer) as puller:
        status = await puller.refusal(**request_fields)
    assert status == (400, f"Bad Request - {text}")
    assert meaning_of(Status(*status)) is Meaning.INVALID
    if error is None:
        return
    feed = await open_feed(place.connection, place.stream, place.consumer, FeedOptions(pull_fields=request_fields))
    with pytest.raises(error, match=f"400 Bad Request - {text}; ") as refused:
        await asyncio.wait_for(anext(feed), 20)
    assert type(refused.value) is error
    assert place.consumer in str(refused.value)
    await feed.stop()


async def test_a_pull_without_a_body_needs_no_group(ground: MakeGround) -> None:
    """A fact of the server: only a pull in JSON is held to the group. Ours always are."""
    place = await ground("overflow", storage="memory")
    await place.publish(1)
    inbox = place.connection.nats.new_inbox()
    got: asyncio.Queue[Msg] = asyncio.Queue()
    await place.connection.nats.subscribe(inbox, cb=got.put)
    await place.connection.nats.publish(
        place.connection.api.subject(f"CONSUMER.MSG.NEXT.{place.stream}.{place.consumer}"), b"", reply=inbox
    )
    message = await asyncio.wait_for(got.get(), 20)
    assert message.data == b"0"


async def test_both_texts_of_423(ground: MakeGround, open_client: OpenClient) -> None:
    """A stale id that arrives, and one that waits when the pin moves: both mean that the pin is lost."""
    place = await ground("pinned_client", storage="memory", priority_timeout_s=30)
    await place.publish(1)
    async with (
        raw_puller(place.connection, place.stream, place.consumer) as old,
        raw_puller(await open_client(), place.stream, place.consumer) as new,
    ):
        await old.pull(group=GROUP)
        message = await old.answer()
        pin_id = (message.headers or {})["Nats-Pin-Id"]
        await message.ack_sync()
        mismatch = await old.refusal(group=GROUP, id="somebody-else")
        assert mismatch == (423, "Nats-Pin-Id mismatch")
        await old.pull(group=GROUP, id=pin_id)
        await new.pull(group=GROUP)
        await unpin(place.connection, place.stream, place.consumer)
        await place.publish(1)
        wrong = await old.status()
        assert wrong == (423, "Nats-Wrong-Pin-Id")
        assert (await new.answer()).data == b"0"
    for status in (mismatch, wrong):
        assert meaning_of(Status(*status)) is Meaning.PIN_LOST


async def test_the_409s(ground: MakeGround) -> None:
    place = await ground("overflow", storage="memory", max_batch=5, max_expires_s=10, max_bytes=1000, max_waiting=1)
    seen: dict[str, Meaning] = {}

    async def expect(beginning: str, status: tuple[int, str]) -> None:
        code, text = status
        assert code == 409
        assert text.startswith(beginning), text
        seen[beginning] = meaning_of(Status(code, text))

    async with raw_puller(place.connection, place.stream, place.consumer) as puller:
        await expect("Exceeded MaxRequestBatch of 5", await puller.refusal(group=GROUP, batch=6))
        await expect("Exceeded MaxRequestExpires of 10s", await puller.refusal(group=GROUP, expires=int(11e9)))
        await expect("Exceeded MaxRequestMaxBytes of 1000", await puller.refusal(group=GROUP, max_bytes=1001))
        await puller.pull(group=GROUP, min_pending=100)
        await expect("Exceeded MaxWaiting", await puller.refusal(group=GROUP))
        await consumers.delete(place.connection, place.stream, place.consumer)
        await expect("Consumer Deleted", await puller.status())
    assert seen == {
        "Exceeded MaxRequestBatch of 5": Meaning.LIMIT,
        "Exceeded MaxRequestExpires of 10s": Meaning.LIMIT,
        "Exceeded MaxRequestMaxBytes of 1000": Meaning.LIMIT,
        "Exceeded MaxWaiting": Meaning.REFUSED,
        "Consumer Deleted": Meaning.DELETED,
    }


async def test_a_message_that_does_not_fit(ground: MakeGround) -> None:
    place = await ground("overflow", storage="memory")
    await place.publish(1)
    async with raw_puller(place.connection, place.stream, place.consumer) as puller:
        status = await puller.refusal(group=GROUP, max_bytes=1)
    assert status == (409, "Message Size Exceeds MaxBytes")
    assert meaning_of(Status(*status)) is Meaning.OUT_OF_BYTES
    feed = await consume(place.connection, place.stream, place.consumer, max_bytes=10)
    with pytest.raises(MessageTooLarge, match="max_bytes 10"):
        await asyncio.wait_for(anext(feed), 20)
    await feed.stop()


async def test_a_push_consumer(ground: MakeGround) -> None:
    place = await ground("overflow", storage="memory", retention="limits")
    await consumers.create(
        place.connection,
        place.stream,
        ConsumerConfig(durable_name="pushed", deliver_subject=place.connection.nats.new_inbox()),
    )
    async with raw_puller(place.connection, place.stream, "pushed") as puller:
        status = await puller.refusal(group=GROUP)
    assert status == (409, "Consumer is push based")
    assert meaning_of(Status(*status)) is Meaning.INVALID


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_deleted_consumer_ends_the_reader(ground: MakeGround, open_client: OpenClient, policy: str) -> None:
    place = await ground(policy, storage="memory")
    notices: list[Notice] = []
    feed = await consume(await open_client(), place.stream, place.consumer, on_notice=notices.append)
    await place.publish(1)
    message = await feed.next(20)
    assert message is not None
    message.ack()
    await consumers.delete(place.connection, place.stream, place.consumer)
    with pytest.raises(ConsumerGone, match="'workers'"):
        await asyncio.wait_for(anext(feed), 20)
    await feed.stop()


async def test_a_consumer_replaced_by_one_with_another_policy(ground: MakeGround, open_client: OpenClient) -> None:
    """An open reader does not carry its terms over to a consumer that does not know them."""
    place = await ground("overflow", storage="memory")
    feed = await consume(
        await open_client(), place.stream, place.consumer, min_pending=5, expires_s=0.5, heartbeat_s=0.2
    )
    await consumers.delete(place.connection, place.stream, place.consumer)
    await create(
        place.connection,
        place.stream,
        ConsumerConfig(durable_name=place.consumer, priority_groups=(GROUP,), priority_policy="pinned_client"),
    )
    with pytest.raises((ConsumerGone, NotAnOverflowConsumer)):
        await asyncio.wait_for(anext(feed), 20)
    await feed.stop()


# ---- the API ----------------------------------------------------------------------------------------


async def refused_by_the_server(connection: Connection, stream: str, **config: Any) -> ApiError:
    """Ask for a consumer past all our rules."""
    name = config.setdefault("durable_name", "refused")
    request = {
        "stream_name": stream,
        "config": {"ack_policy": "explicit", **config},
        "action": "create",
    }
    with pytest.raises(ApiError) as refused:
        await connection.api.request(f"CONSUMER.CREATE.{stream}.{name}", request)
    return refused.value


@pytest.mark.parametrize(
    ("err_code", "wire", "ours", "rule"),
    [
        (
            10159,
            {"priority_policy": "overflow"},
            {"priority_policy": "overflow"},
            "exactly one priority group",
        ),
        (
            10161,
            {"priority_policy": "overflow", "priority_groups": [""]},
            {"priority_policy": "overflow", "priority_groups": ("",)},
            "1 to 16 of the characters",
        ),
        (
            10162,
            {"priority_policy": "overflow", "priority_groups": ["seventeen-letters"]},
            {"priority_policy": "overflow", "priority_groups": ("seventeen-letters",)},
            "1 to 16 of the characters",
        ),
        (
            10162,
            {"priority_policy": "pinned_client", "priority_groups": ["a b"]},
            {"priority_policy": "pinned_client", "priority_groups": ("a b",)},
            "1 to 16 of the characters",
        ),
        (
            10178,
            {"priority_policy": "overflow", "priority_groups": ["a"], "deliver_subject": "there"},
            {"priority_policy": "overflow", "priority_groups": ("a",), "deliver_subject": "there"},
            "pull consumers only",
        ),
        (
            10196,
            {"priority_groups": ["a"]},
            {"priority_groups": ("a",)},
            "use one of overflow, pinned_client, prioritized",
        ),
        (
            10197,
            {"priority_timeout": int(1e9)},
            {"priority_timeout_s": 1.0},
            "use one of overflow, pinned_client, prioritized",
        ),
    ],
)
async def test_codes_of_a_consumer_that_breaks_a_rule(
    ground: MakeGround, err_code: int, wire: dict[str, Any], ours: dict[str, Any], rule: str
) -> None:
    place = await ground("overflow", retention="limits", storage="memory")
    assert (await refused_by_the_server(place.connection, place.stream, **wire)).err_code == err_code
    sent = place.connection.nats.stats["out_msgs"]
    with pytest.raises(InvalidInput, match=rule):
        await create(place.connection, place.stream, ConsumerConfig(durable_name="refused", **ours))
    assert place.connection.nats.stats["out_msgs"] == sent


async def test_code_of_an_unknown_group(ground: MakeGround) -> None:
    place = await ground("pinned_client", storage="memory")
    with pytest.raises(ApiError) as refused:
        await place.connection.api.request(f"CONSUMER.UNPIN.{place.stream}.{place.consumer}", {"group": "other"})
    assert refused.value.err_code == 10160
    with pytest.raises(ApiError) as refused:
        await consumers.unpin(place.connection, place.stream, place.consumer, "seventeen-letters")
    assert refused.value.err_code == 10162


@pytest.mark.parametrize("policy", ["overflow", "prioritized"])
async def test_there_is_nothing_to_unpin_without_pins(ground: MakeGround, policy: str) -> None:
    place = await ground(policy, storage="memory")
    with pytest.raises(InvalidInput, match="only pinned_client has a pin"):
        await unpin(place.connection, place.stream, place.consumer)
    # The server itself would take it.
    await consumers.unpin(place.connection, place.stream, place.consumer, GROUP)


async def test_what_the_server_leaves_to_the_client(ground: MakeGround) -> None:
    """It takes two groups and any ack policy; our rules do not, and nothing is sent."""
    place = await ground("overflow", retention="limits", storage="memory")
    config = {
        "durable_name": "loose",
        "ack_policy": "all",
        "priority_policy": "overflow",
        "priority_groups": ["a", "b"],
    }
    await place.connection.api.request(
        f"CONSUMER.CREATE.{place.stream}.loose", {"stream_name": place.stream, "config": config}
    )
    for breach, rule in (
        ({"priority_groups": ("a", "b")}, "exactly one priority group"),
        ({"ack_policy": "all"}, "explicit acks"),
        ({"ack_policy": "none"}, "explicit acks"),
        ({"priority_timeout_s": 3.0}, "belongs to pinned_client"),
    ):
        terms: dict[str, Any] = {
            "durable_name": "strict",
            "priority_policy": "overflow",
            "priority_groups": ("a",),
            **breach,
        }
        with pytest.raises(InvalidInput, match=rule):
            await create(place.connection, place.stream, ConsumerConfig(**terms))
    assert "strict" not in await consumers.names(place.connection, place.stream)


async def test_group_and_policy_never_change(ground: MakeGround) -> None:
    place = await ground("overflow", retention="limits", storage="memory")
    changed = ConsumerConfig(durable_name=place.consumer, priority_groups=(GROUP,), priority_policy="pinned_client")
    with pytest.raises(InvalidInput, match="policy is overflow and cannot become pinned_client"):
        await update(place.connection, place.stream, changed)
    renamed = ConsumerConfig(durable_name=place.consumer, priority_groups=("other",), priority_policy="overflow")
    with pytest.raises(InvalidInput, match=r"group is \['jobs'\] and cannot become \['other'\]"):
        await update(place.connection, place.stream, renamed)
    plain = ConsumerConfig(durable_name="plain")
    await consumers.create(place.connection, place.stream, plain)
    with pytest.raises(InvalidInput, match=r"group is \[\] and cannot become \['jobs'\]"):
        await update(
            place.connection,
            place.stream,
            ConsumerConfig(durable_name="plain", priority_groups=(GROUP,), priority_policy="overflow"),
        )
    info = await consumers.info(place.connection, place.stream, place.consumer)
    assert (info.config.priority_policy, info.config.priority_groups) == ("overflow", (GROUP,))


async def test_a_consumer_without_a_group(ground: MakeGround) -> None:
    place = await ground("overflow", retention="limits", storage="memory")
    await consumers.create(place.connection, place.stream, ConsumerConfig(durable_name="plain"))
    with pytest.raises(InvalidInput, match="has no priority group"):
        await consume(place.connection, place.stream, "plain")
    with pytest.raises(InvalidInput, match="has no priority group"):
        await unpin(place.connection, place.stream, "plain")


def test_every_policy_is_tested() -> None:
    assert set(POLICIES) == set(get_args(consumers.PriorityPolicy)) - {"none"}
