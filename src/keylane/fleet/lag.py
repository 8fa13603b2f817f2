"""How far behind a partition is: in messages, and as the age of the oldest that is not handled."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from keylane.errors import NotFound
from keylane.jetstream import Connection, ConsumerInfo, parse_time, streams


class PartitionLag(NamedTuple):
    """The lag of one partition, as its consumer shows it."""

    messages: int
    """Not acked: waiting, or delivered."""
    in_flight: int
    """Delivered and not acked."""
    oldest_s: float | None
    """The age of the oldest message that is not acked; None: there is none, or it is not known."""


async def partition_lag(connection: Connection, subject_filter: str, info: ConsumerInfo) -> PartitionLag:
    """`info`: the consumer of the partition."""
    messages = info.num_pending + info.num_ack_pending
    oldest_s = await _oldest_s(connection, subject_filter, info) if messages else None
    return PartitionLag(messages, info.num_ack_pending, oldest_s)


async def _oldest_s(connection: Connection, subject_filter: str, info: ConsumerInfo) -> float | None:
    try:
        message = await streams.get_message(
            connection, info.stream, sequence=info.ack_floor + 1, next_by_subject=subject_filter
        )
    except NotFound:
        return None  # it was handled or deleted meanwhile
    return max(0.0, (datetime.now(UTC) - parse_time(message["time"])).total_seconds())
