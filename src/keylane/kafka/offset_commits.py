"""Offsets committed under a group's name, without joining the group.

Owns: one consumer for each group, and its thread. The admin calls for the same purpose crash the whole process with a
segmentation fault while a group has no coordinator (client library 2.16), so they are not used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from keylane.errors import RequestTimeout
from keylane.kafka.client import KafkaLink, translate

_T = TypeVar("_T")

_TRY_S = 1.0
_PAUSE_S = 0.1
_TICK_S = 0.005
_SLACK_S = 2.0
_NOT_YET = (
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._WAIT_COORD,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)
_REFUSALS = (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.INVALID_GROUP_ID)


class CommittedOffsets:
    """The committed offsets of one group. Calls run one after the other, in their own thread."""

    def __init__(self, link: KafkaLink, group: str) -> None:
        self.group = group
        self._link = link
        self._results: dict[tuple[str, int, int], KafkaError | None] = {}
        """The results of commits, by topic, partition and offset."""
        self._refused: KafkaError | None = None
        self._has_answered = False
        """Whether the last call succeeded."""
        self._consumer = link.new_consumer({"group.id": group, "on_commit": self._on_commit})  # type: ignore[dict-item]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"keylane-kafka-{group}")

    def __repr__(self) -> str:
        return f"<CommittedOffsets of {self.group}>"

    async def get(self, topic: str, partition: int) -> int | None:
        """The committed offset; None if there is none."""
        doing = f"asking for the committed offset of group {self.group!r} in {topic}/{partition}"

        def ask(within_s: float) -> TopicPartition:
            [found] = self._consumer.committed([TopicPartition(topic, partition)], timeout=within_s)
            return found

        found = await self._call(ask, doing)
        if found.error is not None:
            raise translate(found.error, doing)
        return found.offset if found.offset >= 0 else None

    async def put(self, topic: str, partition: int, offset: int) -> None:
        place = (topic, partition, offset)

        def commit(within_s: float) -> None:
            """Asynchronously: the synchronous call has no deadline, and without a coordinator it blocks `close`."""
            if not self._has_answered:
                self._consumer.committed([TopicPartition(topic, partition)], timeout=within_s)
            self._results.clear()
            self._consumer.commit(offsets=[TopicPartition(*place)], asynchronous=True)
            deadline = time.monotonic() + within_s
            while place not in self._results:
                if time.monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
                self._poll_errors(_TICK_S)
            if (error := self._results[place]) is not None:
                raise KafkaException(error)

        await self._call(commit, f"committing offset {offset} of group {self.group!r} in {topic}/{partition}")

    async def close(self) -> None:
        """Returns when its thread has ended."""
        closing = asyncio.wrap_future(self._thread.submit(self._consumer.close))
        self._thread.shutdown(wait=False)
        await closing

    async def _call(self, work: Callable[[float], _T], doing: str) -> _T:
        timeout_s = self._link.timeout_s
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._until_done, work)
        try:
            async with asyncio.timeout(timeout_s + _SLACK_S):
                return await running
        except KafkaException as error:
            raise self._link.problem(error.args[0], doing) from error
        except TimeoutError as late:
            raise RequestTimeout(f"{doing}: no answer within {timeout_s + _SLACK_S:g} s") from late

    def _until_done(self, work: Callable[[float], _T]) -> _T:
        """In the thread. The client reports why a group has no coordinator only to `poll`."""
        deadline = time.monotonic() + self._link.timeout_s
        while True:
            try:
                result = work(max(min(deadline - time.monotonic(), _TRY_S), 0.1))
            except KafkaException as error:
                self._has_answered = False
                self._poll_errors(_TICK_S)
                if self._refused is not None:  # it is reported once, and holds until a call succeeds
                    raise KafkaException(self._refused) from error
                if error.args[0].code() not in _NOT_YET or time.monotonic() > deadline:
                    raise
            else:
                self._refused, self._has_answered = None, True
                return result
            time.sleep(_PAUSE_S)

    def _poll_errors(self, within_s: float) -> None:
        message = self._consumer.poll(within_s)
        if message is not None and (error := message.error()) is not None and error.code() in _REFUSALS:
            self._refused = error

    def _on_commit(self, error: KafkaError | None, places: list[TopicPartition]) -> None:
        for one in places:
            self._results[one.topic, one.partition, one.offset] = one.error or error
