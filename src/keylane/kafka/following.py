"""One partition that is followed: its buffer, and taking from it.

Owns: what the fetcher's thread has given and nobody has taken yet. Never talks to the consumer: the thread does.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from confluent_kafka import KafkaError, Message

from keylane.errors import KeylaneError, ReadIncomplete

if TYPE_CHECKING:
    from keylane.kafka.fetching import Fetcher

_GONE = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION)

Place: TypeAlias = tuple[str, int]


class Following:
    """One partition, read on from an offset. Made by `Fetcher.follow`; used by one task at a time."""

    def __init__(self, fetcher: Fetcher, place: Place, offset: int) -> None:
        self.place = place
        self.position = offset
        """No message before this is still to come."""
        self.taken_to = offset
        """The offset after the last message that was taken. Less than `position` where offsets are left out."""
        self.given = self.given_bytes = 0
        """By the thread, so far; and what was taken of it:"""
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
        return f"<Following {topic}/{partition} at {self.position}, {self.given - self.taken} waiting>"

    async def take(self, most: int, *, within_s: float, before: int | None = None) -> list[Message]:
        """Up to `most` messages, in order, none left out; of them those with offsets less than `before`.

        Waits up to `within_s` for the first one; empty if none came, or if there is none before `before`: then
        `position` is there. An error is raised once, after what came before it; the next call goes on where this one
        was. `ReadIncomplete`: the next offset is not, or no longer, in the partition; follow it from another one.
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
        """Follow it no longer; what is in the buffer is dropped."""
        await self._fetcher.drop(self)

    def arrived(self, messages: list[Message], others: list[Message]) -> None:
        """In the loop: the next messages of this partition, and what is none: errors and ends."""
        if self._is_over:
            return
        if messages and offset_of(messages[0]) < self._reached:  # fetched again after a pause
            known = bisect_left(messages, self._reached, key=offset_of)
            self._count(messages[:known])
            messages = messages[known:]
        if messages:
            self._waiting.append(messages)
            self._reached = offset_of(messages[-1]) + 1
        for other in others:
            if is_end(other):
                self._reached = max(self._reached, other.offset() or 0)
            else:
                self._error = other.error()
        self._changed.set()

    def end(self) -> None:
        """What is still on its way is not for this one any more."""
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
            if before is not None and offset_of(first[end - 1]) >= before:
                end = bisect_left(first, before, begin, end, key=offset_of)
                most = 0  # the next one is beyond it
            found += first[begin:end]
            self._waits_from = end
            if end == len(first):
                self._waiting.popleft()
                self._waits_from = 0
        if found:
            self.taken_to = offset_of(found[-1]) + 1
            self._count(found)
        # Nothing is between the last one and the next that waits, or the place that was reached.
        next_offset = offset_of(self._waiting[0][self._waits_from]) if self._waiting else self._reached
        self.position = next_offset if before is None else max(self.taken_to, min(next_offset, before))
        return found

    def _count(self, taken: list[Message]) -> None:
        self.taken += len(taken)
        self.taken_bytes += sum(map(len, taken))
        self._fetcher.room()

    def _problem(self, error: KafkaError) -> KeylaneError:
        topic, partition = self.place
        if error.code() in _GONE:
            return ReadIncomplete(
                f"offset {self._reached} of {topic}/{partition} cannot be read: it is gone by age, or the partition "
                f"was cut off before it ({error.str()})"
            )
        return self._fetcher.link.problem(error, f"reading {topic}/{partition}")


def is_end(message: Message) -> bool:
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF


def offset_of(message: Message) -> int:
    offset = message.offset()
    assert offset is not None, message
    return offset
