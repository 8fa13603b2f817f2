"""A work queue with pinned consumers, as nats-server 2.15 behaves: what a simulation of moving partitions needs of it.

What it models was tried on the real server (docs/DESIGN.md): a widened filter does not go back in the stream, two
consumers may not overlap, a reset voids what was delivered and keeps the pin, a pin comes with a delivery only and is
given to another reader while messages are in flight.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.simulation.member_model import Instance

PIN_TIMEOUT = 1000
ACK_WAIT = 1000
INACTIVE_THRESHOLD = 1000
MAX_ACK_PENDING = 12


class Clock:
    """Simulated time in milliseconds: what is due runs in order."""

    def __init__(self, seed: int) -> None:
        self.now = 0
        self.random = Random(seed)  # noqa: S311
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._ticket = count()

    def after(self, delay: int, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._ticket), do))

    def run(self, until: int, check: Callable[[], None]) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, do = heapq.heappop(self._due)
            do()
            check()
        self.now = until


class Delivery(NamedTuple):
    sequence: int
    partition: int
    key: str
    pin_id: str
    consumer_sequence: int
    generation: tuple[int, int]
    """Of the consumer and of its resets: an ack counts only if it is still so."""


@dataclass
class Consumer:
    made: int
    filters: frozenset[int]
    cursor: int = 1
    pending: dict[int, int] = field(default_factory=dict)
    """Sequence -> when it is delivered again."""
    resets: int = 0
    delivered: int = 0
    readers: list[Instance] = field(default_factory=list)
    pinned: Instance | None = None
    pin_id: str | None = None
    pin_seen: int = 0
    read_at: int = 0


class Server:
    """One stream and its consumers."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.messages: dict[int, tuple[int, str]] = {}
        self.published: dict[int, tuple[int, str]] = {}
        self.consumers: dict[str, Consumer] = {}
        self._pins = count(1)
        self._made = count(1)
        self._tick()

    def publish(self, partition: int, key: str) -> None:
        sequence = len(self.published) + 1
        self.messages[sequence] = self.published[sequence] = (partition, key)
        self._deliver_all()

    # ---- requests --------------------------------------------------------------------------------------

    def create(self, name: str, filters: frozenset[int]) -> Consumer | None:
        """The consumer, new or as it is; None: another consumer has one of the filters."""
        if name not in self.consumers:
            if self.overlaps(name, filters):
                return None
            self.consumers[name] = Consumer(next(self._made), filters, read_at=self.clock.now)
        return self.consumers[name]

    def overlaps(self, name: str, filters: frozenset[int]) -> bool:
        return any(one.filters & filters for other, one in self.consumers.items() if other != name)

    def update(self, name: str, filters: frozenset[int]) -> bool:
        assert filters, "an empty filter list means the whole stream"
        if self.overlaps(name, filters):
            return False
        self.consumers[name].filters = filters
        self._deliver_all()
        return True

    def reset(self, name: str, start: int | None = None) -> None:
        consumer = self.consumers[name]
        consumer.cursor = start or min([consumer.cursor, *consumer.pending])
        consumer.pending.clear()
        consumer.resets += 1
        consumer.delivered = 0
        self._deliver_all()

    def ack(self, name: str, delivery: Delivery) -> None:
        consumer = self.consumers.get(name)
        if consumer is None or (consumer.made, consumer.resets) != delivery.generation:
            return
        if consumer.pending.pop(delivery.sequence, None) is not None:
            self.messages.pop(delivery.sequence, None)
            self._deliver_all()

    def delete(self, name: str) -> None:
        consumer = self.consumers.pop(name, None)
        if consumer is not None:
            for reader in consumer.readers:
                reader.hear_soon(reader.consumer_deleted)

    def keep_alive(self, name: str, sequence: int) -> None:
        consumer = self.consumers.get(name)
        if consumer is not None and sequence in consumer.pending:
            consumer.pending[sequence] = self.clock.now + ACK_WAIT

    def unpin(self, name: str) -> None:
        self.consumers[name].pinned = self.consumers[name].pin_id = None
        self._deliver_all()

    def read(self, name: str, reader: Instance) -> None:
        consumer = self.consumers.get(name)
        if consumer is not None:
            if reader not in consumer.readers:
                consumer.readers.append(reader)
            if consumer.pinned is reader and reader.pin_id == consumer.pin_id:
                consumer.pin_seen = self.clock.now
            self._deliver_all()

    def stop_reading(self, name: str, reader: Instance) -> None:
        consumer = self.consumers.get(name)
        if consumer is not None and reader in consumer.readers:
            consumer.readers.remove(reader)

    # ---- deliveries ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        for consumer in self.consumers.values():
            consumer.readers = [one for one in consumer.readers if not one.is_dead]
            if consumer.pinned is not None:
                is_used = consumer.pinned.is_running and consumer.pinned.pin_id == consumer.pin_id
                if is_used and consumer.pinned in consumer.readers:
                    consumer.pin_seen = self.clock.now
                elif self.clock.now - consumer.pin_seen > PIN_TIMEOUT:
                    consumer.pinned = consumer.pin_id = None
                    consumer.readers = [one for one in consumer.readers if one.is_running]
            if consumer.readers:
                consumer.read_at = self.clock.now
        self.consumers = {
            name: one for name, one in self.consumers.items() if self.clock.now - one.read_at <= INACTIVE_THRESHOLD
        }
        self._deliver_all()
        self.clock.after(50, self._tick)

    def _deliver_all(self) -> None:
        for consumer in self.consumers.values():
            while self._deliver_one(consumer):
                pass

    def _deliver_one(self, consumer: Consumer) -> bool:
        reader = consumer.pinned or (self.clock.random.choice(consumer.readers) if consumer.readers else None)
        if reader is None or reader not in consumer.readers:
            return False
        sequence = self._next(consumer)
        if sequence is None:
            return False
        if consumer.pinned is None:
            consumer.pinned, consumer.pin_id = reader, f"pin-{next(self._pins)}"
            consumer.pin_seen = self.clock.now
        assert consumer.pin_id is not None
        consumer.pending[sequence] = self.clock.now + ACK_WAIT
        consumer.delivered += 1
        partition, key = self.messages[sequence]
        reader.receive(
            Delivery(sequence, partition, key, consumer.pin_id, consumer.delivered, (consumer.made, consumer.resets))
        )
        return True

    def _next(self, consumer: Consumer) -> int | None:
        for sequence, due in sorted(consumer.pending.items()):
            if sequence not in self.messages:
                del consumer.pending[sequence]
            elif due <= self.clock.now:
                return sequence
        if len(consumer.pending) >= MAX_ACK_PENDING:
            return None
        for sequence in sorted(self.messages):
            if sequence >= consumer.cursor and self.messages[sequence][0] in consumer.filters:
                consumer.cursor = sequence + 1
                return sequence
        return None
