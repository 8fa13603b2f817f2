"""A consumer as a JSON object. Pure, and free of rich: programs that ask often wait less."""

from __future__ import annotations

from typing import Any

from keylane.cli.command import pin_of
from keylane.cli.formatting import as_utc
from keylane.jetstream import ConsumerInfo


def policy_of(info: ConsumerInfo) -> str | None:
    policy = info.config.priority_policy
    return None if policy == "none" else policy


def consumer_object(info: ConsumerInfo) -> dict[str, Any]:
    """A value that the consumer does not have is null."""
    pin = pin_of(info)
    groups = info.config.priority_groups or ()
    return {
        "stream": info.stream,
        "consumer": info.name,
        "policy": policy_of(info),
        "group": groups[0] if groups else None,
        "priority_timeout_s": info.config.priority_timeout_s,
        "pinned_id": pin.pinned_client_id if pin else None,
        "pinned_since": as_utc(pin.pinned_since) if pin and pin.pinned_since else None,
        "pending": info.num_pending,
        "ack_pending": info.num_ack_pending,
        "max_ack_pending": info.config.max_ack_pending,
        "redelivered": info.num_redelivered,
        "waiting_pulls": info.num_waiting,
        "delivered": info.delivered_sequence,
        "ack_floor": info.ack_floor,
        "leader": info.leader,
        "paused": info.paused,
        "created": as_utc(info.created),
    }
