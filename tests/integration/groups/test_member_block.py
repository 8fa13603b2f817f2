"""`async with groups.join(...)`: however the block is left, the member finishes its work and hands over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from keylane import groups
from keylane.errors import GroupEnded, InvalidInput
from keylane.groups import GroupMessage
from keylane.jetstream import ConsumerConfig, streams
from tests.integration.groups.rig import LONG_S, Ground

SLOW = ConsumerConfig(ack_wait_s=20.0)
"""A pin that moves by its timeout moves after 20 s: what is quicker was handed over."""


async def make_group(ground: Ground) -> None:
    await groups.create_elastic(
        ground.connection, ground.stream, "g", partitions=4, partition_by=f"{ground.stream}.*", members=["a"]
    )


class Work:
    """A handler that takes as long as the test says."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.done: list[int] = []

    async def handle(self, message: GroupMessage) -> None:
        self.begun.set()
        await self.may_end.wait()
        self.done.append(message.sequence)


async def pending(ground: Ground) -> int:
    """What the queue still has: neither acked nor handled by another."""
    return (await streams.state(ground.connection, f"{ground.stream}-g")).messages


async def leave_by_return(work: Work) -> None:
    work.may_end.set()


async def leave_by_error(work: Work) -> None:
    asyncio.get_running_loop().call_later(0.1, work.may_end.set)
    raise ValueError("the body failed")


async def leave_by_cancellation(work: Work) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(0.1, work.may_end.set)
    task.cancel()
    await asyncio.sleep(LONG_S)


@pytest.mark.parametrize(
    ("leave", "error"),
    [(leave_by_return, None), (leave_by_error, ValueError), (leave_by_cancellation, asyncio.CancelledError)],
)
async def test_leaving_finishes_what_is_at_work_and_hands_over(
    ground: Ground, leave: Callable[[Work], object], error: type[BaseException] | None
) -> None:
    await make_group(ground)
    [sequence] = await ground.publish(["k1"])
    work = Work()

    async def take_part() -> None:
        async with groups.join(ground.connection, ground.stream, "g", "a", work.handle, settings=SLOW) as member:
            await work.begun.wait()
            leaving = leave(work)
            assert asyncio.iscoroutine(leaving)
            await leaving
        assert "ended" in repr(member)

    async with asyncio.timeout(LONG_S):
        [ended] = await asyncio.gather(asyncio.create_task(take_part()), return_exceptions=True)
        assert type(ended) is (error or type(None))
        assert work.done == [sequence]
        assert await pending(ground) == 0
        more = await ground.publish(["k1", "k1"])
        async with groups.join(
            ground.connection, ground.stream, "g", "a", ground.evidence.handler("next"), settings=SLOW
        ):
            await ground.evidence.all_of(more, deadline_s=10)
    assert [line.sequence for line in ground.evidence.lines] == more


async def test_leaving_has_a_deadline(ground: Ground) -> None:
    """A handler that does not end is cancelled, and its message is the next one's first."""
    await make_group(ground)
    [sequence] = await ground.publish(["k1"])
    work = Work()
    async with asyncio.timeout(LONG_S):
        async with groups.join(
            ground.connection, ground.stream, "g", "a", work.handle, settings=SLOW, stop_timeout_s=0.2
        ):
            await work.begun.wait()
        async with groups.join(
            ground.connection, ground.stream, "g", "a", ground.evidence.handler("next"), settings=SLOW
        ):
            await ground.evidence.all_of([sequence], deadline_s=10)
    assert work.done == []


async def test_the_deadline_is_checked(ground: Ground) -> None:
    await make_group(ground)
    with pytest.raises(InvalidInput, match="stop_timeout_s"):
        await groups.join(ground.connection, ground.stream, "g", "a", Work().handle, stop_timeout_s=0)


async def test_wait_is_cancelled_and_the_block_stops_the_member(ground: Ground) -> None:
    await make_group(ground)
    joined, reasons = asyncio.Event(), list[str]()
    hooks = groups.MemberHooks(on_activated=joined.set, on_ended=reasons.append)

    async def main() -> None:
        async with groups.join(
            ground.connection, ground.stream, "g", "a", ground.evidence.handler("a"), hooks=hooks
        ) as member:
            await member.wait()

    task = asyncio.create_task(main())
    await ground.publish(["k1"])
    async with asyncio.timeout(LONG_S):
        await joined.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert reasons == ["stopped"]


async def test_an_awaited_member_is_stopped_by_whoever_has_it(ground: Ground) -> None:
    await make_group(ground)
    arguments = (ground.connection, ground.stream, "g", "a", ground.evidence.handler("a"))
    member = await groups.join(*arguments)
    await member.stop()
    assert await member.wait() == "stopped"
    async with await groups.join(*arguments) as again:
        await ground.evidence.all_of(await ground.publish(["k1"]))
        await again.stop()
    assert await again.wait() == "stopped"
    third = await asyncio.create_task(groups.join(*arguments))
    await third.stop()


async def test_what_ended_the_member_is_raised_when_the_block_is_left(ground: Ground) -> None:
    await make_group(ground)
    ended = asyncio.Event()
    hooks = groups.MemberHooks(on_ended=lambda _: ended.set())
    arguments = (ground.connection, ground.stream, "g", "a", ground.evidence.handler("a"))

    async def main() -> None:
        async with groups.join(*arguments, hooks=hooks), asyncio.timeout(LONG_S):
            await streams.delete(ground.connection, f"{ground.stream}-g")
            await ended.wait()

    with pytest.raises(GroupEnded, match="does not exist any more"):
        await main()


async def test_what_wait_has_raised_is_not_raised_again(ground: Ground) -> None:
    await make_group(ground)
    arguments = (ground.connection, ground.stream, "g", "a", ground.evidence.handler("a"))
    async with groups.join(*arguments) as member, asyncio.timeout(LONG_S):
        await streams.delete(ground.connection, f"{ground.stream}-g")
        with pytest.raises(GroupEnded, match="does not exist any more"):
            await member.wait()
