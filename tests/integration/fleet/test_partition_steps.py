"""One partition of a worker, in orders of steps that a real server shows only now and then."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from keylane.core.fleet_events import ChangeToken, ClosePartition, StartPartition
from keylane.core.fleet_partitions import Partition
from keylane.fleet import partition_reader
from keylane.fleet.partition_reader import PartitionReader, ReaderOptions
from keylane.fleet.worker import _PartitionRun
from keylane.processing.message import GroupMessage

if TYPE_CHECKING:
    from keylane.jetstream import FeedOptions

PIN_TRUST_S = 0.2


class Processor:
    """Keeps what it is offered."""

    def __init__(self) -> None:
        self.offered: list[int] = []
        self.progress = None

    def offer(self, messages: list[GroupMessage]) -> None:
        self.offered += [one.delivery.sequence for one in messages]

    def pass_over(self, messages: list[GroupMessage]) -> None:
        pass

    def forget(self) -> None:
        pass

    def forget_acks(self) -> None:
        pass

    async def let_go(self) -> None:
        pass

    async def acks_sent(self) -> None:
        pass


class Feed:
    """Is pinned, and delivers what a test gives it."""

    is_pinned = True
    pin_id = "pin"

    def __init__(self, options: FeedOptions) -> None:
        self._options = options
        self.late: list[int] = []
        """What is on its way when the reader closes."""

    def deliver(self, *sequences: int) -> None:
        assert self._options.on_messages is not None
        self._options.on_messages([SimpleNamespace(sequence=one, raw_subject=b"s") for one in sequences])  # type: ignore[misc]

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def drain(self, _timeout_s: float) -> None:
        self.deliver(*self.late)

    async def settle(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_what_arrives_while_a_partition_is_closed_is_not_handled_first_when_it_opens_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3 and 4 were passed over. They come again, and 5 with them: before them it would be out of order."""
    feeds: list[Feed] = []

    async def open_feed(_connection: object, _stream: str, _consumer: str, options: FeedOptions) -> Feed:
        feeds.append(Feed(options))
        return feeds[-1]

    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(partition_reader, "open_feed", open_feed)
    monkeypatch.setattr(PartitionReader, "_ensure_consumer", nothing)
    monkeypatch.setattr(PartitionReader, "_make_deliverable", nothing)
    processor = Processor()
    reader = PartitionReader(
        SimpleNamespace(is_connected=True),  # type: ignore[arg-type]
        Partition("0", "s.0"),
        "consumer",
        ReaderOptions(stream="s", is_queue=True, ack_wait_s=30, max_ack_pending=10, pin_timeout_s=60),
        processor,  # type: ignore[arg-type]
        place=lambda _subject: ("0", "key"),  # type: ignore[arg-type,return-value]
        origin=SimpleNamespace(token=0, pin_id=None),  # type: ignore[arg-type]
        pinned=lambda: None,
        unpinned=lambda: None,
        lost=lambda _error: None,
        redelivered=lambda: None,
        pace=SimpleNamespace(),  # type: ignore[arg-type]
    )
    await reader.open()
    await reader.start(1)
    feeds[0].deliver(1, 2)
    await reader.drain(lost=False)
    feeds[0].deliver(3, 4)
    feeds[0].late = [5]
    await reader.close()
    await reader.open()
    feeds[1].deliver(3, 4, 5)
    await reader.start(2)
    assert processor.offered == [1, 2, 3, 4, 5]
    await reader.close()


class Reader:
    """Says when it was asked for what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def change_token(self, token: int) -> None:
        self.calls.append((f"change_token {token}", asyncio.get_running_loop().time()))

    def __getattr__(self, name: str) -> Any:
        async def call(*_: object, **__: object) -> None:
            self.calls.append((name, asyncio.get_running_loop().time()))

        return call


async def performed(*actions: Any) -> list[tuple[str, float]]:
    """What a reader was asked for, and when, in the order of a worker's actions."""

    async def closed() -> None:
        pass

    async with asyncio.TaskGroup() as tasks:
        run = _PartitionRun(
            SimpleNamespace(pin_trust_s=PIN_TRUST_S),  # type: ignore[arg-type]
            SimpleNamespace(close=closed),  # type: ignore[arg-type]
            tasks,
            asyncio.Semaphore(),
            tell=lambda _event: None,
            over=lambda _run: None,
            started=lambda: None,
            opening=asyncio.Semaphore(),
            reads_copy=False,
            is_open=lambda: True,
            failed=lambda error: pytest.fail(str(error)),
            updated=lambda _seconds, _error: None,
        )
        run.partition = "0"
        reader = Reader()
        run.reader = reader  # type: ignore[assignment]
        for action in (*actions, ClosePartition("0")):
            run.do(action)
        run.task = tasks.create_task(run.work())
    return reader.calls


async def test_a_takeover_by_force_starts_when_nobody_trusts_the_pin_of_before() -> None:
    """The owner before may have had its pin confirmed until it was cleared, and starts messages for so long."""
    (cleared, cleared_at), (started, started_at), _ = await performed(StartPartition("0", 7, force=True))
    assert (cleared, started) == ("take_pin", "start")
    assert started_at - cleared_at >= PIN_TRUST_S


async def test_a_partition_that_was_released_starts_at_once() -> None:
    calls = await performed(StartPartition("0", 7), ChangeToken("0", 9))
    assert [call for call, _ in calls] == ["start", "change_token 9", "close"]
    assert calls[1][1] - calls[0][1] < PIN_TRUST_S
