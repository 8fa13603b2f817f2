"""Handlers of an app in processes of their own: decoded there, published here."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

import keylane
from keylane.errors import InvalidInput
from keylane.jetstream import Connection, StoredMessage, read_all, streams
from keylane.processing.dead_letters import DeadLetter, list_dead_letters
from keylane.testing import TestApp
from tests.integration.app import process_shop
from tests.integration.app.test_app import PARTITIONS, make_stream, publish
from tests.waiter import until


async def test_payloads_are_decoded_in_the_process_and_results_published_here(
    connection: Connection, unique: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = unique("app")
    monkeypatch.setenv("PROCESS_SHOP_STREAM", stream)
    shop = importlib.reload(process_shop)
    await make_stream(connection, stream, partitions=PARTITIONS)
    out = {"name": f"{stream}-out", "subjects": [f"billed.{stream}.*"], "storage": "memory", "allow_direct": True}
    await streams.create_json(connection, out)
    payloads: list[tuple[str, Any]] = [
        ("a", {"cents": 1}),
        ("b", {"cents": "much"}),
        ("a", {"cents": 2}),
        ("c", {"cents": -1}),
        ("a", {"cents": 0}),
        ("b", {"cents": 3}),
    ]
    sent = await publish(connection, stream, payloads)

    async def stored() -> list[StoredMessage]:
        return [one async for one in read_all(connection, f"{stream}-out")]

    async def letters() -> list[DeadLetter]:
        return [one async for one in list_dead_letters(connection, stream)]

    async with shop.app.start(connection=connection):
        found = await until(stored, lambda bills: len(bills) == 3, deadline_s=45)
        dead = await until(letters, lambda ones: len(ones) == 2, deadline_s=45)
    bills = [json.loads(one.data) for one in found]
    assert [one["sequence"] for one in bills if one["key"] == "a"] == [sent[0], sent[2]]
    assert [(one["key"], one["cents"]) for one in bills if one["key"] == "b"] == [("b", 3)]
    assert os.getpid() not in {one["pid"] for one in bills}
    assert {one.headers["Nats-Msg-Id"].split(" ")[2] for one in found} == {str(sent[number]) for number in (0, 2, 5)}
    told = {one.source_sequence: (one.tries, one.error) for one in dead}
    assert told[sent[3]] == (2, "ValueError: -1 cents")
    tries, error = told[sent[1]]
    assert tries == 1, "no try helps a payload that does not decode"
    assert error.startswith("InvalidPayload: no Order: ValueError: cents: 'much' is no int")


async def test_in_memory_it_runs_in_a_thread_of_the_test() -> None:
    async with TestApp(process_shop.app) as test:
        await test.publish(f"{process_shop.STREAM}.a", process_shop.Order(5))
        await test.settled()
    (bill,) = [json.loads(one.data) for one in test.published]
    assert (bill["cents"], bill["pid"]) == (5, os.getpid())


def test_what_cannot_run_in_a_process_is_refused_when_it_is_decorated() -> None:
    app = keylane.App()
    options: dict[str, Any] = {"partition_by": "orders.*"}

    async def asynchronous(order: bytes) -> None: ...

    def local(order: bytes) -> None: ...

    with pytest.raises(InvalidInput, match="is async, and executor='process' is for plain functions"):
        app.handler("ORDERS", group="a", executor="process", **options)(asynchronous)
    with pytest.raises(InvalidInput, match="is defined in a function, where another process cannot import it"):
        app.handler("ORDERS", group="b", executor="process", **options)(local)
    with pytest.raises(InvalidInput, match=r"time_limit_s needs an async handler or executor='process'"):
        app.handler("ORDERS", group="c", time_limit_s=1, **options)(local)
    with pytest.raises(InvalidInput, match=r"executor is 'fork': use one of thread, process"):
        app.handler("ORDERS", group="d", executor="fork", **options)(local)  # type: ignore[arg-type]
