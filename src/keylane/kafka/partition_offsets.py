"""The earliest and latest offsets of a topic's partitions, as their leaders report them.

Owns: that simultaneous calls share one request. Every answer is newer than its call, so the latest offset covers every
record that was confirmed before the call.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal, TypeAlias

from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented to be imported from here
    ListOffsetsResultInfo,
    OffsetSpec,
)

from keylane.errors import BrokerUnavailable, Disconnected, KafkaRefused, RequestTimeout
from keylane.kafka.client import KafkaLink

OffsetKind: TypeAlias = Literal["begins", "ends"]
_SPECS = {"begins": OffsetSpec.earliest(), "ends": OffsetSpec.latest()}  # type: ignore[no-untyped-call]


_TRY_S = 1.5
"""A leader that died does not answer: look up the new leader soon."""
_PAUSE_S = 0.1


def checked_offset(found: ListOffsetsResultInfo, doing: str) -> int:
    """The offset in a leader's answer. A leader that dies meanwhile gives neither an offset nor an error."""
    if found.offset < 0:
        raise BrokerUnavailable(f"{doing}: the leader went away before it answered")
    return int(found.offset)


class PartitionOffsets:
    """Asks for the first offset of a partition of one topic, or for the offset after its last record."""

    def __init__(self, link: KafkaLink, topic: str) -> None:
        self._link = link
        self._topic = topic
        self._try_s = min(_TRY_S, link.timeout_s)
        self._next: dict[OffsetKind, asyncio.Task[dict[int, Future[ListOffsetsResultInfo]]] | None] = {}
        self._wanted: dict[OffsetKind, set[int]] = {"begins": set(), "ends": set()}

    async def ask(self, which: OffsetKind, partition: int) -> int:
        """Retries while leaders change, until the link's deadline."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._link.timeout_s
        while True:
            try:
                return await self._ask(which, partition)
            except (BrokerUnavailable, Disconnected, RequestTimeout):
                if loop.time() + _PAUSE_S > deadline:
                    raise
            await asyncio.sleep(_PAUSE_S)
            await self._refresh_leaders()

    async def _refresh_leaders(self) -> None:
        """Refresh the metadata: the library keeps asking the old leaders, even after they denied being leaders."""
        doing = f"asking who leads {self._topic}"
        with suppress(BrokerUnavailable, Disconnected, RequestTimeout):  # the next request raises the error
            await self._link.call(self._list, doing=doing, timeout_s=self._try_s)

    def _list(self) -> None:
        self._link.admin.list_topics(self._topic, timeout=self._try_s)

    async def _ask(self, which: OffsetKind, partition: int) -> int:
        sending = self._next.get(which)
        if sending is None:
            sending = self._next[which] = asyncio.create_task(self._send(which))
        self._wanted[which].add(partition)
        # Its own task, not in a group: the first caller may be cancelled while others still wait for the answer.
        answers = await asyncio.shield(sending)
        doing = f"asking where {self._topic}/{partition} {which}"
        try:
            found = await self._link.answer(answers[partition], doing=doing, timeout_s=self._try_s)
        except KafkaRefused as refused:
            if refused.code != KafkaError._NOENT:
                raise
            raise BrokerUnavailable(str(refused)) from refused  # no leader is known at the moment
        return checked_offset(found, doing)

    async def _send(self, which: OffsetKind) -> dict[int, Future[ListOffsetsResultInfo]]:
        self._next[which], wanted, self._wanted[which] = None, self._wanted[which], set()
        spec: OffsetSpec = _SPECS[which]
        asked = self._link.admin.list_offsets(
            {TopicPartition(self._topic, partition): spec for partition in wanted},
            request_timeout=self._try_s,
        )
        return {place.partition: answer for place, answer in asked.items()}
