"""A stream to read splits of, without Spark: what a split should give, and what it gives."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from keylane.core.partitions import Partitioning
from keylane.errors import NotFound
from keylane.jetstream import Outgoing, consumers, parse_time, publish_many
from keylane.spark.address import Address
from keylane.spark.executor.split_reader import read_split
from keylane.spark.sync_connection import SyncConnection, shared_connection
from keylane.spark.tasks import ReadMethod, ReadSpec, Split
from tests.waiter import wait_until

WAYS: tuple[ReadMethod, ...] = ("consumer", "direct")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ground:
    """One stream on one server."""

    address: Address
    stream: str

    @property
    def link(self) -> SyncConnection:
        return shared_connection(self.address)

    def api(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.link.call(self.link.connection.api.request(subject, request))

    def create(self, *subjects: str, stream: str | None = None, **fields: Any) -> None:
        name = stream or self.stream
        config = {"name": name, "subjects": list(subjects), "allow_direct": True, **fields}
        self.api(f"STREAM.CREATE.{name}", config)

    def publish(self, messages: Sequence[Outgoing]) -> None:
        results = self.link.call(publish_many(self.link.connection, messages))
        assert not [one for one in results if isinstance(one, Exception)]

    def publish_raw(self, *commands: bytes) -> None:
        """Bytes as they are: for what no well-behaved client would send."""

        async def post() -> None:
            for command in commands:
                self.link.connection.nats.post(command)
            await self.link.connection.flush()

        self.link.call(post())

    def wait_for(self, messages: int) -> None:
        """Until the stream has copied that many from its sources."""
        wait_until(lambda: self.api(f"STREAM.INFO.{self.stream}")["state"]["messages"], lambda had: had >= messages)

    def last(self, subject_filter: str | None = None) -> int:
        """What the driver asks the leader for."""
        try:
            answer = self.api(f"STREAM.MSG.GET.{self.stream}", {"last_by_subj": subject_filter or ">"})
        except NotFound:
            return 0
        return int(answer["message"]["seq"])

    def delete(self, *sequences: int) -> None:
        for sequence in sequences:
            self.api(f"STREAM.MSG.DELETE.{self.stream}", {"seq": sequence})

    def stored(self, sequence: int) -> tuple[str, bytes, datetime]:
        """Subject, payload and time of a message, as the leader tells them."""
        message = self.api(f"STREAM.MSG.GET.{self.stream}", {"seq": sequence})["message"]
        return message["subject"], base64.b64decode(message.get("data", "")), parse_time(message["time"])

    def split(
        self,
        way: ReadMethod,
        after: int = 0,
        upto: int | None = None,
        subject_filter: str | None = None,
        *,
        numbered: bool = False,
        partitioning: tuple[Partitioning, ...] = (),
        with_headers: bool = False,
        with_data: bool = True,
        last: int | None = None,
    ) -> Split:
        reading = ReadSpec(self.address, self.stream, way, numbered, partitioning, with_headers, with_data)
        newest = self.last(subject_filter) if last is None else last
        return Split(reading, after, self.last() if upto is None else upto, subject_filter, newest)

    def consumers(self) -> list[str]:
        return self.link.call(consumers.names(self.link.connection, self.stream))


@contextmanager
def ground_at(url: str, stream: str) -> Iterator[Ground]:
    """The stream is deleted at the end, and the link closed."""
    ground = Ground(Address(url=url), stream)
    try:
        yield ground
        ground.api(f"STREAM.DELETE.{stream}")
    finally:
        ground.link.close()


def rows_of(split: Split) -> list[Row]:
    return [row for batch in read_split(split) for row in batch.to_pylist()]


def sequences_of(split: Split) -> list[int]:
    return [sequence for batch in read_split(split) for sequence in batch.column("sequence").to_pylist()]
