"""Taking a pin, in the orders of events that a real server shows only now and then: one request after the other."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from keylane.jetstream import PinOptions, consumers
from keylane.jetstream.feed_pin import FeedPin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

OTHERS, OURS = "pin of another reader", "our pin"


class Server:
    """Answers the requests of one reader, and pins one of the pulls that it has open."""

    def __init__(self, pinned: str | None, *, in_flight: int = 0) -> None:
        self.calls: list[str] = []
        self.pinned = pinned
        self.in_flight = in_flight
        self.asked_at = 0.0
        self.is_draining = False
        self.pin_id: str | None = None
        self.before_pull: Callable[[], None] | None = None
        self.on_unpin: Callable[[], None] = lambda: None
        self.pin = FeedPin(
            None,  # type: ignore[arg-type]
            "stream",
            "consumer",
            PinOptions(group="readers", timeout_s=60.0, reset_on_takeover=True),
            pulls=self,  # type: ignore[arg-type]
            buffer=SimpleNamespace(ended=False, messages=[], error=None, put=lambda _: None, clear=lambda: None),  # type: ignore[arg-type]
        )

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        self.calls.append("close the pulls")
        yield

    async def reset_consumer(self, _sequence: int | None = None) -> int:
        self.calls.append("reset")
        return 0

    async def info(self, *_: object, **__: object) -> Any:
        self.calls.append("info")
        group = SimpleNamespace(group="readers", pinned_client_id=self.pinned)
        return SimpleNamespace(priority_groups=[group], num_ack_pending=self.in_flight)

    async def unpin(self, *_: object) -> None:
        self.calls.append("unpin")
        self.on_unpin()

    async def reset(self, *_: object) -> None:
        self.calls.append("reset")

    def deliver(self, pin_id: str) -> None:
        """The first message that this consumer delivers, under a pin."""
        message = SimpleNamespace(
            consumer_sequence=1, raw_headers=f"NATS/1.0\r\nNats-Pin-Id: {pin_id}\r\n\r\n".encode()
        )
        self.pin.sort([message])  # type: ignore[list-item]


def serve(monkeypatch: pytest.MonkeyPatch, pinned: str | None, *, in_flight: int = 0) -> Server:
    server = Server(pinned, in_flight=in_flight)
    for call in ("info", "unpin", "reset"):
        monkeypatch.setattr(consumers, call, getattr(server, call))
    return server


async def test_the_pulls_stay_open_while_a_pin_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server pins one of them with the unpin. Closed a moment later, nobody would read under that pin, and it would
    stand until its timeout."""
    server = serve(monkeypatch, OTHERS, in_flight=10)
    server.on_unpin = lambda: server.deliver(OURS)
    await server.pin.take()
    assert server.calls == ["info", "unpin"]
    assert server.pin.pin_id == OURS


async def test_a_pin_whose_delivery_is_under_way_is_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has pinned this reader, which has not heard of it yet: an unpin would take its own pin away."""
    server = serve(monkeypatch, OURS)
    asyncio.get_running_loop().call_later(0.01, server.deliver, OURS)
    await server.pin.take()
    assert server.calls == ["info"]


async def test_what_is_in_flight_to_a_reader_that_is_gone_is_delivered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(monkeypatch, OTHERS, in_flight=10)
    await server.pin.take()
    assert server.calls == ["info", "unpin", "reset"]
