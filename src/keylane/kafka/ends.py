"""Where partitions of a topic begin and end, asked of their leaders.

Owns: that questions which come at once go out as one request. Every answer is from after the question, so an end
covers all that was confirmed before it was asked for.
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

Which: TypeAlias = Literal["begins", "ends"]
_SPECS = {"begins": OffsetSpec.earliest(), "ends": OffsetSpec.latest()}  # type: ignore[no-untyped-call]


_TRY_S = 1.5
"""A leader that is gone does not say so: ask soon for who leads now."""
_PAUSE_S = 0.1


def checked_offset(found: ListOffsetsResultInfo, doing: str) -> int:
    """The offset that a leader answered with. One that dies meanwhile gives none, and no error either."""
    if found.offset < 0:
        raise BrokerUnavailable(f"{doing}: the leader went away before it answered")
    return int(found.offset)


class Ends:
    """Asks for the first offset of a partition of one topic, or for the one after its last record."""

    def __init__(self, link: KafkaLink, topic: str) -> None:
        self._link = link
        self._topic = topic
        self._try_s = min(_TRY_S, link.timeout_s)
        self._next: dict[Which, asyncio.Task[dict[int, Future[ListOffsetsResultInfo]]] | None] = {}
        self._wanted: dict[Which, set[int]] = {"begins": set(), "ends": set()}

    async def ask(self, which: Which, partition: int) -> int:
        """Asks again while leaders move, until the link's deadline."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._link.timeout_s
        while True:
            try:
                return await self._ask(which, partition)
            except (BrokerUnavailable, Disconnected, RequestTimeout):
                if loop.time() + _PAUSE_S > deadline:
                    raise
            await asyncio.sleep(_PAUSE_S)
            await self._learn_leaders()

    async def _learn_leaders(self) -> None:
        """The library keeps on asking the leaders that it knows, also after they said that they are none."""
        doing = f"asking who leads {self._topic}"
        with suppress(BrokerUnavailable, Disconnected, RequestTimeout):  # the next question tells what is wrong
            await self._link.call(self._list, doing=doing, timeout_s=self._try_s)

    def _list(self) -> None:
        self._link.admin.list_topics(self._topic, timeout=self._try_s)

    async def _ask(self, which: Which, partition: int) -> int:
        sending = self._next.get(which)
        if sending is None:
            sending = self._next[which] = asyncio.create_task(self._send(which))
        self._wanted[which].add(partition)
        # A task of its own: whoever came first may go away, and the others still want to know.
        answers = await asyncio.shield(sending)
        doing = f"asking where {self._topic}/{partition} {which}"
        try:
            found = await self._link.answer(answers[partition], doing=doing, timeout_s=self._try_s)
        except KafkaRefused as refused:
            if refused.code != KafkaError._NOENT:
                raise
            raise BrokerUnavailable(str(refused)) from refused  # no leader is known for the moment
        return checked_offset(found, doing)

    async def _send(self, which: Which) -> dict[int, Future[ListOffsetsResultInfo]]:
        self._next[which], wanted, self._wanted[which] = None, self._wanted[which], set()
        spec: OffsetSpec = _SPECS[which]
        asked = self._link.admin.list_offsets(
            {TopicPartition(self._topic, partition): spec for partition in wanted},
            request_timeout=self._try_s,
        )
        return {place.partition: answer for place, answer in asked.items()}
