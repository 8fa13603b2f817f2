"""`MarshalMessage`, what the handler of a Marshal consumer gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from keylane.core.claim_choice import TopicPartition
from keylane.marshal.source import SourceRecord


class MarshalMessage:
    """One message of a claimed partition.

    `token` is a fencing token: it grows with every new owner of the partition. Store it with the effect of the message
    and reject tokens lower than the stored one, as protection from a paused owner that does not know yet that it lost
    the partition.
    """

    __slots__ = ("record", "token", "where")

    def __init__(self, record: SourceRecord, where: TopicPartition, token: int) -> None:
        self.record = record
        self.where = where
        self.token = token

    def __repr__(self) -> str:
        return f"<MarshalMessage {self.topic}/{self.partition} offset={self.offset} token={self.token}>"

    @property
    def topic(self) -> str:
        return self.where.topic

    @property
    def partition(self) -> int:
        return self.where.partition

    @property
    def offset(self) -> int:
        return self.record.offset

    @property
    def key(self) -> bytes | None:
        return self.record.key

    @property
    def data(self) -> bytes:
        return self.record.data

    @property
    def timestamp_ms(self) -> int:
        return self.record.timestamp_ms

    @property
    def headers(self) -> tuple[tuple[str, bytes], ...]:
        return self.record.headers

    @property
    def subject(self) -> str | None:
        """The subject it was published on, if the source has subjects."""
        return self.record.subject

    @property
    def is_tombstone(self) -> bool:
        """Whether its value is null: in a compacted topic its key is deleted."""
        return self.record.is_tombstone


Handler = Callable[[MarshalMessage], Awaitable[None]] | Callable[[MarshalMessage], None]
Failure = Callable[[MarshalMessage, BaseException, int], None]
GiveUp = Callable[[MarshalMessage, BaseException, int], Awaitable[None]]
