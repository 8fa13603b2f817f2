"""What bounds a handler: its tries, its time, the loss of the pin, and the window that its key may fill."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keylane import groups
from keylane.errors import Fenced, InvalidInput
from keylane.groups import GroupMessage, MemberHooks
from keylane.jetstream import ConsumerConfig, streams
from tests.integration.groups.rig import Ground, active, flawless
from tests.waiter import until

PATIENT = ConsumerConfig(ack_wait_s=30.0)
"""Nothing comes again by itself while a test lasts."""


async def test_a_message_that_failed_max_tries_times_lets_its_key_go_on(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    tries: list[int] = []

    async def handler(message: GroupMessage) -> None:
        if message.data == b"poison":
            tries.append(message.sequence)
            raise ValueError("never")
        await ground.evidence.note("a", message)

    await ground.join("a", handler, max_tries=3)
    first = await ground.publish(["k"])
    [poison] = await ground.publish(["k"], b"poison")
    rest = await ground.publish(["k", "k", "other"])
    await ground.evidence.all_of([*first, *rest])
    assert flawless(ground.evidence.verdict([*first, *rest]))
    assert tries == [poison] * 3
    await ground.drained(5)
    names = await streams.names(ground.connection)
    [letters] = [name for name in names if ground.stream in name and name not in (ground.stream, f"{ground.stream}-g")]
    assert (await streams.state(ground.connection, letters)).messages == 1


async def test_without_order_the_server_counts_the_tries(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    tries: list[int] = []

    async def handler(message: GroupMessage) -> None:
        tries.append(message.delivered_count)
        raise ValueError("never")

    await ground.join("a", handler, max_tries=2, order="none")
    await ground.publish(["k"])
    await ground.drained(1)
    assert tries == [1, 2]


async def test_a_handler_that_takes_too_long_is_cancelled_and_tried_again(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    errors: list[str] = []
    cancelled: list[int] = []

    async def handler(message: GroupMessage) -> None:
        if message.key == "slow" and not errors:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(message.sequence)
                raise
        await ground.evidence.note("a", message)

    hooks = MemberHooks(on_failure=lambda _message, error, _tries: errors.append(str(error)))
    await ground.join("a", handler, time_limit_s=0.2, hooks=hooks)
    sent = await ground.publish(["slow", "slow", "quick"])
    await ground.evidence.all_of(sent)
    assert cancelled == [sent[0]]
    assert errors == ["the handler was not done within its time_limit_s of 0.2 s"]
    assert flawless(ground.evidence.verdict(sent))


async def test_a_timeout_of_the_handlers_own_is_its_own(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    errors: list[str] = []

    async def handler(message: GroupMessage) -> None:
        if not errors:
            raise TimeoutError("the database did not answer")
        await ground.evidence.note("a", message)

    hooks = MemberHooks(on_failure=lambda _message, error, _tries: errors.append(str(error)))
    await ground.join("a", handler, time_limit_s=5, hooks=hooks)
    await ground.evidence.all_of(await ground.publish(["k"]))
    assert errors == ["the database did not answer"]


@pytest.mark.parametrize("stubborn", [False, True])
async def test_when_the_pin_is_lost_handlers_have_a_grace_and_are_cancelled(ground: Ground, stubborn: bool) -> None:
    """The other instance handles the message; the first one is ready for the next ones, whatever its handler did."""
    await ground.elastic(members=["a"])
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(message: GroupMessage) -> None:
        if begun.is_set():
            await ground.evidence.note("first", message)
            return
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.set()
            if not stubborn:
                raise

    await ground.join("a", slow, grace_s=0.3)
    sent = await ground.publish(["k"])
    await begun.wait()
    second = await ground.join("a", ground.evidence.handler("second"), grace_s=0.3)
    while not active(second):
        await groups.step_down(ground.connection, ground.stream, "g", "a")
        sent += await ground.publish(["k"])
        await asyncio.sleep(0.1)
    async with asyncio.timeout(20):
        await ended.wait()
    sent += await ground.publish(["k", "other"])
    await ground.evidence.all_of(sent)
    await second.stop()
    more = await ground.publish(["k", "other"])
    await ground.evidence.all_of(more)
    assert {line.by for line in ground.evidence.lines if line.sequence in more} == {"first"}
    assert ground.evidence.verdict([*sent, *more]).clean


async def test_the_origin_of_a_message_fences_off_the_instance_before(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    origins: dict[str, Any] = {}

    def keeping(by: str) -> Any:
        async def handler(message: GroupMessage) -> None:
            origins[by] = message.origin
            await ground.evidence.note(by, message)

        return handler

    first = await ground.join("a", keeping("first"))
    await ground.evidence.all_of(await ground.publish(["k"]))
    old = origins["first"]
    assert (old.stream, old.group, old.member) == (ground.stream, "g", "a")
    token = await old.fence()
    assert token == await old.fence()
    await first.stop()
    with pytest.raises(Fenced, match="not the pinned one"):
        await old.fence()
    await ground.join("a", keeping("second"))
    await ground.evidence.all_of(await ground.publish(["k"]))
    new = origins["second"]
    assert await new.fence() > token
    assert new.instance != old.instance
    await groups.add_members(ground.connection, ground.stream, "g", ["b"])
    await until(lambda: new.revision > token[0])
    assert await new.fence() > token


async def test_a_key_that_fills_the_window_is_reported_once(ground: Ground, caplog: pytest.LogCaptureFixture) -> None:
    await ground.elastic(members=["a"])
    crowded: list[tuple[str, int]] = []
    go = asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        await go.wait()
        await ground.evidence.note("a", message)

    hooks = MemberHooks(on_crowded=lambda message, length: crowded.append((message.key, length)))
    await ground.join("a", handler, max_ack_pending=20, hooks=hooks)
    sent = await ground.publish(["hot"] * 20)
    await until(lambda: crowded)
    go.set()
    await ground.evidence.all_of(sent)
    [(key, length)] = crowded
    assert key == "hot"
    assert 10 <= length <= 20
    assert "key 'hot' wait in one lane" in caplog.text


async def nothing(message: GroupMessage) -> None:
    pass


def plain(message: GroupMessage) -> None:
    pass


@pytest.mark.parametrize(
    ("handler", "options", "why"),
    [
        (nothing, {"max_tries": 0}, "max_tries is 0: a message must be tried at least once"),
        (nothing, {"time_limit_s": 0}, "time_limit_s is 0: a handler needs some time"),
        (nothing, {"grace_s": -1}, "grace_s is -1: give 0 or more seconds"),
        (plain, {"time_limit_s": 1}, "time_limit_s needs an async handler"),
    ],
)
async def test_wrong_limits_are_refused(ground: Ground, handler: Any, options: dict[str, Any], why: str) -> None:
    await ground.elastic(members=["a"])
    with pytest.raises(InvalidInput, match=why):
        await ground.join("a", handler, **options)


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_clean_stop_repeats_nothing_though_one_key_is_far_behind(
    ground: Ground, partitioned: Ground, kind: str
) -> None:
    place = ground if kind == "elastic" else partitioned
    await (place.elastic(members=["a"]) if kind == "elastic" else place.static(members=["a"]))
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handler(message: GroupMessage) -> None:
        if message.key == "k0":
            begun.set()
            await go_on.wait()
        await place.evidence.note("first", message)

    first = await place.join("a", handler, settings=PATIENT)
    await place.asked("a")
    await place.join("a", place.evidence.handler("second"), settings=PATIENT)
    sent = await place.publish(f"k{number % 5}" for number in range(50))
    await begun.wait()
    await place.evidence.until(lambda lines: len(lines) == 40)
    stopping = asyncio.create_task(first.stop())
    await asyncio.sleep(0.2)  # nobody tells that a stop has begun
    go_on.set()
    await stopping
    await place.evidence.all_of(sent)
    sent += await place.publish(["last"])  # whatever comes again comes before it
    await place.evidence.all_of(sent)
    assert flawless(place.evidence.verdict(sent))


async def test_a_stop_does_not_wait_for_a_message_that_keeps_failing(partitioned: Ground) -> None:
    await partitioned.static(members=["a"])
    failures: list[str] = []

    async def handler(message: GroupMessage) -> None:
        if message.key == "bad":
            raise ValueError("never")
        await partitioned.evidence.note("a", message)

    hooks = MemberHooks(on_failure=lambda message, _error, _tries: failures.append(message.key))
    member = await partitioned.join("a", handler, hooks=hooks, settings=PATIENT)
    sent = await partitioned.publish(["bad", "good", "bad", "good"])
    await partitioned.evidence.all_of([sent[1], sent[3]])
    await until(lambda: failures)
    async with asyncio.timeout(20):
        await member.stop()
    second = await partitioned.join("a", settings=PATIENT)
    await partitioned.evidence.all_of(sent)
    assert active(second)
    assert partitioned.evidence.verdict(sent).clean
