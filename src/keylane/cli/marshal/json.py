"""A coordination log as JSON objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from keylane.core.claim_facts import Claim, Key, Pause
from keylane.core.world import World

Lags = Mapping[Key, int]


def select_claims(world: World, group: str | None, topic: str | None) -> list[Claim]:
    """The claims of this group and topic, sorted; None means all."""
    found = [one for one in world.claims() if group in (None, one.key.group) and topic in (None, one.key.topic)]
    return sorted(found, key=lambda one: one.key)


def world_object(
    world: World, claims: Sequence[Claim], pauses: Sequence[Pause], *, at_ms: int | None, lags: Lags | None
) -> dict[str, Any]:
    """`at_ms`: the requested time; None means the newest time of each partition."""
    return {
        "log": [
            {"partition": number, "read_to": world.next_offset(number), "time": time_text(world.now_ms(number))}
            for number in range(world.partitions)
        ],
        "claims": [claim_object(one, now_of(world, one, at_ms), lags) for one in claims],
        "pauses": [pause_object(one) for one in pauses],
        "groups": world.groups(),
        "unreadable": world.unreadable,
        "misplaced": world.misplaced,
        "skipped": [
            {"log_partition": one.log_partition, "record": one.at, "reason": one.unreadable.reason}
            for one in world.broken
        ],
    }


def claim_object(claim: Claim, now_ms: int, lags: Lags | None = None) -> dict[str, Any]:
    freshness = claim.freshness(now_ms)
    found: dict[str, Any] = {
        "group": claim.key.group,
        "topic": claim.key.topic,
        "partition": claim.key.partition,
        "owner": claim.owner.client if claim.owner else None,
        "instance": claim.owner.instance if claim.owner else None,
        "token": claim.token,
        "freshness": freshness.value if freshness else None,
        "since": time_text(claim.since_ms),
        "heartbeat": time_text(claim.heartbeat_ms),
        "offset": claim.offset,
        "taken_to": claim.messages.proposed if claim.messages else None,
        "requested_by": [one.owner.client for one in claim.requests],
        "released_by": claim.released.owner.client if claim.released and claim.owner is None else None,
    }
    return found if lags is None else found | {"lag": lags.get(claim.key)}


def pause_object(pause: Pause) -> dict[str, Any]:
    return {
        "group": pause.group,
        "log_partition": pause.log_partition,
        "until": time_text(pause.until_ms),
        "by": pause.by.client,
    }


def now_of(world: World, claim: Claim, at_ms: int | None = None) -> int:
    return at_ms if at_ms is not None else world.now_ms(claim.log_partition) or 0


def time_text(ms: int | None) -> str | None:
    if ms is None:
        return None
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):  # the time of a record can be out of range for a datetime
        return f"{ms} ms"
