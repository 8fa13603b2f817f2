"""A Marshal consumer is started, waited for and stopped as a member or a worker is, and its hooks tell of it."""

from __future__ import annotations

import asyncio

import pytest

from keylane.errors import InvalidInput, LogReplaced
from keylane.marshal import ConsumerHooks, MarshalMessage, MemorySource, RunState
from tests.integration.marshal.rig import TOPIC, LiveLog, Seen, View, consumer, fill
from tests.waiter import until


async def test_hooks_tell_of_its_states_its_partitions_and_its_end() -> None:
    log, source = LiveLog(), MemorySource({TOPIC: 2})
    told: list[object] = []
    hooks = ConsumerHooks(
        on_state=lambda state, waiting_for: told.append((str(state), waiting_for is not None)),
        on_partitions=lambda before, after: told.append((len(before), len(after))),
        on_ended=told.append,
    )
    anna = consumer(View(log), source, "anna", Seen(), hooks=hooks)
    assert (anna.state, anna.waiting_for, anna.partitions) == (RunState.NEW, None, ())
    with pytest.raises(InvalidInput, match="was not started"):
        await anna.wait()
    async with anna:
        await until(lambda: len(anna.partitions) == 2)
        assert (anna.state, anna.waiting_for) == (RunState.RUNNING, None)
    assert await anna.wait() == "stopped"
    assert (anna.state, anna.partitions) == (RunState.ENDED, ())
    assert told == [
        ("running", False), (0, 1), (1, 2), ("stopping", True), (2, 1), (1, 0), ("ended", False), "stopped"
    ]  # fmt: skip


async def test_stop_finishes_what_is_at_work_and_cancels_what_takes_too_long() -> None:
    log, source, ended = LiveLog(), MemorySource({TOPIC: 1}), list[str]()
    fill(source, 1, 1)
    goes_on, begun = asyncio.Event(), asyncio.Event()

    async def handler(_: MarshalMessage) -> None:
        begun.set()
        try:
            await goes_on.wait()
            ended.append("finished")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    anna = await consumer(View(log), source, "anna", handler, grace_s=0.01).start()
    await begun.wait()
    await anna.stop(timeout_s=0.2)
    assert ended == ["cancelled"]
    begun.clear()
    again = await consumer(View(log), source, "anna", handler, grace_s=0.01).start()
    await begun.wait()
    stopping = asyncio.create_task(again.stop())
    await until(lambda: again.state is RunState.STOPPING)
    await asyncio.sleep(0.1)
    assert not stopping.done(), "a stop waits longer than grace_s"
    goes_on.set()
    await stopping
    assert ended == ["cancelled", "finished"]


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_the_block_raises_the_error_that_ended_it_unless_wait_has(is_awaited: bool) -> None:
    log, source, reasons = LiveLog(), MemorySource({TOPIC: 1}), list[str]()
    errors: list[LogReplaced] = []
    try:
        async with consumer(View(log), source, "anna", Seen(), hooks=ConsumerHooks(on_ended=reasons.append)) as anna:
            await until(lambda: len(anna.partitions) == 1)
            log.cut_off()
            await until(lambda: anna.state is RunState.ENDED)
            if is_awaited:
                with pytest.raises(LogReplaced):
                    await anna.wait()
    except LogReplaced as error:
        errors.append(error)
    assert (len(errors), len(reasons)) == (0 if is_awaited else 1, 1)


async def test_a_hook_that_fails_ends_nothing() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    fill(source, 1, 3)

    def faulty(*_: object) -> None:
        raise RuntimeError("faulty")

    hooks = ConsumerHooks(on_claimed=faulty, on_released=faulty, on_state=faulty, on_partitions=faulty, on_ended=faulty)
    async with consumer(View(log), source, "anna", seen, hooks=hooks):
        await seen.until(lambda one: len(one.messages) == 3)
