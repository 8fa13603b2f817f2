"""Fetches any number of partitions with one consumer and one thread.

Owns: the consumer, its thread, and a bounded buffer for each partition. Partitions are fetched from an offset on,
without joining a group: this module does not decide who may read what.

When a buffer is full and its reader is active, the thread waits for the reader. If nobody reads, the partition is
paused and the others go on. A pause is expensive: the library discards what it has buffered and fetches it again.

Only the thread calls the consumer, between two deliveries. So messages that were fetched for a partition before it was
assigned again cannot be mistaken for those that come afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from keylane.errors import Disconnected, InvalidInput, KeylaneError, ReadIncomplete, RequestTimeout
from keylane.kafka.client import KafkaLink, Setting

_log = logging.getLogger("keylane.kafka")

_TICK_S = 0.02
_ACTIVE_S = 0.25
_BATCH = 10_000
_CLOSE_S = 10.0
_SETTINGS: Mapping[str, Setting] = {
    "group.id": "keylane",  # the library requires one; nothing joins it or commits to it
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
"""The library looks up the group's coordinator although it is not needed."""

_GONE = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION)

Place: TypeAlias = tuple[str, int]
_Order: TypeAlias = tuple[Callable[[], None], asyncio.Future[None] | None]


class FetchedPartition:
    """One partition from an offset on: its buffer. Made by `PartitionFetcher.follow`; used by one task at a time.

    It never calls the consumer: the fetcher's thread does.
    """

    def __init__(self, fetcher: PartitionFetcher, place: Place, offset: int) -> None:
        self.place = place
        self.position = offset
        """No message before this is still to come."""
        self.taken_to = offset
        """The offset after the last message that was taken. Less than `position` where offsets are missing."""
        self.given = self.given_bytes = 0
        """Messages and bytes from the thread so far. Taken by the reader so far:"""
        self.taken = self.taken_bytes = 0
        self.taken_at = 0.0
        self.is_paused = False
        self._fetcher = fetcher
        self._waiting: deque[list[Message]] = deque()
        self._waits_from = 0
        """How many of the first list in `_waiting` are taken."""
        self._reached = offset
        self._error: KafkaError | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        topic, partition = self.place
        return f"<FetchedPartition {topic}/{partition} at {self.position}, {self.given - self.taken} waiting>"

    async def take(self, most: int, *, within_s: float, before: int | None = None) -> list[Message]:
        """Up to `most` messages, in order and without gaps, with offsets less than `before`.

        Waits up to `within_s` for the first one. Empty if none came, or if there is none before `before`; then
        `position` has reached it. An error is raised once, after the messages before it; the next call continues from
        there. `ReadIncomplete`: the next offset is not, or no longer, in the partition; follow it from another one.
        """
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            self.taken_at = time.monotonic()
            if found := self._pop(most, before):
                return found
            if before is not None and self.position >= before:
                return []
            if not self._waiting and self._error is not None:
                error, self._error = self._error, None
                raise self._problem(error)
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                return []

    async def stop(self) -> None:
        """Stop fetching it; the buffer is dropped."""
        await self._fetcher.drop(self)

    def arrived(self, messages: list[Message], others: list[Message]) -> None:
        """In the event loop: the next messages of this partition, and its error and end-of-partition events."""
        if self._is_over:
            return
        if messages and _offset_of(messages[0]) < self._reached:  # fetched again after a pause
            known = bisect_left(messages, self._reached, key=_offset_of)
            self._count(messages[:known])
            messages = messages[known:]
        if messages:
            self._waiting.append(messages)
            self._reached = _offset_of(messages[-1]) + 1
        for other in others:
            if _is_end(other):
                self._reached = max(self._reached, other.offset() or 0)
            else:
                self._error = other.error()
        self._changed.set()

    def end(self) -> None:
        """Ignore messages that are still on their way."""
        self._is_over = True
        self._waiting.clear()

    def failed(self, error: KafkaError) -> None:
        self._error = error
        self._changed.set()

    def _pop(self, most: int, before: int | None) -> list[Message]:
        found: list[Message] = []
        while self._waiting and len(found) < most:
            first, begin = self._waiting[0], self._waits_from
            end = min(len(first), begin + most - len(found))
            if before is not None and _offset_of(first[end - 1]) >= before:
                end = bisect_left(first, before, begin, end, key=_offset_of)
                most = 0  # the next message is beyond `before`
            found += first[begin:end]
            self._waits_from = end
            if end == len(first):
                self._waiting.popleft()
                self._waits_from = 0
        if found:
            self.taken_to = _offset_of(found[-1]) + 1
            self._count(found)
        # There is no message between the last one taken and the next in the buffer, or the offset that was reached.
        next_offset = _offset_of(self._waiting[0][self._waits_from]) if self._waiting else self._reached
        self.position = next_offset if before is None else max(self.taken_to, min(next_offset, before))
        return found

    def _count(self, taken: list[Message]) -> None:
        self.taken += len(taken)
        self.taken_bytes += sum(map(len, taken))
        self._fetcher.buffer_freed()

    def _problem(self, error: KafkaError) -> KeylaneError:
        topic, partition = self.place
        if error.code() in _GONE:
            return ReadIncomplete(
                f"offset {self._reached} of {topic}/{partition} cannot be read: it has expired, or the partition "
                f"was truncated before it ({error.str()})"
            )
        return self._fetcher.link.problem(error, f"reading {topic}/{partition}")


