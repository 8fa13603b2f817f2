"""One partition's reader while it stops and begins again: what is dropped comes before what is newer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.js.api import RetentionPolicy

from keylane.core.fleet_partitions import Partition
from keylane.core.pull_budget import PullBudget
from keylane.errors import Disconnected
from keylane.fleet.consumer_limit import CreationPace
from keylane.fleet.origin import PartitionOrigin
from keylane.fleet.partition_reader import MOST_BYTES, PartitionReader, ReaderOptions
from keylane.fleet.pinned_consumer import PIN_GROUP
from keylane.jetstream import Feed, consumers, streams
from keylane.processing.handler_options import HandlerOptions
from keylane.processing.message import GroupMessage, Place
from keylane.processing.message_processor import MessageProcessor, handler_call
from tests.integration.fleet.rig import PARTITIONS, FleetGround
from tests.integration.groups.conftest import MakeGround
from tests.waiter import until

CONSUMER = "f-p0"


class OneReader:
    """A reader of all messages of a stream, and the sequences that it handled, in this order."""

    def __init__(self, ground: FleetGround, reader: PartitionReader, processor: MessageProcessor) -> None:
        self.ground = ground
        self.reader = reader
        self.processor = processor
        self.handled: list[int] = []

    async def send(self) -> int:
        """Publish a message. Returns its sequence when this client has it."""
        (sequence,) = await self.ground.publish(["k"])
        connection, stream = self.ground.clients[0], self.ground.stream
        await until(
            lambda: consumers.info(connection, stream, CONSUMER), lambda info: info.delivered_sequence >= sequence
        )
        await connection.flush()
        return sequence

    async def all_handled(self, *sequences: int) -> None:
        await until(lambda: self.handled, lambda seen: len(seen) >= len(sequences))
        assert self.handled == list(sequences)


async def always(_partition: str) -> bool:
    return True


@asynccontextmanager
async def one_reader(ground: FleetGround) -> AsyncIterator[OneReader]:
    connection = await ground.client()
    ground.clients.append(connection)
    config = (await streams.info(connection, ground.stream)).config
    is_queue = config.retention == RetentionPolicy.WORK_QUEUE
    handling = HandlerOptions(order="key", concurrency=4, ack_wait_s=30.0, remember=100, tracks_position=not is_queue)

    async def handle(message: GroupMessage) -> None:
        one.handled.append(message.sequence)

    call = handler_call(handle, handling)
    await call.start()
    processor = MessageProcessor(call, handling, "the partition", on_crash=lambda: None)
    reader = PartitionReader(
        connection,
        Partition("0", f"*.{ground.stream}.*"),
        CONSUMER,
        ReaderOptions(stream=ground.stream, is_queue=is_queue, ack_wait_s=30.0, max_ack_pending=50, pin_timeout_s=60.0),
        processor,
        place=lambda subject: Place.of(0, subject.decode(), "k"),
        origin=PartitionOrigin(
            connection,
            (ground.stream, "f", "f-0"),
            instance="i",
            partition="0",
            wait=lambda _: None,
            is_owner=always,
        ),
        pinned=lambda: None,
        unpinned=lambda: None,
        lost=lambda _: None,
        redelivered=lambda: None,
        pace=CreationPace(lambda _: None),
        budget=PullBudget(50, MOST_BYTES),
    )
    one = OneReader(ground, reader, processor)
    await reader.open()
    await reader.start(1)
    try:
        yield one
    finally:
        await reader.close()
        await processor.close()
        await call.close()


async def test_what_arrives_while_a_reader_steps_aside_comes_after_what_it_dropped(
    limits: FleetGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is not confirmed, so the first message waits. The second one arrives while the feed stops."""
    sent: list[int] = []
    stop = Feed.stop

    async def stop_late(feed: Feed) -> None:
        if len(sent) == 1:
            sent.append(await one.send())
        await stop(feed)

    async with one_reader(limits) as one:
        is_confirmed = False
        one.processor.may_start = lambda: is_confirmed
        one.processor.guard(True)
        sent.append(await one.send())
        monkeypatch.setattr(Feed, "stop", stop_late)
        await one.reader.step_aside()
        is_confirmed = True
        one.processor.guard(False)
        await one.reader.reopen()
        sent.append(await one.send())
        await one.all_handled(*sent)


async def test_a_reader_that_stepped_aside_takes_the_pin_when_its_worker_takes_the_partition_over(
    limits: FleetGround,
) -> None:
    """The store answers again, and the claim is this worker's, before anybody has opened the reader again."""
    async with one_reader(limits) as one:
        first = await one.send()
        await one.all_handled(first)
        await one.reader.step_aside()
        (second,) = await limits.publish(["k"])
        await one.reader.take_pin()
        await one.reader.start(2)
        await one.all_handled(first, second)


async def test_what_arrives_while_a_partition_is_closed_comes_after_what_was_passed_over(
    limits: FleetGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that is given away and comes back at once. The third message arrives while its feed is closed."""
    sent: list[int] = []
    hand_over = Feed.hand_over

    async def hand_over_late(feed: Feed) -> None:
        if len(sent) == 2:
            sent.append(await one.send())
        await hand_over(feed)

    async with one_reader(limits) as one:
        sent.append(await one.send())
        await one.all_handled(*sent)
        await one.reader.drain(lost=False)
        sent.append(await one.send())
        monkeypatch.setattr(Feed, "hand_over", hand_over_late)
        await one.reader.close()
        assert len(sent) == 3
        await one.reader.open()
        await one.reader.start(2)
        await one.all_handled(*sent)


async def test_a_start_whose_reset_failed_resets_when_it_is_tried_again(
    limits: FleetGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrived while the reader was drained is delivered again only by the reset."""
    reset = Feed.reset
    failures = [Disconnected("the connection is down")]

    async def reset_later(feed: Feed, sequence: int | None = None) -> int:
        if failures:
            raise failures.pop()
        return await reset(feed, sequence)

    async with one_reader(limits) as one:
        sent = [await one.send()]
        await one.all_handled(*sent)
        await one.reader.drain(lost=False)
        sent.append(await one.send())
        monkeypatch.setattr(Feed, "reset", reset_later)
        with pytest.raises(Disconnected):
            await one.reader.start(2)
        sent.append(await one.send())
        await one.reader.start(2)
        await one.all_handled(*sent)


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_new_pin_resumes_where_the_owner_is_whatever_the_ack_floor(make: MakeGround, retention: str) -> None:
    """As after the loss of a leader whose successor has an ack floor above a message that waits here."""
    ground = FleetGround(await make(partitions=PARTITIONS, retention=RetentionPolicy(retention), allow_direct=True))
    async with one_reader(ground) as one:
        sent = [await one.send()]
        await one.all_handled(*sent)
        may_start = False
        one.processor.may_start = lambda: may_start
        one.processor.guard(True)
        sent.append(await one.send())
        connection, stream = ground.connection, ground.stream
        await consumers.reset(connection, stream, CONSUMER, sequence=sent[-1] + 1)
        await consumers.unpin(connection, stream, CONSUMER, PIN_GROUP)
        sent.append(await one.send())
        may_start = True
        one.processor.guard(False)
        await one.all_handled(*sent)
