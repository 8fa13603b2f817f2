"""A reader that takes the pin of one that is gone, or is given it, has it then, and reads on in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from nats.aio.msg import Msg

import keylane
from keylane import Connection
from keylane.jetstream import Feed, FeedOptions, Message, PinOptions, consumers, open_feed
from keylane.server import NatsServer
from tests.integration.jetstream.rig import fill, make_consumer, make_stream
from tests.waiter import until

GROUP = "readers"
PIN_TIMEOUT_S = 60.0
"""Nobody gets a pin by waiting for its timeout."""


PINNED: dict[str, Any] = {
    "priority_groups": (GROUP,),
    "priority_policy": "pinned_client",
    "priority_timeout_s": PIN_TIMEOUT_S,
}


class Reader:
    """Reads, and acks no more than this many."""

    def __init__(self, acks: int = 0) -> None:
        self.seen: list[int] = []
        self._acks = acks

    def _take(self, batch: list[Message]) -> None:
        for message in batch:
            self.seen.append(message.sequence)
            if len(self.seen) <= self._acks:
                message.ack()

    async def has_ten(self) -> None:
        await until(lambda: len(self.seen) >= 10, deadline_s=5.0)

    async def open(self, connection: Connection, stream: str, consumer: str) -> Feed:
        options = FeedOptions(
            max_messages=10,
            expires_s=PIN_TIMEOUT_S / 2,
            pull_fields={"group": GROUP},
            pin=PinOptions(group=GROUP, timeout_s=PIN_TIMEOUT_S, reset_on_takeover=True),
            on_messages=self._take,
        )
        return await open_feed(connection, stream, consumer, options)


@pytest.mark.parametrize("max_ack_pending", [10, 1000], ids=["all in flight", "more to deliver"])
async def test_a_pin_that_is_taken_is_ours_at_once(
    nats_server: NatsServer, connection: Connection, unique: Callable[..., str], max_ack_pending: int
) -> None:
    stream = await make_stream(connection, unique("PIN"))
    consumer = await make_consumer(connection, stream, max_ack_pending=max_ack_pending, **PINNED)
    await fill(connection, stream, 500)
    for _ in range(5):
        before, after = Reader(), Reader()
        gone = await keylane.connect(nats_server.url)
        feed = await before.open(gone, stream, consumer)
        await feed.take_pin()
        await before.has_ten()
        standby = await after.open(connection, stream, consumer)
        await gone.close()
        await standby.take_pin()
        await after.has_ten()
        assert after.seen[:10] == list(range(1, 11)), "nothing is acked: it comes again from the beginning"
        info = await consumers.info(connection, stream, consumer)
        assert [one.pinned_client_id for one in info.priority_groups] == [standby.pin_id]
        await standby.stop()


async def test_a_pin_that_is_handed_over_needs_no_reset_by_the_next_reader(
    nats_server: NatsServer, connection: Connection, unique: Callable[..., str]
) -> None:
    stream = await make_stream(connection, unique("PIN"))
    consumer = await make_consumer(connection, stream, **PINNED)
    await fill(connection, stream, 500)
    before, after = Reader(acks=4), Reader()
    requests: list[str] = []

    async def note(message: Msg) -> None:
        requests.append(message.subject.split(".")[3])

    async with await keylane.connect(nats_server.url) as other, await keylane.connect(nats_server.url) as observer:
        feed = await before.open(connection, stream, consumer)
        await feed.take_pin()
        await before.has_ten()
        await after.open(other, stream, consumer)
        await observer.nats.subscribe(f"$JS.API.CONSUMER.*.{stream}.>", cb=note)
        await observer.flush()
        await feed.settle()
        await feed.hand_over()
        await after.has_ten()
        assert after.seen[:10] == list(range(5, 15)), "what is not acked comes again, from the first"
        await observer.flush()
        changes = [one for one in requests if one in ("RESET", "UNPIN")]
        assert changes == ["RESET", "UNPIN"], "the next reader waits for every request after the pin is cleared"
