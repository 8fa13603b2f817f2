"""`TestApp`: handlers in memory behave as on a server: order, retries, decoding, dead letters, results."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

import pytest

import keylane
from keylane.errors import HandlerCrashed, InvalidInput, InvalidPayload
from keylane.testing import Evidence, TestApp


@dataclass
class Order:
    cents: int


@dataclass
class Bill:
    customer: str
    cents: int


def shop(calls: list[str]) -> keylane.App:
    app = keylane.App()
    app.on_start(lambda: calls.append("start"))
    app.on_stop(lambda: calls.append("stop"))

    @app.handler("ORDERS", group="billing", partition_by="orders.*", publish="billed.{key}", max_tries=3)
    async def bill(order: Order, message: keylane.Message) -> Bill:
        calls.append(f"{message.key} {message.sequence} {order.cents}")
        await asyncio.sleep(0)
        if order.cents < 0:
            raise ValueError("less than nothing")
        return Bill(message.key, order.cents)

    @app.handler("BILLED", group="mail", partition_by="billed.*", publish="mailed.{key}")
    def mail(bill: Bill) -> str:
        assert threading.current_thread() is not threading.main_thread()
        return f"{bill.cents} for {bill.customer}"

    return app


async def test_messages_flow_through_the_handlers_and_results_are_seen() -> None:
    calls: list[str] = []
    async with TestApp(shop(calls)) as test:
        await test.publish("orders.ann", Order(5))
        await test.publish("orders.ann", {"cents": 7})
        await test.settled()
        mails = [(one.subject, one.data) for one in test.published if one.subject.startswith("mailed")]
    assert mails == [("mailed.ann", b"5 for ann"), ("mailed.ann", b"7 for ann")]
    assert calls == ["start", "ann 1 5", "ann 2 7", "stop"]
    assert [one.message_id.split(" ")[:3] for one in test.published if one.message_id][:1] == [
        ["ORDERS", "billing", "1"]
    ]


async def test_a_failing_message_holds_its_key_and_becomes_a_dead_letter() -> None:
    calls: list[str] = []
    async with TestApp(shop(calls)) as test:
        await test.publish("orders.ann", Order(-1))
        await test.publish("orders.ann", Order(2))
        await test.publish("orders.bob", b"no json")
        await test.settled()
    assert [one for one in calls if one.startswith("ann")] == ["ann 1 -1"] * 3 + ["ann 2 2"]
    letters = {one.message.key: one for one in test.dead_letters}
    assert (letters["ann"].tries, str(letters["ann"].error)) == (3, "less than nothing")
    assert letters["bob"].tries == 1
    assert isinstance(letters["bob"].error, InvalidPayload)


async def test_what_does_not_end_and_what_goes_nowhere_is_said() -> None:
    app = keylane.App()

    @app.handler("ORDERS", group="g", partition_by="orders.*")
    async def handle(order: bytes) -> None:
        if order == b"crash":
            raise KeyboardInterrupt
        raise ValueError(order)

    @app.handler("OTHER", group="g")
    async def other(order: bytes) -> None: ...

    async with TestApp(app) as test:
        with pytest.raises(InvalidInput, match=r"no handler takes 'bills.1'"):
            await test.publish("bills.1")
        await test.publish("anything", stream="OTHER")
        await test.settled()
        await test.publish("orders.1", b"x")
        with pytest.raises(TimeoutError, match=r"not everything was handled within 0.1 s: ORDERS/g"):
            await test.settled(0.1)


async def test_a_crash_is_raised() -> None:
    class Crash(BaseException):
        pass

    app = keylane.App()

    @app.handler("ORDERS", group="g", partition_by="orders.*")
    async def handle(order: bytes) -> None:
        raise Crash

    async with TestApp(app) as test:
        await test.publish("orders.1", b"x")
        with pytest.raises(HandlerCrashed):
            await test.settled()


def test_evidence() -> None:
    evidence = Evidence()
    evidence.sent(1, 2, 3, 4)
    for key, sequence in (("a", 2), ("a", 1), ("b", 3), ("b", 3)):
        evidence.handled(key, sequence)
    assert (evidence.lost, evidence.duplicated, evidence.out_of_order) == ((4,), (3,), (1,))


async def test_a_delayed_retry_lets_its_key_go_on_and_waits_for_nothing_in_a_test() -> None:
    app = keylane.App()
    calls: list[tuple[int, int]] = []

    @app.handler("ORDERS", group="g", partition_by="orders.*", publish="done.{key}", retry_delays=(60, 600))
    async def handle(order: Order, message: keylane.Message) -> str:
        calls.append((message.sequence, message.delivered_count))
        if order.cents < 0 and (order.cents < -1 or message.delivered_count < 3):
            raise ValueError("later")
        return f"{message.subject} {message.headers.get('trace')}"

    async with TestApp(app) as test:
        await test.publish("orders.ann", Order(-1), headers={"trace": "7"})
        await test.publish("orders.ann", Order(2))
        await test.publish("orders.bob", Order(-2))
        await test.publish("orders.bob", b"no json")
        await test.settled()
    assert sorted(calls[:3]) == [(1, 1), (2, 1), (3, 1)]
    assert sorted(calls[3:]) == [(1, 2), (1, 3), (3, 2), (3, 3)]
    assert [one.data for one in test.published] == [b"orders.ann None", b"orders.ann 7"]
    assert [one.message_id.split(" ")[:3] for one in test.published if one.message_id][1] == ["ORDERS", "g", "1"]
    assert [(one.message.sequence, one.tries, one.delay_s) for one in test.delays if one.message.key == "ann"] == [
        (1, 1, 60.0),
        (1, 2, 600.0),
    ]
    assert [(one.message.sequence, one.tries) for one in test.dead_letters] == [(4, 1), (3, 3)]


def parking(calls: list[int], broken: set[str]) -> keylane.App:
    app = keylane.App()

    @app.handler("ORDERS", group="g", partition_by="orders.*", max_tries=2, after_tries="park")
    async def handle(order: Order, message: keylane.Message) -> None:
        calls.append(message.sequence)
        if message.key in broken:
            raise ValueError("no account")

    return app


async def test_a_key_is_parked_and_released_in_order_as_on_a_server() -> None:
    calls: list[int] = []
    broken = {"ann"}
    async with TestApp(parking(calls, broken)) as test:
        for number, key in enumerate(("ann", "bob", "ann", "ann", "bob")):
            await test.publish(f"orders.{key}", Order(number))
        await test.settled()
        assert sorted(calls) == [1, 1, 2, 5]
        assert [(one.message.sequence, one.tries) for one in test.parked] == [(1, 2), (3, 0), (4, 0)]
        assert "no account" in str(test.parked[0].error)
        assert test.dead_letters == []

        assert await test.release("g", "ann") == 3, "it fails again, and the key stays parked"
        await test.publish("orders.ann", Order(9))
        await test.settled()
        assert [one.message.sequence for one in test.parked] == [1, 3, 4, 6]

        broken.clear()
        calls.clear()
        assert await test.release("g", "ann") == 0
        await test.publish("orders.ann", Order(10))
        await test.settled()
        assert calls == [1, 3, 4, 6, 7]
        assert test.parked == []
        with pytest.raises(InvalidInput, match="key 'ann' of group 'g' is not parked"):
            await test.release("g", "ann")


async def test_what_is_published_during_a_release_waits_behind_the_others() -> None:
    calls: list[int] = []
    broken = {"ann"}
    app = parking(calls, broken)
    async with TestApp(app) as test:
        await test.publish("orders.ann", Order(1))
        await test.publish("orders.ann", Order(2))
        await test.settled()
        broken.clear()
        calls.clear()
        _, left, _ = await asyncio.gather(
            test.publish("orders.ann", Order(3)), test.release("g", "ann"), test.publish("orders.ann", Order(4))
        )
        await test.settled()
        assert (calls, left, test.parked) == ([1, 2, 3, 4], 0, [])
