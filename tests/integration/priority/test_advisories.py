"""What the server announces when a pin comes and goes, and how it reads here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

import keylane
from keylane.errors import Disconnected, InvalidInput
from keylane.priority import Pinned, Unpinned, advisories, consume, unpin
from keylane.server import NatsServer
from tests.integration.priority.conftest import GROUP, Ground, MakeGround, OpenClient

TIMEOUT_S = 3


async def take(events: AsyncIterator[Pinned | Unpinned]) -> Pinned | Unpinned:
    async with asyncio.timeout(20):
        return await anext(events)


async def one_life(place: Ground, open_client: OpenClient) -> list[str]:
    """A pin by delivery, an unpin by an admin, a pin again, and a timeout. Returns the two pin ids."""
    connection = await open_client()
    told: list[str] = []
    feed = await consume(connection, place.stream, place.consumer, on_pinned=told.append)
    await place.publish(1)
    first = await feed.next(20)
    assert first is not None
    first.ack()
    await unpin(place.connection, place.stream, place.consumer)
    await place.publish(1)
    second = await feed.next(20)
    assert second is not None
    await second.ack_confirmed()
    await connection.close()  # without a word: the pin runs out
    return told


def expected(place: Ground, pins: list[str]) -> list[tuple[type, str, str, str, str]]:
    where = (place.stream, place.consumer, GROUP)
    return [
        (Pinned, *where, pins[0]),
        (Unpinned, *where, "admin"),
        (Pinned, *where, pins[1]),
        (Unpinned, *where, "timeout"),
    ]


def facts(event: Pinned | Unpinned) -> tuple[type, str, str, str, str]:
    about = event.pin_id if isinstance(event, Pinned) else event.reason
    return (type(event), event.stream, event.consumer, event.group, about)


async def test_each_switch_of_one_consumer(ground: MakeGround, open_client: OpenClient) -> None:
    place = await ground("pinned_client", priority_timeout_s=TIMEOUT_S)
    other = await ground("pinned_client", priority_timeout_s=TIMEOUT_S)
    started = datetime.now(UTC)
    async with advisories(place.connection, place.stream, place.consumer) as events:
        await one_life(other, open_client)
        pins = await one_life(place, open_client)
        seen = [await take(events) for _ in range(4)]
    assert [facts(event) for event in seen] == expected(place, pins)
    times = [event.time for event in seen]
    assert times == sorted(times)
    assert timedelta(seconds=-1) < times[0] - started < timedelta(seconds=60)
    assert times[3] - times[2] >= timedelta(seconds=0.9 * TIMEOUT_S)


async def test_all_consumers(ground: MakeGround, open_client: OpenClient) -> None:
    places = [await ground("pinned_client", priority_timeout_s=TIMEOUT_S) for _ in range(2)]
    connection = places[0].connection
    names = {place.stream for place in places}
    async with advisories(connection) as events, advisories(connection, places[1].stream) as of_stream:
        lives = await asyncio.gather(*(one_life(place, open_client) for place in places))
        seen: list[Pinned | Unpinned] = []
        while len(seen) < 8:
            event = await take(events)
            if event.stream in names:  # other tests share the server
                seen.append(event)
        of_second = [await take(of_stream) for _ in range(4)]
    for place, pins in zip(places, lives, strict=True):
        mine = [facts(event) for event in seen if event.stream == place.stream]
        assert mine == expected(place, pins)
    assert [facts(event) for event in of_second] == expected(places[1], lives[1])


async def test_a_closed_connection_ends_them_with_an_error(nats_server: NatsServer) -> None:
    connection = await keylane.connect(nats_server.url)
    async with advisories(connection) as events:
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        await connection.close()
        with pytest.raises(Disconnected, match="no more advisories"):
            await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize(("stream", "consumer"), [("a.b", None), ("*", None), ("A", "x.y"), ("A", ">")])
async def test_bad_names_are_refused(ground: MakeGround, stream: str, consumer: str | None) -> None:
    place = await ground("pinned_client")
    with pytest.raises(InvalidInput):
        async with advisories(place.connection, stream, consumer):
            pass
