"""Apps on a real server: payloads, results, dead letters, the start and the end, fleets and groups."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import keylane
from keylane import groups
from keylane.app import App, RunningApp
from keylane.dead_letters import list_dead_letters
from keylane.errors import FleetError, GroupError, InvalidInput, NotFound
from keylane.jetstream import Connection, Outgoing, PublishAck, StoredMessage, publish_many, read_all, streams
from keylane.server import NatsServer
from keylane.testing import Effect, judge
from tests.waiter import until

PARTITIONS = 4


@dataclass
class Order:
    cents: int


@dataclass
class Bill:
    customer: str
    cents: int


@pytest.fixture
def app(nats_server: NatsServer) -> App:
    return App(nats_server.url)


async def make_stream(connection: Connection, name: str, *, partitions: int = 0) -> None:
    by = keylane.PartitionBy(f"{name}.*").over(partitions or 1)
    transform = {"subject_transform": {"src": by.filter, "dest": by.destination}} if partitions else {}
    await streams.create_json(
        connection, {"name": name, "subjects": [f"{name}.>"], "storage": "memory", "allow_direct": True, **transform}
    )


async def publish(connection: Connection, stream: str, payloads: list[tuple[str, Any]]) -> list[int]:
    outgoing = [
        Outgoing(f"{stream}.{key}", one if isinstance(one, bytes) else json.dumps(one).encode())
        for key, one in payloads
    ]
    acks = await publish_many(connection, outgoing)
    return [ack.sequence for ack in acks if isinstance(ack, PublishAck)]


async def test_two_copies_share_a_stream_and_nothing_is_lost_or_repeated(
    connection: Connection, nats_server: NatsServer, unique: Callable[..., str]
) -> None:
    stream = unique("app")
    await make_stream(connection, stream, partitions=PARTITIONS)
    effects: list[Effect] = []

    def copy(name: str) -> App:
        app = App(nats_server.url)

        @app.handler(stream, group="billing", partition_by=f"{stream}.*", partitions=PARTITIONS)
        async def bill(order: Order, message: keylane.Message) -> None:
            assert order.cents == int(message.key)
            effects.append(Effect(message.key, message.sequence, name))

        return app

    keys = [str(number % 20) for number in range(200)]
    async with copy("a").start() as first:
        sent = await publish(connection, stream, [(key, {"cents": int(key)}) for key in keys])
        await until(lambda: len(effects), lambda count: count == len(keys))
        async with copy("b").start() as second:
            await until(lambda: [len(one.workers[f"{stream}/billing"].partitions) for one in (first, second)], all)
            sent += await publish(connection, stream, [(key, {"cents": int(key)}) for key in keys])
            await until(lambda: len(effects), lambda count: count == 2 * len(keys))
    assert repr(first) == f"<RunningApp ended: {stream}/billing>"
    verdict = judge(sent, effects)
    assert (verdict.lost, verdict.duplicated, verdict.out_of_order) == ((), (), ())
    assert {one.by for one in effects} == {"a", "b"}


async def test_a_stream_without_numbers_is_read_through_a_copy_and_stays_as_it_is(
    connection: Connection, app: App, unique: Callable[..., str]
) -> None:
    stream = unique("app")
    await make_stream(connection, stream)
    before = (await streams.info_json(connection, stream))["config"]
    got: list[tuple[int, str]] = []

    @app.handler(stream, group="billing", partition_by=f"{stream}.*", partitions=PARTITIONS)
    def bill(order: dict[str, int], message: keylane.Message) -> None:
        got.append((message.sequence, message.key))

    await publish(connection, stream, [("skipped.by.filter", {})])
    sent = await publish(connection, stream, [("a", {}), ("b", {})])
    async with app.start():
        await until(lambda: sorted(got), lambda found: found == [(sent[0], "a"), (sent[1], "b")])
    assert (await streams.info_json(connection, stream))["config"] == before
    assert f"{stream}-billing" in await streams.names(connection)
    got.clear()
    async with app.start():  # the fleet was made with a copy, and goes on with it
        [third] = await publish(connection, stream, [("a", {})])
        await until(lambda: got, lambda found: found == [(third, "a")])


async def test_a_payload_that_does_not_decode_is_a_dead_letter_at_once(
    connection: Connection, app: App, unique: Callable[..., str]
) -> None:
    stream = unique("app")
    await make_stream(connection, stream, partitions=PARTITIONS)
    got: list[int] = []

    @app.handler(stream, group="billing")
    async def bill(order: Order) -> None:
        got.append(order.cents)

    [bad, *_] = await publish(connection, stream, [("a", {"cents": "much"}), ("a", {"cents": 1}), ("b", b"{")])
    async with app.start():
        await until(lambda: got, lambda found: found == [1])

        async def letters() -> list[Any]:
            return [one async for one in list_dead_letters(connection, stream)]

        found = await until(letters, lambda letters: len(letters) == 2)
    first = next(one for one in found if one.source_sequence == bad)
    assert (first.group, first.key, first.tries, first.data) == ("billing", "a", 1, b'{"cents": "much"}')
    assert first.error.startswith("InvalidPayload: no Order: ValueError: cents: 'much' is no int")


async def test_a_delayed_retry_decodes_publishes_under_the_same_id_and_ends_as_a_dead_letter(
    connection: Connection, app: App, unique: Callable[..., str]
) -> None:
    orders, billed = unique("app"), unique("app")
    await make_stream(connection, orders)  # read through a copy, where ids have the time of the stream
    await make_stream(connection, billed)
    tries: list[tuple[str, int]] = []

    @app.handler(
        orders,
        group="billing",
        partition_by=f"{orders}.*",
        partitions=PARTITIONS,
        publish=f"{billed}.{{key}}",
        retry_delays=(0.3, 0.2),
    )
    def bill(order: Order, message: keylane.Message) -> Bill:
        tries.append((message.key, message.delivered_count))
        if order.cents < 0 or (order.cents == 0 and message.delivered_count == 1):
            raise ValueError("later")
        return Bill(message.key, order.cents)

    sent = await publish(connection, orders, [("a", {"cents": 0}), ("a", {"cents": 1}), ("b", {"cents": -1})])

    async def letters() -> list[Any]:
        return [one async for one in list_dead_letters(connection, orders)]

    async with app.start():
        (letter,) = await until(letters, bool)
        await until(lambda: tries, lambda found: ("a", 2) in found)
        stored = await until(lambda: _all_of(connection, billed), lambda found: len(found) == 2)
    assert (letter.source_sequence, letter.tries, letter.error) == (sent[2], 3, "ValueError: later")
    assert sorted(tries) == [("a", 1), ("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 3)]
    ids = [one.headers["Nats-Msg-Id"].split(" ") for one in stored]
    assert [one[2] for one in ids] == [str(sent[1]), str(sent[0])], "the later message did not wait"
    assert ids[0][3] == ids[1][3]


async def _all_of(connection: Connection, stream: str) -> list[StoredMessage]:
    return [one async for one in read_all(connection, stream)]


async def test_results_go_on_to_the_next_handler_and_a_repeat_is_no_second_message(
    connection: Connection, app: App, unique: Callable[..., str]
) -> None:
    orders, billed = unique("app"), unique("app")
    await make_stream(connection, orders, partitions=PARTITIONS)
    await make_stream(connection, billed)
    mails: list[Bill] = []

    @app.handler(orders, group="billing", publish=f"{billed}.{{key}}")
    async def bill(order: Order, message: keylane.Message) -> Bill | None:
        return Bill(message.key, order.cents) if order.cents else None

    @app.handler(
        billed, group="mail", partition_by=f"{billed}.*", partitions=PARTITIONS, publish=f"{billed}.mails.sent"
    )
    def mail(bill: Bill, message: keylane.Message) -> str:
        mails.append(bill)
        return f"mail {bill.cents}"

    sent = await publish(connection, orders, [("a", {"cents": 1}), ("b", {"cents": 0}), ("a", {"cents": 2})])
    async with app.start():
        await until(lambda: len(mails), lambda count: count == 2)
    assert mails == [Bill("a", 1), Bill("a", 2)]
    stored = [one async for one in read_all(connection, billed)]
    ids = [one.headers["Nats-Msg-Id"] for one in stored]
    assert [one.rsplit(" ", 1)[0] for one in ids if one.startswith(orders)] == [
        f"{orders} billing {sent[0]}",
        f"{orders} billing {sent[2]}",
    ]
    assert sum(one.data.startswith(b"mail") for one in stored) == 2
    again = await publish_many(
        connection, [Outgoing(one.subject, one.data, {"Nats-Msg-Id": one.headers["Nats-Msg-Id"]}) for one in stored]
    )
    assert all(isinstance(ack, PublishAck) and ack.duplicate for ack in again)


async def test_lifespan_and_the_order_of_its_calls(
    connection: Connection, app: App, unique: Callable[..., str]
) -> None:
    stream = unique("app")
    await make_stream(connection, stream, partitions=PARTITIONS)
    calls: list[str] = []
    begun, may_end = asyncio.Event(), asyncio.Event()

    @app.on_start
    async def open_pool() -> None:
        calls.append("open pool")

    @app.on_start
    def open_file() -> None:
        calls.append("open file")

    @app.on_stop
    async def close_pool() -> None:
        calls.append("close pool")

    @app.on_stop
    def close_file() -> None:
        calls.append("close file")

    @app.handler(stream, group="billing")
    async def bill(order: bytes) -> None:
        begun.set()
        await may_end.wait()
        calls.append("handled")

    await publish(connection, stream, [("a", b"x")])
    running: RunningApp
    async with app.start() as running:
        await begun.wait()
        stopping = asyncio.create_task(running.stop())
        await until(lambda: running.state, lambda state: state == "stopping")
        may_end.set()
        await stopping
        assert await running.wait() == "stopped"
    assert calls == ["open pool", "open file", "handled", "close file", "close pool"]


async def test_a_worker_that_ends_ends_the_app_with_its_error(
    connection: Connection, app: App, unique: Callable[..., str]
) -> None:
    stream = unique("app")
    await make_stream(connection, stream, partitions=PARTITIONS)
    stopped: list[bool] = []

    class Crash(BaseException):
        pass

    @app.handler(stream, group="billing")
    async def bill(order: bytes) -> None:
        raise Crash

    @app.handler(stream, group="mail")
    async def mail(order: bytes) -> None: ...

    app.on_stop(lambda: stopped.append(True))
    running = await app.start()
    await publish(connection, stream, [("a", b"x")])
    with pytest.raises(keylane.errors.HandlerCrashed):
        await running.wait()
    assert running.state == "ended"
    assert stopped == [True]


async def test_a_member_of_an_elastic_group(connection: Connection, app: App, unique: Callable[..., str]) -> None:
    stream = unique("app")
    await make_stream(connection, stream)
    await groups.create_elastic(connection, stream, "g", partitions=4, partition_by=f"{stream}.*", members=["alice"])
    got: list[str] = []
    failures: list[int] = []

    @app.handler(
        stream,
        group="g",
        member="alice",
        max_tries=2,
        hooks=keylane.app.HandlerHooks(on_failure=lambda *about: failures.append(about[2])),
    )
    async def bill(order: str, message: keylane.Message) -> None:
        got.append(order)
        if order == "bad":
            raise ValueError(order)

    await publish(connection, stream, [("a", b"one"), ("a", b"bad"), ("a", b"two")])
    async with app.start() as running:
        await until(lambda: got, lambda found: found == ["one", "bad", "bad", "two"])
        assert isinstance(running.workers[f"{stream}/g"], groups.Member)
    assert failures == [1, 2]


async def test_what_cannot_start_says_why(
    connection: Connection, nats_server: NatsServer, unique: Callable[..., str]
) -> None:
    stream = unique("like-no-other-stream-here")

    async def failure(
        kind: type[Exception], *, publishes: str | None = None, name: str = stream, **options: Any
    ) -> str:
        app = App(nats_server.url)

        def bill(order: bytes):  # type: ignore[no-untyped-def]
            return order

        app.handler(name, group=options.pop("group", "g"), publish=publishes, **options)(bill)
        with pytest.raises(kind) as caught:
            await app.start()
        return str(caught.value)

    assert f"keylane stream create {stream} --partition-by 'a.*' --partitions 32" in await failure(
        NotFound, partition_by="a.*"
    )
    await make_stream(connection, stream)
    assert f"did you mean {stream!r}?" in await failure(NotFound, name=f"{stream}s")
    assert "give it partition_by" in await failure(GroupError)
    assert "no stream takes what handler" in await failure(
        GroupError, publishes="nowhere.{key}", partition_by=f"{stream}.*"
    )
    numbered = unique("app")
    await make_stream(connection, numbered, partitions=PARTITIONS)
    words = await failure(FleetError, name=numbered, partition_by=f"{numbered}.*", partitions=8)
    assert "numbers 4 partitions, and the fleet asks for 8" in words
    with pytest.raises(InvalidInput, match="the app has no handlers"):
        await App(nats_server.url).start()


async def test_a_stream_is_created_only_where_that_is_allowed(
    connection: Connection, nats_server: NatsServer, unique: Callable[..., str]
) -> None:
    stream = unique("app")
    app = App(nats_server.url, create_streams=True)
    got: list[bytes] = []

    @app.handler(stream, group="billing", partition_by=f"{stream}.*", partitions=PARTITIONS)
    async def bill(order: bytes) -> None:
        got.append(order)

    async with app.start():
        await publish(connection, stream, [("a", b"x")])
        await until(lambda: got, lambda found: found == [b"x"])
    config = (await streams.info_json(connection, stream))["config"]
    assert config["subject_transform"]["dest"] == f"{{{{Partition({PARTITIONS},1)}}}}.{stream}.{{{{Wildcard(1)}}}}"
    assert f"{stream}-billing" not in await streams.names(connection)
