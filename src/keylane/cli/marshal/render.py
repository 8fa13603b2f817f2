"""Claims as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from keylane.cli.marshal.json import Lags, now_of, time_text
from keylane.core.claim_facts import Claim
from keylane.core.world import World

_STYLES = {"fresh": "green", "unknown": "yellow", "stale": "red"}


def claim_table(
    world: World, claims: Sequence[Claim], *, at_ms: int | None, lags: Lags | None, rows: int | None = None
) -> Table:
    """One row for each claim, at most `rows`."""
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
