"""A coordination log as JSON objects and as a table. Pure; only the table loads rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from keylane.core.claim_facts import Claim, Key, Pause
from keylane.core.world import World

if TYPE_CHECKING:
    from rich.table import Table

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


_STYLES = {"fresh": "green", "unknown": "yellow", "stale": "red"}


def claim_table(
    world: World, claims: Sequence[Claim], *, at_ms: int | None, lags: Lags | None, rows: int | None = None
) -> Table:
    """One row for each claim, at most `rows`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("group", "topic"):
        table.add_column(name, no_wrap=True)
    table.add_column("partition", justify="right")
    table.add_column("owner", overflow="fold")
    table.add_column("state")
    for name in ("offset", "token", *(["lag"] if lags is not None else [])):
        table.add_column(name, justify="right")
    table.add_column("heartbeat", no_wrap=True)
    listed = claims if rows is None or len(claims) <= rows else claims[: max(rows - 1, 1)]
    for claim in listed:
        freshness = claim.freshness(now_of(world, claim, at_ms))
        state = Text(freshness.value, style=_STYLES[freshness.value]) if freshness else Text("free", style="dim")
        numbers = [claim.offset, claim.token, *([lags.get(claim.key)] if lags is not None else [])]
        table.add_row(
            Text(claim.key.group),
            Text(claim.key.topic),
            str(claim.key.partition),
            Text(f"{claim.owner.client} ({claim.owner.instance})" if claim.owner else "-"),
            state,
            *("-" if one is None else f"{one:,}" for one in numbers),
            time_text(claim.heartbeat_ms) or "-",
        )
    if len(listed) < len(claims):
        table.add_row(Text(f"and {len(claims) - len(listed):,} more", style="dim"))
    return table
