"""Handlers that use task groups, timeouts and cancel scopes: what comes out of them is never taken for our doing."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from keylane.dead_letters import list_dead_letters
from keylane.groups import GroupMessage, MemberHooks
from keylane.jetstream import ConsumerConfig
from tests.integration.groups.rig import Ground, active, flawless
from tests.integration.odd_handlers import FAILING, RETURNING, caught_a_task_group
from tests.waiter import until

CALM = ConsumerConfig(ack_wait_s=20.0)
"""Nothing is delivered again during a test, so every second effect is a fault."""


class Failures(list[tuple[int, str, int]]):
    """What `on_failure` was told."""

    def __call__(self, message: GroupMessage, error: BaseException, tries: int) -> None:
        self.append((message.sequence, type(error).__name__, tries))

    @property
    def hooks(self) -> MemberHooks:
        return MemberHooks(on_failure=self)


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("way", FAILING)
async def test_a_failure_is_a_failure_and_its_key_waits(ground: Ground, way: str, concurrency: int) -> None:
    await ground.elastic(members=["a"])
    sent = await ground.publish(["bad", "good", "bad", "bad", "good", "bad"])
    failures = Failures()
    tried: list[int] = []

    async def handler(message: GroupMessage) -> None:
        if message.sequence == sent[0] and len(tried) < 2:
            tried.append(message.delivered_count)
            await FAILING[way]()
        await ground.evidence.note("a", message)

    await ground.join("a", handler, concurrency=concurrency, settings=CALM, hooks=failures.hooks)
    await ground.evidence.all_of(sent, 10)
    assert flawless(ground.evidence.verdict(sent))
    assert [(sequence, tries) for sequence, _, tries in failures] == [(sent[0], 1), (sent[0], 2)]
    assert tried == [1, 1], "tried again here, and not delivered again"
    await ground.drained(len(sent))


@pytest.mark.parametrize("way", RETURNING)
async def test_a_return_is_a_success_and_harms_no_other_message(ground: Ground, way: str) -> None:
    """One worker for all: whatever the first handler left in its task must not reach the second."""
    await ground.elastic(members=["a"])
    sent = await ground.publish(["odd", "plain", "plain", "odd", "plain", "odd"])
    failures, plain_error = Failures(), [True]

    async def handler(message: GroupMessage) -> None:
        if message.key == "odd":
            await ground.evidence.note("a", message)
            await RETURNING[way]()
            return
        await asyncio.sleep(0)
        if plain_error:
            plain_error.clear()
            raise ValueError("a plain error")
        await ground.evidence.note("a", message)

    await ground.join("a", handler, concurrency=1, max_tries=2, settings=CALM, hooks=failures.hooks)
    await ground.evidence.all_of(sent, 10)
    assert flawless(ground.evidence.verdict(sent))
    assert failures == [(sent[1], "ValueError", 1)]
    await ground.drained(len(sent))


@pytest.mark.parametrize("way", FAILING)
async def test_what_fails_for_good_becomes_one_dead_letter(ground: Ground, way: str) -> None:
    """The letter is stored by us: what the handler left in its task must not cut that short."""
    await ground.elastic(members=["a"])
    sent = await ground.publish(["bad", "bad", "good", "bad"])
    failures = Failures()

    async def handler(message: GroupMessage) -> None:
        if message.sequence == sent[0]:
            await FAILING[way]()
        await ground.evidence.note("a", message)

    await ground.join("a", handler, concurrency=1, max_tries=1, settings=CALM, hooks=failures.hooks)
    await ground.evidence.all_of(sent[1:], 10)
    assert flawless(ground.evidence.verdict(sent[1:]))
    assert [(sequence, tries) for sequence, _, tries in failures] == [(sent[0], 1)]
    letters = [one async for one in list_dead_letters(ground.connection, ground.stream)]
    assert [(one.source_sequence, one.tries) for one in letters] == [(sent[0], 1)]
    await ground.drained(len(sent))


async def test_a_time_limit_counts_though_a_task_group_failed_before(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    sent = await ground.publish(["k", "k", "k"])
    failures, first = Failures(), [True]

    async def handler(message: GroupMessage) -> None:
        if first:
            first.clear()
            await caught_a_task_group()
            await asyncio.sleep(60)
        await ground.evidence.note("a", message)

    await ground.join("a", handler, time_limit_s=0.1, settings=CALM, hooks=failures.hooks)
    await ground.evidence.all_of(sent, 10)
    assert flawless(ground.evidence.verdict(sent))
    assert failures == [(sent[0], "TimeoutError", 1)]


async def test_a_task_that_somebody_cancels_later_costs_nothing(ground: Ground) -> None:
    """A handler gave its task away; it is cancelled while the worker waits for the next message."""
    await ground.elastic(members=["a"])
    tasks: list[asyncio.Task[object]] = []

    async def handler(message: GroupMessage) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        await ground.evidence.note("a", message)

    failures = Failures()
    await ground.join("a", handler, concurrency=1, settings=CALM, hooks=failures.hooks)
    first = await ground.publish(["k"])
    await ground.evidence.all_of(first, 10)
    await ground.drained(1)
    tasks[0].cancel()
    rest = await ground.publish(["k", "k"])
    await ground.evidence.all_of(rest, 10)
    assert tasks[0].cancelled()
    assert failures == []


@pytest.mark.parametrize("answer", ["raises", "swallows", "fails a task group"])
async def test_our_own_cancellation_is_no_failure(ground: Ground, answer: str) -> None:
    """`stop` gives up waiting and cancels: whatever the handler makes of that, the next instance has the message."""
    await ground.elastic(members=["a"])
    sent = await ground.publish(["k", "k"])
    failures, at_work = Failures(), asyncio.Event()

    async def handler(_: GroupMessage) -> None:
        at_work.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if answer == "raises":
                raise
            if answer == "fails a task group":
                with suppress(ExceptionGroup):
                    await caught_a_task_group()
                raise ValueError("cleaning up") from None

    first = await ground.join("a", handler, settings=CALM, hooks=failures.hooks)
    await at_work.wait()
    await first.stop(timeout_s=0.1)
    assert failures == []
    second = await ground.join("a", settings=CALM)
    await until(lambda: active(second))
    expected = sent[1:] if answer == "swallows" else sent
    await ground.evidence.all_of(expected, 10)
    assert flawless(ground.evidence.verdict(expected))
