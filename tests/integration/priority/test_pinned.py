"""One reader is pinned and the others wait: who receives, and how the pin moves while everybody lives."""

from __future__ import annotations

import asyncio
import time

import pytest

from keylane.errors import InvalidInput
from keylane.jetstream import consumers
from keylane.priority import ConsumerConfig, consume, group_state, unpin, update
from tests.integration.priority.conftest import GROUP, MakeGround, OpenClient, StartReader
from tests.integration.priority.evidence import judge, receivers
from tests.waiter import until

AT_ONCE_S = 10.0
"""Far below the 30 s of one who waits for the pin's timeout or the ack wait; the machine may be slow."""


async def test_of_five_clients_one_receives(ground: MakeGround, open_client: OpenClient, read: StartReader) -> None:
    place = await ground("pinned_client", priority_timeout_s=30)
    told: list[str] = []
    readers = [await read(await open_client(), place, f"reader-{number}", on_pinned=told.append) for number in range(5)]
    published: list[int] = []
    for _ in range(3):
        published += await place.publish(40)
        await readers[0].together(*readers[1:], count=len(published))
    logs = {one.name: one.log for one in readers}
    assert len(receivers(logs)) == 1, logs
    assert judge(published, *logs.values()).exactly_once_in_order
    pinned = [one for one in readers if one.feed.is_pinned]
    state = await group_state(place.connection, place.stream, place.consumer)
    assert [one.feed.pin_id for one in pinned] == told == [state.pinned_client_id]
    assert state.pinned_since is not None
    for one in readers:
        await one.stop()


async def test_an_admin_moves_the_pin_at_once(ground: MakeGround, open_client: OpenClient, read: StartReader) -> None:
    place = await ground("pinned_client", priority_timeout_s=30)
    lost: list[str] = []
    first = await read(await open_client(), place, "first", on_unpinned=lost.append)
    published = await place.publish(1)
    await place.acked(published[-1])
    second = await read(await open_client(), place, "second")
    pin_id = first.feed.pin_id
    await unpin(place.connection, place.stream, place.consumer)
    asked_at = time.monotonic()
    published += await place.publish(1)
    assert (await second.got(1)).at - asked_at < AT_ONCE_S
    await until(lambda: lost)  # the first one is told over a link of its own
    assert lost == [pin_id]
    assert not first.feed.is_pinned
    assert second.feed.is_pinned
    assert judge(published, first.log, second.log).exactly_once_in_order
    await first.stop()
    await second.stop()


async def test_the_old_one_can_be_pinned_again(ground: MakeGround, open_client: OpenClient, read: StartReader) -> None:
    """With nobody else waiting, an unpinned reader gets a new pin for its next message."""
    place = await ground("pinned_client", priority_timeout_s=30)
    pinned: list[str] = []
    lost: list[str] = []
    only = await read(await open_client(), place, "only", on_pinned=pinned.append, on_unpinned=lost.append)
    published = await place.publish(3)
    await place.acked(published[-1])
    await unpin(place.connection, place.stream, place.consumer)
    published += await place.publish(3)
    await only.got(6)
    assert len(set(pinned)) == 2
    assert lost == pinned[:1]
    assert judge(published, only.log).exactly_once_in_order
    await only.stop()


async def test_a_clean_stop_hands_over_at_once(ground: MakeGround, open_client: OpenClient, read: StartReader) -> None:
    place = await ground("pinned_client", priority_timeout_s=30, max_ack_pending=100, ack_wait_s=30)
    first = await read(await open_client(), place, "first", max_messages=50, handle_s=0.01)
    published = await place.publish(300)
    await first.got(20)
    second = await read(await open_client(), place, "second")
    stopping_at = time.monotonic()
    await first.stop()
    took_over = await second.got(1)
    assert took_over.at - stopping_at < AT_ONCE_S
    await second.got(300 - len(first.log))
    assert judge(published, first.log, second.log).exactly_once_in_order
    await second.stop()


