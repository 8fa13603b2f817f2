"""How far behind a partition is: in messages, and as the age of the oldest that is not handled."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import NamedTuple

from keylane.errors import NotFound
from keylane.jetstream import Connection, ConsumerConfig, ConsumerInfo, consumers, parse_time, streams

_COUNTER_S = 5.0


class PartitionLag(NamedTuple):
    """The lag of one partition, as its consumer shows it."""

    messages: int
    """Not acked: waiting, or delivered."""
    in_flight: int | None
    """Delivered and not acked; None: partitions share a consumer, which does not tell."""
    oldest_s: float | None
    """The age of the oldest message that is not acked; None: there is none, or it is not known."""


async def partition_lag(connection: Connection, subject_filter: str, info: ConsumerInfo) -> PartitionLag:
    """`info`: the consumer of the partition."""
    messages = info.num_pending + info.num_ack_pending
    oldest_s = await _oldest_s(connection, subject_filter, info) if messages else None
    return PartitionLag(messages, info.num_ack_pending, oldest_s)


async def unread_lag(
    connection: Connection, stream: str, subject_filter: str, position: int, *, is_queue: bool
) -> PartitionLag:
    """The lag of a partition that shares its consumer: `position` is how far it is handled.

    On a work queue that is all that the stream holds of it. A stream with limits is asked through a consumer that is
    deleted at once: it counts what is above the position.
    """
    if is_queue:
        wire = await streams.info_json(connection, stream, subjects_filter=subject_filter)
        messages = sum((wire["state"].get("subjects") or {}).values())
    else:
        config = ConsumerConfig(
            name=f"keylane-lag-{secrets.token_hex(6)}",
            filter_subject=subject_filter,
            deliver_policy="by_start_sequence",
            opt_start_seq=position + 1,
            ack_policy="none",
            inactive_threshold_s=_COUNTER_S,
            num_replicas=1,
            mem_storage=True,
        )
        info = await consumers.create(connection, stream, config)
        consumers.post_delete(connection, stream, info.name)
        messages = info.num_pending
    oldest_s = await _age_s(connection, stream, subject_filter, position + 1) if messages else None
    return PartitionLag(messages, None, oldest_s)


async def _oldest_s(connection: Connection, subject_filter: str, info: ConsumerInfo) -> float | None:
    return await _age_s(connection, info.stream, subject_filter, info.ack_floor + 1)


async def _age_s(connection: Connection, stream: str, subject_filter: str, sequence: int) -> float | None:
    try:
        message = await streams.get_message(connection, stream, sequence=sequence, next_by_subject=subject_filter)
    except NotFound:
        return None  # it was handled or deleted meanwhile
    return max(0.0, (datetime.now(UTC) - parse_time(message["time"])).total_seconds())
