"""A fleet as tables and text. What is unknown is written as such, never as 0."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keylane.cli.display import facts_panel
from keylane.cli.fleet.worker_reports import owns
from keylane.cli.formatting import as_utc
from keylane.fleet import FleetStatus, MovedPartitions, PartitionStatus, PastAssignment, WorkerStatus

_BAR = 24


def fleet_panel(found: FleetStatus) -> Panel:
    owned = sum(one.owner is not None for one in found.partitions)
    return facts_panel(
        f"{found.stream} / {found.fleet}",
        [
            ("partitions", f"{len(found.partitions):,}, {owned:,} owned"),
            ("lag", lag_text(found.partitions)),
            ("assignment", f"version {found.version}, epoch {found.epoch}: {found.reason}"),
            *([("change", found.change)] if found.change is not None else []),
        ],
    )


def worker_table(found: FleetStatus, *, rows: int | None = None) -> RenderableType:
    """Who works, who owns what, and how far behind it is. `rows`: how many fit."""
    table = _table("worker", "state", "host", "owns", "lag", "")
    owners = {one.id: [each for each in found.partitions if each.owner == one.id] for one in found.workers}
    most = max((lag for lag in (_sum(mine) for mine in owners.values()) if lag is not None), default=0)
    shown = found.workers if rows is None else found.workers[: max(1, rows - 1)]
    for one in shown:
        mine = owners[one.id]
        lag = _sum(mine)
        table.add_row(
            one.id,
            state_text(one),
            one.name or one.host,
            owns(one.partitions) if one.partitions else "-",
            lag_text(mine) if mine else "-",
            Text("█" * round(_BAR * lag / most) if lag and most else "", style="yellow"),
        )
    if len(shown) < len(found.workers):
        table.add_row("…", f"{len(found.workers) - len(shown)} more", "", "", "", "")
    return table


def partition_table(found: FleetStatus) -> Table:
    table = _table("partition", "owner", "assigned to", "in flight", "lag", "token")
    for one in found.partitions:
        table.add_row(
            one.id,
            one.owner or "nobody",
            one.assigned or "nobody",
            "unknown" if one.in_flight is None else f"{one.in_flight:,}",
            lag_text([one]),
            str(one.token or "-"),
        )
    return table


def state_text(worker: WorkerStatus) -> str:
    return ", ".join(
        [worker.state, *(["leader"] if worker.is_leader else []), *(["drained"] if worker.is_drained else [])]
    )


def history_table(found: Sequence[PastAssignment]) -> Table:
    """The oldest first."""
    table = _table("written", "version", "epoch", "cause", "reason", "moves")
    for one in found:
        moves = "\n".join(map(_move_text, one.moves)) or "nothing"
        table.add_row(as_utc(one.at), str(one.version), str(one.epoch), one.cause, Text(one.reason), Text(moves))
    return table


def _move_text(move: MovedPartitions) -> str:
    return f"{owns(move.partitions)}: {move.before or 'nobody'} → {move.after or 'nobody'}"


def lag_text(partitions: Sequence[PartitionStatus]) -> str:
    """The lag in messages and in seconds."""
    messages = _sum(partitions)
    if messages is None:
        known = [one.lag for one in partitions if one.lag is not None]
        unknown = len(partitions) - len(known)
        return "unknown" if not known else f"{sum(known):,} and {unknown} partitions unknown"
    if not messages:
        return "0"
    ages = [one.oldest_s for one in partitions if one.lag]
    known_ages = [age for age in ages if age is not None]
    if not known_ages:
        return f"{messages:,}, age unknown"
    return f"{messages:,}, oldest {max(known_ages):.1f} s"


def _sum(partitions: Sequence[PartitionStatus]) -> int | None:
    lags = [one.lag for one in partitions]
    return None if None in lags else sum(lag for lag in lags if lag is not None)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