class PartitionFetcher:
    """Fetches partitions. Made by `open_fetcher`."""

    def __init__(self, link: KafkaLink, consumer: Consumer, most_messages: int, most_bytes: int) -> None:
        self.link = link
        self._consumer = consumer
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._loop = asyncio.get_running_loop()
        self._orders: deque[_Order] = deque()
        self._followed: dict[Place, FetchedPartition] = {}
        self._by_thread: dict[Place, FetchedPartition] = {}
        self._known: set[str] = set()
        self._freed = threading.Event()
        self._stopping = False
        self._failure: BaseException | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="keylane-kafka-fetcher", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<PartitionFetcher of {len(self._followed)} partitions>"

    async def follow(self, topic: str, partition: int, offset: int) -> FetchedPartition:
        """Fetch a partition from an offset on. A partition can be followed once at a time."""
        place = (topic, partition)
        if place in self._followed:
            raise InvalidInput(f"{topic}/{partition} is followed already: stop that, or use a fetcher of your own")
        self._check_runs()
        fetched = self._followed[place] = FetchedPartition(self, place, offset)

        def begin() -> None:
            if topic not in self._known:  # else the library takes up to a second to look up its leaders
                self._consumer.list_topics(topic, timeout=self.link.timeout_s)
                self._known.add(topic)
            self._consumer.incremental_assign([TopicPartition(topic, partition, offset)])
            self._by_thread[place] = fetched

        try:
            await self._order(begin, f"reading {topic}/{partition} from {offset}")
        except BaseException:
            await self.drop(fetched)
            raise
        return fetched

    async def drop(self, fetched: FetchedPartition) -> None:
        place = fetched.place
        if self._followed.get(place) is not fetched:
            return
        del self._followed[place]
        fetched.end()

        def end() -> None:
            if self._by_thread.pop(place, None) is not None:
                if fetched.is_paused:  # else it would still be paused when it is followed again
                    self._consumer.resume([TopicPartition(*place)])
                self._consumer.incremental_unassign([TopicPartition(*place)])

        if not self._ended.is_set():
            self._orders.append((end, None))

    def buffer_freed(self) -> None:
        """A reader took messages from a buffer."""
        self._freed.set()

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
            raise Disconnected(f"{self!r} has ended: {self._failure!r}")

    # ---- in the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not self._stopping:
                self._do_orders()
                if self._must_wait():
                    self._freed.wait(_TICK_S)
                    self._freed.clear()
                elif (first := self._consumer.poll(_TICK_S)) is not None:
                    self._hand_over([first, *self._consumer.consume(min(_BATCH, self._most_messages), 0)])
        except BaseException as error:  # noqa: BLE001 - a thread has no caller; `_over` reports it to the readers
            failure = error
        finally:
            self._consumer.close()
            self._loop.call_soon_threadsafe(self._over, failure)

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
        """Whether a full buffer has an active reader. Partitions whose full buffers nobody reads are paused."""
        must_wait = False
        for place, fetched in self._by_thread.items():
            messages = fetched.given - fetched.taken
            size = fetched.given_bytes - fetched.taken_bytes
            if fetched.is_paused:
                if not self._is_full(2 * messages, 2 * size):
                    self._consumer.resume([TopicPartition(*place)])
                    fetched.is_paused = False
            elif self._is_full(messages, size):
                if time.monotonic() - fetched.taken_at < _ACTIVE_S:
                    must_wait = True
                else:
                    self._consumer.pause([TopicPartition(*place)])
                    fetched.is_paused = True
        return must_wait

    def _is_full(self, messages: int, size: int) -> bool:
        return messages > self._most_messages or size > self._most_bytes

    def _hand_over(self, messages: list[Message]) -> None:
        deliveries: dict[tuple[str | None, int | None], tuple[list[Message], list[Message]]] = {}
        for message in messages:
            place = (message.topic(), message.partition())
            delivery = deliveries.get(place)
            if delivery is None:
                delivery = deliveries[place] = ([], [])
            delivery[0 if message.error() is None else 1].append(message)
        addressed = []
        for (topic, partition), (whole, others) in deliveries.items():
            fetched = self._by_thread.get((topic or "", -1 if partition is None else partition))
            if fetched is not None:
                fetched.given += len(whole)
                fetched.given_bytes += sum(map(len, whole))
                addressed.append((fetched, whole, others))
            elif others and (error := others[-1].error()) is not None and error.code() not in _OF_GROUPS:
                # An error of the whole consumer, or of a topic.
                self._loop.call_soon_threadsafe(self._fail, topic, error)
        if addressed:
            self._loop.call_soon_threadsafe(_deliver, addressed)

    # ---- in the event loop --------------------------------------------------------------------------

    def _fail(self, topic: str | None, error: KafkaError) -> None:
        for (name, _), fetched in self._followed.items():
            if not topic or name == topic:
                fetched.failed(error)

    def _over(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._ended.set()
        while self._orders:
            _, done = self._orders.popleft()
            if done is not None:
                _settle(done, KafkaException(KafkaError(KafkaError._DESTROY, "the consumer ended")))
        if failure is not None:
            _log.error("the thread that fetches from Kafka failed", exc_info=failure)
            self._fail(None, KafkaError(KafkaError._DESTROY, f"its thread failed: {failure!r}"))


def _settle(done: asyncio.Future[None], error: KafkaException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _deliver(deliveries: list[tuple[FetchedPartition, list[Message], list[Message]]]) -> None:
    for fetched, messages, others in deliveries:
        fetched.arrived(messages, others)


def _is_end(message: Message) -> bool:
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF


def _offset_of(message: Message) -> int:
    offset = message.offset()
    assert offset is not None, message
    return offset


@asynccontextmanager
async def open_fetcher(
    link: KafkaLink,
    *,
    settings: Mapping[str, Setting] | None = None,
    most_messages: int = 20_000,
    most_bytes: int = 16 << 20,
) -> AsyncIterator[PartitionFetcher]:
    """A fetcher for as long as the block lasts. `most_messages`, `most_bytes`: the buffer of each partition.

    >>> async with open_kafka("127.0.0.1:9092") as link, open_fetcher(link) as fetcher:
    ...     fetched = await fetcher.follow("orders", 0, 0)
    ...     messages = await fetched.take(100, within_s=1.0)
    """
    consumer = link.new_consumer({**_SETTINGS, **(settings or {})})
    fetcher = PartitionFetcher(link, consumer, most_messages, most_bytes)
    try:
        yield fetcher
    finally:
        await fetcher.close()
