"""Overflow: a reader with conditions is served only while one of them holds."""

from __future__ import annotations

import asyncio

import pytest

from keylane.errors import InvalidInput
from keylane.jetstream import Notice, consumers
from keylane.priority import consume, fetch, open_fetcher
from tests.integration.priority.conftest import GROUP, MakeGround, OpenClient, StartReader
from tests.integration.priority.evidence import judge
from tests.integration.priority.rawpull import raw_puller

QUIET_S = 0.4


async def test_nothing_at_999_and_messages_at_1000(ground: MakeGround, open_client: OpenClient) -> None:
    place = await ground("overflow", storage="memory")
    await place.publish(999)
    async with await open_fetcher(await open_client(), place.stream, place.consumer, min_pending=1000) as fetcher:
        assert await fetcher.fetch(10, timeout_s=QUIET_S) == []
        waiting = asyncio.create_task(fetcher.fetch(1, timeout_s=20))
        await place.publish(1)
        (message,) = await waiting
        message.ack()
        # 999 are left: the condition does not hold any more.
        assert await fetcher.fetch(10, timeout_s=QUIET_S) == []
    await place.acked(message.sequence)
    info = await consumers.info(place.connection, place.stream, place.consumer)
    assert (info.num_pending, info.num_ack_pending) == (999, 0)


@pytest.mark.parametrize(
    ("terms", "served"),
    [
        ({"min_pending": 3}, True),
        ({"min_pending": 4}, False),
        ({"min_ack_pending": 2}, True),
        ({"min_ack_pending": 3}, False),
        ({"min_pending": 3, "min_ack_pending": 100}, True),
        ({"min_pending": 100, "min_ack_pending": 2}, True),
        ({"min_pending": 4, "min_ack_pending": 3}, False),
    ],
)
async def test_either_condition_is_enough(
    ground: MakeGround, open_client: OpenClient, terms: dict[str, int], served: bool
) -> None:
    """Five messages, two of which somebody else works on: three wait, two are unacknowledged."""
    place = await ground("overflow", storage="memory")
    await place.publish(5)
    async with await open_fetcher(await open_client(), place.stream, place.consumer) as local:
        at_work = await local.fetch(2, timeout_s=20)
        assert len(at_work) == 2
        got = await fetch(
            await open_client(), place.stream, place.consumer, 1, timeout_s=20 if served else QUIET_S, **terms
        )
        assert [message.sequence for message in got] == ([3] if served else [])


async def test_heartbeats_flow_while_the_conditions_do_not_hold(
    ground: MakeGround, open_client: OpenClient, read: StartReader
) -> None:
    place = await ground("overflow", storage="memory")
    notices: list[Notice] = []
    connection = await open_client()
    reader = await read(
        connection,
        place,
        "reader",
        min_pending=3,
        expires_s=2.0,
        heartbeat_s=1.0,
        on_notice=notices.append,
    )
    published = await place.publish(2)
    # Two pulls that end, and heartbeats; two missed ones would be a notice.
    await asyncio.sleep(4.5)
    assert reader.log == []
    assert notices == []
    published += await place.publish(1)
    await reader.got(1)
    published += await place.publish(5)
    local = await read(await open_client(), place, "local")
    await reader.together(local, count=len(published))
    findings = judge(published, reader.log, local.log)
    assert findings.exactly_once
    assert notices == []


@pytest.mark.parametrize("first", ["eager", "picky"])
@pytest.mark.parametrize(("min_pending", "shared"), [(1, True), (2, False)])
async def test_who_is_served_with_one_in_flight(ground: MakeGround, first: str, min_pending: int, shared: bool) -> None:
    """A fact of nats-server 2.15: it looks at the conditions and otherwise takes pulls in turn.

    The design behind the policy says that a pull without conditions goes before one with min_pending 1.
    The server does not do so: the message to be delivered counts as pending, so min_pending 1 always holds,
    and the two pulls are served by turns. From min_pending 2 on the one without conditions is preferred.
    """
    place = await ground("overflow", storage="memory", max_ack_pending=1)
    second = "picky" if first == "eager" else "eager"
    served: list[str] = []
    async with (
        raw_puller(place.connection, place.stream, place.consumer) as eager,
        raw_puller(place.connection, place.stream, place.consumer) as picky,
    ):
        for name in (first, second):
            if name == "eager":
                await eager.pull(group=GROUP, batch=10)
            else:
                await picky.pull(group=GROUP, batch=10, min_pending=min_pending)
        for _ in range(4):
            await place.publish(1)
            waits = {
                asyncio.create_task(eager.answer()): "eager",
                asyncio.create_task(picky.answer()): "picky",
            }
            done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in pending:
                wait.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            (winner,) = done
            served.append(waits[winner])
            await winner.result().ack_sync()
    assert served == ([first, second] * 2 if shared else ["eager"] * 4)


async def test_terms_of_another_policy_are_refused(ground: MakeGround) -> None:
    place = await ground("overflow", storage="memory")
    for terms in ({"priority": 1}, {"reset_on_takeover": True}, {"min_pending": 0}, {"min_ack_pending": -1}):
        with pytest.raises(InvalidInput, match=next(iter(terms))):
            await consume(place.connection, place.stream, place.consumer, **terms)
    with pytest.raises(InvalidInput, match="'jobs', not 'other'"):
        await consume(place.connection, place.stream, place.consumer, group="other")