async def test_a_clean_stop_with_a_full_window_hands_over_at_once(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """All that the consumer may deliver waits unread in one reader: nothing else could be delivered."""
    place = await ground("pinned_client", priority_timeout_s=30, max_ack_pending=5, ack_wait_s=30)
    feed = await consume(await open_client(), place.stream, place.consumer)
    published = await place.publish(10)
    message = await feed.next(5)
    assert message is not None
    second = await read(await open_client(), place, "second")
    stopping_at = time.monotonic()
    await feed.stop()
    took_over = await second.got(1)
    assert took_over.at - stopping_at < AT_ONCE_S
    await second.got(10)
    assert judge(published, second.log).exactly_once_in_order
    await second.stop()


async def test_a_stop_during_the_takeover_hands_over_at_once(
    ground: MakeGround, open_client: OpenClient, read: StartReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that has the pin and waits for its reset must not keep it when it is closed."""
    place = await ground("pinned_client", priority_timeout_s=30)
    first = await read(await open_client(), place, "first")
    published = await place.publish(1)
    await first.got(1)
    asked = asyncio.Event()

    async def never(*_: object, **__: object) -> int:
        asked.set()
        await asyncio.Event().wait()
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(consumers, "reset", never)
        second = await read(await open_client(), place, "second")
        await first.stop()
        published += await place.publish(1)
        await asyncio.wait_for(asked.wait(), 20)
    await second.stop()
    third = await read(await open_client(), place, "third")
    await third.got(1)
    assert judge(published, first.log, second.log, third.log).exactly_once_in_order
    await third.stop()


async def test_a_stop_does_not_take_the_pin_from_another(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """The server clears whatever pin there is: a reader that lost its own must not ask it to."""
    place = await ground("pinned_client", priority_timeout_s=30)
    feed = await consume(await open_client(), place.stream, place.consumer)
    await place.publish(1)
    message = await feed.next(5)
    assert message is not None
    message.ack()
    # The pin moves while `feed` has no way to hear of it.
    await feed.drain()
    assert feed.is_pinned
    await unpin(place.connection, place.stream, place.consumer)
    other = await read(await open_client(), place, "other")
    await place.publish(1)
    await other.got(1)
    held = (await group_state(place.connection, place.stream, place.consumer)).pinned_client_id
    await feed.stop()
    assert (await group_state(place.connection, place.stream, place.consumer)).pinned_client_id == held
    await other.stop()


@pytest.mark.long("waits for several times the timeout of a pin")
async def test_a_reader_that_does_not_read_keeps_its_pin(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """Its buffer is full, so it can ask for nothing; a sign of life keeps the pin over several timeouts."""
    place = await ground("pinned_client", priority_timeout_s=3, max_ack_pending=100, ack_wait_s=30)
    lost: list[str] = []
    feed = await consume(await open_client(), place.stream, place.consumer, max_messages=10, on_unpinned=lost.append)
    published = await place.publish(30)
    first = await feed.next(5)
    assert first is not None
    other = await read(await open_client(), place, "other")
    pin_id = feed.pin_id
    await asyncio.sleep(6.5)  # nothing happens: that is what is tested
    state = await group_state(place.connection, place.stream, place.consumer)
    assert state.pinned_client_id == pin_id
    assert not lost
    assert not other.log
    rest = [message for _ in range(29) if (message := await feed.next(5)) is not None]
    assert [first.sequence, *(message.sequence for message in rest)] == published
    assert {message.delivered_count for message in rest} == {1}
    await feed.stop()
    await other.stop()


async def test_a_blocked_event_loop_asks_before_it_goes_on(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    """The pin counts from the last pull: a standstill shorter than the timeout can be enough to lose it."""
    timeout_s = 3.0
    place = await ground("pinned_client", priority_timeout_s=timeout_s, max_ack_pending=100, ack_wait_s=30)
    lost: list[str] = []
    feed = await consume(await open_client(), place.stream, place.consumer, max_messages=10, on_unpinned=lost.append)
    published = await place.publish(30)
    first = await feed.next(5)
    assert first is not None
    assert first.sequence == published[0]
    await until(lambda: time.monotonic() - feed._pulls.asked_at, lambda age_s: age_s >= timeout_s / 4)
    time.sleep(0.85 * timeout_s)  # noqa: ASYNC251 - a handler that blocks the loop is what is tested
    second = await feed.next(5)
    # Nobody else waits: the server unpinned us and pins us again. What was buffered comes again, in order.
    assert second is not None
    assert second.sequence == published[0]
    assert len(lost) == 1
    await feed.stop()


async def test_an_answer_that_comes_after_the_end_is_not_passed_on(
    ground: MakeGround, open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for when the pin was in doubt. By now the one who read here may read anew, under another pin."""
    place = await ground("pinned_client", priority_timeout_s=30)
    lost: list[str] = []
    feed = await consume(await open_client(), place.stream, place.consumer, on_unpinned=lost.append)
    await place.publish(1)
    assert await feed.next(5) is not None
    pin = feed._pin
    assert pin is not None
    ended = asyncio.Event()

    async def denied() -> bool:
        await ended.wait()
        return False

    monkeypatch.setattr(pin, "is_ours", denied)
    feed._pulls.asked_at = pin._doubted_at = time.monotonic() - 3600
    assert not feed.may_hand_out()
    (asking,) = [one for one in pin._tasks if "_verify" in repr(one.get_coro())]
    await feed.drain()
    ended.set()
    await asyncio.wait({asking}, timeout=5)
    assert asking.done()
    assert lost == []


@pytest.mark.parametrize(("timeout_s", "expires_s"), [(1.0, 0.6), (2.0, 2.0), (0.5, 30.0)])
async def test_a_pin_that_would_flap_is_refused(ground: MakeGround, timeout_s: float, expires_s: float) -> None:
    place = await ground("pinned_client", priority_timeout_s=timeout_s)
    with pytest.raises(InvalidInput) as refused:
        await consume(place.connection, place.stream, place.consumer, expires_s=expires_s)
    for number in (timeout_s, expires_s, timeout_s / 2, 2 * expires_s):
        assert f"{number:g}" in str(refused.value)


async def test_the_timeout_can_be_updated_and_counts_at_once(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    place = await ground("pinned_client", priority_timeout_s=30)
    info = await update(
        place.connection,
        place.stream,
        ConsumerConfig(
            durable_name="workers",
            priority_groups=(GROUP,),
            priority_policy="pinned_client",
            priority_timeout_s=1,
        ),
    )
    assert info.config.priority_timeout_s == 1
    with pytest.raises(InvalidInput, match=r"0\.5 or less"):
        await consume(place.connection, place.stream, place.consumer, expires_s=0.9)
