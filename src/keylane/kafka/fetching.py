"""Reads any number of partitions with one consumer and one thread.

Owns: the consumer, its thread, and a bounded buffer for each partition that is followed. Partitions are followed from
an offset on, without a group: who may read what is not decided here.

When a buffer is full and somebody is just taking from it, the thread waits for him. Where nobody takes, the partition
is paused, and the others go on. To pause costs more than it seems: the library throws away what it has, and fetches it
again.

Whatever is asked of the consumer is done by its thread, between two deliveries. So what was fetched for a partition
before it was followed anew cannot be taken for what comes afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from keylane.errors import Disconnected, InvalidInput, RequestTimeout
from keylane.kafka.client import KafkaLink, Setting
from keylane.kafka.following import Following, Place

_log = logging.getLogger("keylane.kafka")

_TICK_S = 0.02
_JUST_TAKING_S = 0.25
_BATCH = 10_000
_CLOSE_S = 10.0
_SETTINGS: Mapping[str, Setting] = {
    "group.id": "keylane",  # the library wants one; nothing joins or commits it
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 100,
    "fetch.error.backoff.ms": 50,
    "fetch.queue.backoff.ms": 10,
    "queued.min.messages": 50_000,
    "queued.max.messages.kbytes": 16_384,
}

_OF_GROUPS = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.NOT_COORDINATOR,
)
"""The library looks for the group's coordinator, though nobody wants it."""

_Order: TypeAlias = tuple[Callable[[], None], asyncio.Future[None] | None]


