"""A consumer as a panel, as a row of a table, as a line of text.

Pure: takes the consumer's info and the time, returns text and rich renderables.
"""

from __future__ import annotations

from datetime import datetime

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keylane.cli.command import pin_of
from keylane.cli.consumer.json import policy_of
from keylane.cli.display import facts_panel
from keylane.cli.formatting import age
from keylane.jetstream import ConsumerInfo, PriorityGroupState

NOBODY = "nobody"


def consumer_panel(info: ConsumerInfo, now: datetime) -> Panel:
    """What an operator asks first."""
    return facts_panel(f"{info.stream} / {info.name}", _facts(info, now))


def _facts(info: ConsumerInfo, now: datetime) -> list[tuple[str, Text | str]]:
    config, pin = info.config, pin_of(info)
    facts: list[tuple[str, Text | str]] = [("policy", policy_of(info) or "none (no priority group)")]
    if config.priority_groups:
        facts.append(("group", ", ".join(config.priority_groups)))
    if pin is not None:
        facts.append(("pinned", _pinned_id(pin)))
        if pin.pinned_since is not None:
            since = pin.pinned_since.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
            facts.append(("since", f"{since} ({age(pin.pinned_since, now)} ago)"))
        facts.append(("pin timeout", f"{config.priority_timeout_s:g} s without a pull"))
    limit = config.max_ack_pending
    filters = config.filter_subjects or ((config.filter_subject,) if config.filter_subject else ())
    facts += [
        ("pending", f"{info.num_pending:,}"),
        ("ack pending", f"{info.num_ack_pending:,}" + (f" of {limit:,}" if limit and limit > 0 else "")),
        ("redelivered", f"{info.num_redelivered:,}"),
        ("waiting pulls", f"{info.num_waiting:,}"),
        ("delivered", f"up to sequence {info.delivered_sequence:,}"),
        ("ack floor", f"sequence {info.ack_floor:,}"),
        ("filter", "\n".join(filters) or "none (the whole stream)"),
        ("leader", info.leader or "none (a single server)"),
        ("paused", Text("yes", style="yellow") if info.paused else "no"),
    ]
    return facts


def consumer_table(infos: list[ConsumerInfo], now: datetime, *, width: int, rows: int, stale: bool) -> Table:
    """One row for each consumer, at most `rows`; a narrow screen omits columns."""
    columns = [name for name, needed in _COLUMNS.items() if width >= needed]
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 2, 0, 0), pad_edge=False)
    table.row_styles = ["dim"] if stale else []
    table.add_column("consumer", no_wrap=True, overflow="ellipsis", ratio=1, min_width=10)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in _TEXT_COLUMNS else "right")
    listed = infos if len(infos) <= rows else infos[: max(rows - 1, 1)]
    for info in listed:
        cells = _cells(info, now)
        table.add_row(_label(info), *(cells[name] for name in columns))
    if len(listed) < len(infos):
        table.add_row(Text(f"and {len(infos) - len(listed):,} more", style="dim"))
    return table


# Each column of the table, and the smallest width of the screen that shows it.
_COLUMNS = {"policy": 96, "pinned": 0, "for": 68, "pending": 0, "ack pending": 56, "waiting": 76}
_TEXT_COLUMNS = ("policy", "pinned")


def _label(info: ConsumerInfo) -> Text:
    label = Text(info.name)
    if info.paused:
        label.append(" (paused)", style="yellow")
    return label


def _cells(info: ConsumerInfo, now: datetime) -> dict[str, Text | str]:
    pin = pin_of(info)
    return {
        "policy": policy_of(info) or "-",
        "pinned": _pinned_id(pin) if pin else "-",
        "for": age(pin.pinned_since, now) if pin and pin.pinned_since else "-",
        "pending": f"{info.num_pending:,}",
        "ack pending": f"{info.num_ack_pending:,}",
        "waiting": f"{info.num_waiting:,}",
    }


def consumer_line(info: ConsumerInfo, now: datetime) -> str:
    """A consumer on one line, for logs."""
    parts = []
    pin = pin_of(info)
    if pin is not None:
        holder = pin.pinned_client_id or NOBODY
        parts.append(f"pinned {holder}" + (f" for {age(pin.pinned_since, now)}" if pin.pinned_since else ""))
    parts += [f"pending {info.num_pending}", f"ack pending {info.num_ack_pending}"]
    if info.paused:
        parts.append("paused")
    return f"{info.name}: {', '.join(parts)}"


def _pinned_id(pin: PriorityGroupState) -> Text:
    if pin.pinned_client_id is None:
        return Text(NOBODY, style="yellow")
    return Text(pin.pinned_client_id, style="green")
