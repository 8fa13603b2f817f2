"""The consumer of one worker: its partitions are the filters, and every message goes to the reader of its partition.

`update_worker_consumer` is the contract: give it all partitions of the worker; it deduplicates, compares with what is
there, and changes the filters of a running consumer, or does nothing. More subjects than one consumer may have are
refused, or get a second consumer where that is allowed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from keylane.core.consumer_filters import (
    SUBJECT_CAP,
    AdmitFilters,
    FilterChange,
    Filters,
    ReleaseMessages,
    UpdatePace,
    split_filters,
)
from keylane.core.fleet_names import worker_consumer
from keylane.core.fleet_partitions import Partition
from keylane.core.subjects import matches
from keylane.errors import InvalidInput, KeylaneError
from keylane.fleet.shared_consumer import ConsumerEvents, ConsumerTerms, SharedConsumer
from keylane.jetstream import Connection, Message

_log = logging.getLogger("keylane.fleet")

_REMEMBERED_SUBJECTS = 65_536
_UPDATE_S = 30.0

BatchHandler = Callable[[list[Message]], None]


class FilterReader(Protocol):
    """Reads one partition through a consumer that others share."""

    def take(self, batch: list[Message]) -> None:
        """Messages of the partition, as they are delivered."""

    def admitted(self, last_sequence: int) -> None:
        """The consumer delivers the partition now, on a stream with limits from after this sequence at the latest."""

    def interrupted(self) -> None:
        """The consumer is gone. `admitted` follows."""

    def pinned(self, pin_id: str | None) -> None: ...

    async def stream_made_anew(self) -> None: ...


@dataclass(slots=True)
class UpdateCounts:
    """For metrics and tests."""

    updates: int = 0
    skipped: int = 0
    duplicates: int = 0
    failures: int = 0
    seconds: float = 0.0


class WorkerConsumer:
    """All consumers of one worker: one, or more if it may be split."""

    def __init__(
        self,
        connection: Connection,
        worker_id: str,
        terms: ConsumerTerms,
        *,
        may_change: Callable[[], bool],
        on_trouble: Callable[[str], None] = lambda _: None,
        updated: Callable[[float, KeylaneError | None], None] = lambda _seconds, _error: None,
        on_delivered: Callable[[list[Message]], None] | None = None,
        max_subjects: int = SUBJECT_CAP,
        may_split: bool = False,
        pace: UpdatePace | None = None,
        counts: UpdateCounts | None = None,
    ) -> None:
        """`may_change`: whether this process surely holds the worker id. `on_trouble`: for the leader.

        `updated`: told of every change, with its seconds, and why it failed.
        """
        self.worker_id = worker_id
        self._connection = connection
        self._terms = terms
        self._may_change = may_change
        self._on_trouble = on_trouble
        self._updated = updated
        self._on_delivered = on_delivered
        self._max_subjects = max_subjects
        self._may_split = may_split
        self._pace = pace
        self._parts: list[SharedConsumer] = []
        self._readers: dict[str, FilterReader] = {}
        self._wanted: Filters = frozenset()
        self._routes: dict[bytes, FilterReader | None] = {}
        self._by_token: dict[str, list[str]] = {}
        self._handler: BatchHandler = self._deliver
        self._pin_id: str | None = None
        self.counts = counts or UpdateCounts()

    def __repr__(self) -> str:
        return f"<WorkerConsumer {self.worker_id} {self._parts!r}>"

    @property
    def filters(self) -> Filters:
        """What the server has, as far as is known."""
        return frozenset().union(*(one.filters.present or () for one in self._parts))

    async def update_worker_consumer(
        self,
        worker_id: str,
        partitions: Iterable[Partition],
        handler: BatchHandler | None = None,
        timeout_s: float = _UPDATE_S,
    ) -> bool:
        """Have exactly these partitions delivered; returns False if that is so already.

        Raises `SubjectCapExceeded` (nothing changes), `ConsumerUpdateUnconfirmed` (the server did not confirm it in
        time; the last good filters hold, and it is tried again in the background) or `ConsumerUpdateCancelled`. The
        pull loop runs on in any case. No partitions: the consumer is deleted, and is made again with the next ones.
        """
        if worker_id != self.worker_id:
            raise InvalidInput(f"this is the consumer of worker {self.worker_id!r}, not of {worker_id!r}")
        if handler is not None:
            self._handler = handler
        listed = Counter(one.filter for one in partitions)
        repeated = sorted(one for one, times in listed.items() if times > 1)
        if repeated:
            self.counts.duplicates += listed.total() - len(listed)
            _log.warning("%r: subjects given twice count once: %s", self, ", ".join(repeated[:10]))
        if not self._want(frozenset(listed)):
            return False
        for part in self._parts:
            await part.wait(lambda filters: filters.is_settled, timeout_s)
        return True

    async def add(self, subject_filter: str, reader: FilterReader) -> None:
        """Have a partition delivered to its reader. Returns when the consumer has it, or raises."""
        self._set_reader(subject_filter, reader)
        self._want(self._wanted | {subject_filter})
        for part in self._parts:
            if subject_filter in part.filters.wanted:
                part.admit_again(subject_filter)
                await part.wait(
                    lambda filters: subject_filter in filters.admitted or subject_filter not in filters.wanted
                )

    async def remove(self, subject_filter: str) -> None:
        """Have a partition delivered no more. Returns when the server has confirmed it."""
        self._want(self._wanted - {subject_filter})
        for part in self._parts:
            await part.wait(lambda filters: subject_filter not in (filters.present or ()))

    def drop(self, subject_filter: str) -> None:
        """The same without waiting, and forget the reader."""
        self._want(self._wanted - {subject_filter})
        self._set_reader(subject_filter, None)

    async def close(self) -> None:
        """Stop reading. What still has filters stays on the server, for whoever may have the worker id by now."""
        for part in self._parts:
            await part.close()

    # ---- filters ------------------------------------------------------------------------------------------------

    def _want(self, filters: Filters) -> bool:
        if filters == self._wanted:
            self.counts.skipped += 1
            return False
        split = split_filters(
            [part.filters.wanted for part in self._parts], filters, cap=self._max_subjects, may_split=self._may_split
        )
        self._wanted = filters
        while len(self._parts) < len(split):
            self._parts.append(self._new_part(len(self._parts)))
        for part, wanted in zip(self._parts, split, strict=True):
            part.want(wanted)
        return True

    def _new_part(self, number: int) -> SharedConsumer:
        events = ConsumerEvents(
            take=lambda batch: self._handler(batch),  # noqa: PLW0108 - it may be replaced
            admitted=self._admitted,
            interrupted=self._interrupted,
            pinned=self._pinned,
            stream_made_anew=self._stream_made_anew,
            escalated=self._on_trouble,
            changed=self._changed,
        )
        name = worker_consumer(self.worker_id, number)
        return SharedConsumer(self._connection, name, self._terms, events, may_change=self._may_change, pace=self._pace)

    def _changed(self, change: FilterChange, took_s: float, error: KeylaneError | None) -> None:
        if isinstance(change, AdmitFilters | ReleaseMessages):
            return
        self._updated(took_s, error)
        if error is None:
            self.counts.updates += 1
            self.counts.seconds += took_s
        else:
            self.counts.failures += 1

    # ---- readers --------------------------------------------------------------------------------------------------

    def _set_reader(self, subject_filter: str, reader: FilterReader | None) -> None:
        if reader is not None:
            self._readers[subject_filter] = reader
            reader.pinned(self._pin_id)
        else:
            self._readers.pop(subject_filter, None)
        self._routes.clear()
        self._by_token = {}
        for one in self._readers:
            self._by_token.setdefault(one.split(".", 1)[0], []).append(one)

    def _deliver(self, batch: list[Message]) -> None:
        """Most batches are of many partitions: each reader gets its own, in order."""
        if self._on_delivered is not None:
            self._on_delivered(batch)
        routes = self._routes
        shares: dict[FilterReader, list[Message]] = {}
        strays: list[Message] = []
        for message in batch:
            subject = message.raw_subject
            reader = routes[subject] if subject in routes else self._route(subject)
            if reader is None:
                strays.append(message)
            elif reader in shares:
                shares[reader].append(message)
            else:
                shares[reader] = [message]
        for reader, share in shares.items():
            reader.take(share)
        if not self._terms.is_queue:
            for message in strays:  # the position of a partition is in its record, not here
                message.ack()

    def _route(self, raw_subject: bytes) -> FilterReader | None:
        subject = raw_subject.decode("utf-8", "surrogateescape")
        found = None
        for token in (subject.split(".", 1)[0], "*", ">"):
            for one in self._by_token.get(token, ()):
                if matches(one, subject):
                    found = self._readers[one]
        if len(self._routes) >= _REMEMBERED_SUBJECTS:
            self._routes.clear()
        self._routes[raw_subject] = found
        return found

    def _admitted(self, filters: Filters, last_sequence: int) -> None:
        for one in filters:
            if one in self._readers:
                self._readers[one].admitted(last_sequence)

    def _interrupted(self, filters: Filters) -> None:
        for one in filters:
            if one in self._readers:
                self._readers[one].interrupted()

    def _pinned(self, pin_id: str | None) -> None:
        self._pin_id = pin_id
        for reader in self._readers.values():
            reader.pinned(pin_id)

    async def _stream_made_anew(self) -> None:
        for reader in list(self._readers.values()):
            await reader.stream_made_anew()