class Fetcher:
    """Follows partitions. Made by `open_fetcher`."""

    def __init__(self, link: KafkaLink, consumer: Consumer, most_messages: int, most_bytes: int) -> None:
        self.link = link
        self._consumer = consumer
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._loop = asyncio.get_running_loop()
        self._orders: deque[_Order] = deque()
        self._followed: dict[Place, Following] = {}
        self._by_thread: dict[Place, Following] = {}
        self._known: set[str] = set()
        self._room = threading.Event()
        self._stopping = False
        self._broke: BaseException | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="keylane-kafka-fetcher", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Fetcher of {len(self._followed)} partitions>"

    async def follow(self, topic: str, partition: int, offset: int) -> Following:
        """Read a partition from an offset on. A partition is followed once at a time."""
        place = (topic, partition)
        if place in self._followed:
            raise InvalidInput(f"{topic}/{partition} is followed already: stop that, or use a fetcher of your own")
        self._check_runs()
        following = self._followed[place] = Following(self, place, offset)

        def begin() -> None:
            if topic not in self._known:  # else the library takes up to a second to ask for its leaders by itself
                self._consumer.list_topics(topic, timeout=self.link.timeout_s)
                self._known.add(topic)
            self._consumer.incremental_assign([TopicPartition(topic, partition, offset)])
            self._by_thread[place] = following

        try:
            await self._order(begin, f"reading {topic}/{partition} from {offset}")
        except BaseException:
            await self.drop(following)
            raise
        return following

    async def drop(self, following: Following) -> None:
        place = following.place
        if self._followed.get(place) is not following:
            return
        del self._followed[place]
        following.end()

        def end() -> None:
            if self._by_thread.pop(place, None) is not None:
                if following.is_paused:  # or whoever follows it next would find it so
                    self._consumer.resume([TopicPartition(*place)])
                self._consumer.incremental_unassign([TopicPartition(*place)])

        if not self._ended.is_set():
            self._orders.append((end, None))

    def room(self) -> None:
        """Something was taken."""
        self._room.set()

    async def close(self) -> None:
        self._stopping = True
        async with asyncio.timeout(_CLOSE_S):
            await self._ended.wait()
        await asyncio.to_thread(self._thread.join)

    async def _order(self, work: Callable[[], None], doing: str) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._orders.append((work, done))
        try:
            async with asyncio.timeout(self.link.timeout_s):
                await done
        except KafkaException as error:
            raise self.link.problem(error.args[0], doing) from error
        except TimeoutError as late:
            raise RequestTimeout(f"{doing}: the client did not begin within {self.link.timeout_s:g} s") from late

    def _check_runs(self) -> None:
        if self._ended.is_set():
            raise Disconnected(f"{self!r} has ended: {self._broke!r}")

    # ---- in the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        broke: BaseException | None = None
        try:
            while not self._stopping:
                self._do_orders()
                if self._must_wait():
                    self._room.wait(_TICK_S)
                    self._room.clear()
                elif (first := self._consumer.poll(_TICK_S)) is not None:
                    self._hand_over([first, *self._consumer.consume(min(_BATCH, self._most_messages), 0)])
        except BaseException as error:  # noqa: BLE001 - a thread has nobody above it; those who wait are told
            broke = error
        finally:
            self._consumer.close()
            self._loop.call_soon_threadsafe(self._over, broke)

    def _do_orders(self) -> None:
        while self._orders:
            work, done = self._orders.popleft()
            try:
                work()
            except KafkaException as error:
                if done is None:
                    raise
                self._loop.call_soon_threadsafe(_settle, done, error)
            else:
                if done is not None:
                    self._loop.call_soon_threadsafe(_settle, done, None)

    def _must_wait(self) -> bool:
        """For somebody who is just taking from a full buffer. Full buffers that nobody takes from are paused."""
        must_wait = False
        for place, following in self._by_thread.items():
            messages = following.given - following.taken
            size = following.given_bytes - following.taken_bytes
            if following.is_paused:
                if not self._is_full(2 * messages, 2 * size):
                    self._consumer.resume([TopicPartition(*place)])
                    following.is_paused = False
            elif self._is_full(messages, size):
                if time.monotonic() - following.taken_at < _JUST_TAKING_S:
                    must_wait = True
                else:
                    self._consumer.pause([TopicPartition(*place)])
                    following.is_paused = True
        return must_wait

    def _is_full(self, messages: int, size: int) -> bool:
        return messages > self._most_messages or size > self._most_bytes

    def _hand_over(self, messages: list[Message]) -> None:
        parcels: dict[tuple[str | None, int | None], tuple[list[Message], list[Message]]] = {}
        for message in messages:
            place = (message.topic(), message.partition())
            parcel = parcels.get(place)
            if parcel is None:
                parcel = parcels[place] = ([], [])
            parcel[0 if message.error() is None else 1].append(message)
        addressed = []
        for (topic, partition), (whole, others) in parcels.items():
            following = self._by_thread.get((topic or "", -1 if partition is None else partition))
            if following is not None:
                following.given += len(whole)
                following.given_bytes += sum(map(len, whole))
                addressed.append((following, whole, others))
            elif others and (error := others[-1].error()) is not None and error.code() not in _OF_GROUPS:
                # Of the whole consumer, or of a topic.
                self._loop.call_soon_threadsafe(self._fail, topic, error)
        if addressed:
            self._loop.call_soon_threadsafe(_deliver, addressed)

    # ---- in the loop again --------------------------------------------------------------------------

    def _fail(self, topic: str | None, error: KafkaError) -> None:
        for (name, _), following in self._followed.items():
            if not topic or name == topic:
                following.failed(error)

    def _over(self, broke: BaseException | None) -> None:
        self._broke = broke
        self._ended.set()
        while self._orders:
            _, done = self._orders.popleft()
            if done is not None:
                _settle(done, KafkaException(KafkaError(KafkaError._DESTROY, "the consumer ended")))
        if broke is not None:
            _log.error("the thread that reads Kafka broke", exc_info=broke)
            self._fail(None, KafkaError(KafkaError._DESTROY, f"its thread broke: {broke!r}"))


def _settle(done: asyncio.Future[None], error: KafkaException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _deliver(parcels: list[tuple[Following, list[Message], list[Message]]]) -> None:
    for following, messages, others in parcels:
        following.arrived(messages, others)


@asynccontextmanager
async def open_fetcher(
    link: KafkaLink,
    *,
    settings: Mapping[str, Setting] | None = None,
    most_messages: int = 20_000,
    most_bytes: int = 16 << 20,
) -> AsyncIterator[Fetcher]:
    """A fetcher for as long as the block lasts. `most_messages`, `most_bytes`: the buffer of each partition.

    >>> async with open_kafka("127.0.0.1:9092") as link, open_fetcher(link) as fetcher:
    ...     following = await fetcher.follow("orders", 0, 0)
    ...     messages = await following.take(100, within_s=1.0)
    """
    consumer = link.new_consumer({**_SETTINGS, **(settings or {})})
    fetcher = Fetcher(link, consumer, most_messages, most_bytes)
    try:
        yield fetcher
    finally:
        await fetcher.close()
