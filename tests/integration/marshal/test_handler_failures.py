"""Handlers of a Marshal consumer that leave something in their task, or raise what is no Exception."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from keylane.errors import HandlerCrashed
from keylane.marshal import ConsumerHooks, MarshalMessage, MemorySource
from tests.integration.marshal.rig import TOPIC, LiveLog, Seen, View, consumer, fill, in_order_per_key
from tests.integration.odd_handlers import FAILING, RETURNING, Odd
from tests.waiter import until


@pytest.mark.parametrize("way", FAILING)
async def test_a_failure_is_a_failure_and_its_key_waits(way: str) -> None:
    source, seen = MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 6, keys=2)
    tried, failures = [0], []

    async def handler(message: MarshalMessage) -> None:
        if message.offset == 0 and tried[0] < 2:
            tried[0] += 1
            await FAILING[way]()
        await seen(message)

    hooks = ConsumerHooks(on_failure=lambda message, error, tries: failures.append((message.offset, tries)))
    async with consumer(View(LiveLog()), source, "one", handler, concurrency=1, hooks=hooks):
        await seen.until(lambda one: len(one.messages) == 6)
    assert set(seen.times.values()) == {1}
    assert in_order_per_key(seen.messages)
    assert failures == [(0, 1), (0, 2)]


@pytest.mark.parametrize("way", RETURNING)
async def test_a_return_is_a_success_and_harms_no_other_message(way: str) -> None:
    source, seen = MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 6, keys=2)
    failures: list[tuple[int, int]] = []
    plain_error = [True]

    async def handler(message: MarshalMessage) -> None:
        if message.key == b"k0":
            await seen(message)
            await RETURNING[way]()
            return
        await asyncio.sleep(0)
        if plain_error:
            plain_error.clear()
            raise ValueError("a plain error")
        await seen(message)

    hooks = ConsumerHooks(on_failure=lambda message, error, tries: failures.append((message.offset, tries)))
    async with consumer(View(LiveLog()), source, "one", handler, concurrency=1, hooks=hooks):
        await seen.until(lambda one: len(one.messages) == 6)
    assert set(seen.times.values()) == {1}
    assert in_order_per_key(seen.messages)
    assert failures == [(1, 1)]


@pytest.mark.parametrize("way", ["task_group", "cancelled_itself_and_raised", "cancelled_and_uncancelled_and_raised"])
async def test_what_is_given_up_is_given_up_once(way: str) -> None:
    source, seen = MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 4, keys=1)
    given_up: list[int] = []

    async def give_up(message: MarshalMessage, error: BaseException, tries: int) -> None:
        await asyncio.sleep(0.01)
        given_up.append(message.offset)

    async def handler(message: MarshalMessage) -> None:
        if message.offset == 0:
            await FAILING[way]()
        await seen(message)

    options = {"max_tries": 1, "give_up": give_up, "concurrency": 1}
    async with consumer(View(LiveLog()), source, "one", handler, **options):
        await seen.until(lambda one: len(one.messages) == 3)
    assert given_up == [0]
    assert seen.offsets == {0: [1, 2, 3]}


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("error", [Odd("no Exception"), GeneratorExit()], ids=["own class", "GeneratorExit"])
async def test_what_is_no_exception_ends_the_consumer(
    error: BaseException, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 3, keys=1)
    failures: list[tuple[int, BaseException, int]] = []

    def plain(message: MarshalMessage) -> None:
        raise error

    async def handler(message: MarshalMessage) -> None:
        plain(message)

    hooks = ConsumerHooks(on_failure=lambda message, error, tries: failures.append((message.offset, error, tries)))
    one = await consumer(View(log), source, "one", handler if kind == "async" else plain, hooks=hooks).start()
    with caplog.at_level(logging.ERROR, "keylane.marshal"), pytest.raises(HandlerCrashed) as crash:
        async with asyncio.timeout(5):
            await one.wait()
    assert crash.value.__cause__ is error
    assert str(crash.value).startswith("consumer 'one' of group 'billing' has ended: the handler raised ")
    assert failures == [(0, error, 1)]
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    begin = time.monotonic()
    await one.stop()
    assert time.monotonic() - begin < 1
    async with consumer(View(log), source, "one", seen):
        await seen.until(lambda seen: len(seen.messages) == 3)
    assert seen.offsets == {0: [0, 1, 2]}


async def test_a_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    source, seen = MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 1)
    first = [True]

    async def handler(message: MarshalMessage) -> None:
        if first:
            first.clear()
            raise ValueError("no luck")
        await seen(message)

    with caplog.at_level(logging.WARNING, "keylane.marshal"):
        async with consumer(View(LiveLog()), source, "one", handler):
            await seen.until(lambda one: len(one.messages) == 1)
    assert (
        "handler failed: consumer 'one' of group 'billing', orders/0, key b'k0', offset 0 (try 1): ValueError: no luck"
        in caplog.text
    )
    assert 'raise ValueError("no luck")' in caplog.text


def count(message: MarshalMessage) -> None:
    """Runs in another process."""
    if message.data == b"0" and not Path((message.key or b"").decode()).exists():
        Path((message.key or b"").decode()).touch()
        raise ValueError("in the other process")
    with open(f"{(message.key or b'').decode()}.done", "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {message.offset}\n")


async def test_a_plain_function_runs_in_processes(tmp_path: Path) -> None:
    source = MemorySource({TOPIC: 1})
    for number in range(4):
        source.put(TOPIC, 0, b"%d" % number, key=str(tmp_path / "one").encode())
    failures: list[str] = []
    done = tmp_path / "one.done"
    done.touch()
    hooks = ConsumerHooks(on_failure=lambda message, error, tries: failures.append(repr(error)))
    async with consumer(View(LiveLog()), source, "one", count, executor="process", hooks=hooks):
        await until(lambda: done.read_text().count("\n") == 4)
    assert failures == ["ValueError('in the other process')"]
    lines = [line.split() for line in done.read_text().splitlines()]
    assert [offset for _, offset in lines] == ["0", "1", "2", "3"]
    assert str(os.getpid()) not in {pid for pid, _ in lines}


async def test_as_many_threads_as_concurrency() -> None:
    source, together = MemorySource({TOPIC: 20}), threading.Barrier(20)
    fill(source, 20, 1)

    def handler(_: MarshalMessage) -> None:
        together.wait(20)
        done.release()

    done = threading.Semaphore(0)
    async with consumer(View(LiveLog()), source, "one", handler, concurrency=20):
        await until(lambda: done.acquire(blocking=False))
    assert not together.broken
