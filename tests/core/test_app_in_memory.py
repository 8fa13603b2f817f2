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
