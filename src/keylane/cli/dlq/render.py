"""Dead letters as a table and as panels. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keylane.cli.formatting import age, as_utc, printable
from keylane.cli.panels import facts_panel
from keylane.groups.dead_letters import DeadLetter

_MAX_BYTES = 4_000


def dead_letter_table(found: Sequence[DeadLetter], now: datetime) -> Table:
    """One row for each dead letter."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("sequence", justify="right", no_wrap=True)
    table.add_column("group", no_wrap=True)
    table.add_column("partition", justify="right")
    table.add_column("key", overflow="fold")
    table.add_column("tries", justify="right")
    table.add_column("ago", no_wrap=True, justify="right")
    table.add_column("error", overflow="fold")
    for one in found:
        table.add_row(
            str(one.sequence),
            Text(printable(one.group)),
            str(one.partition),
            Text(printable(one.key)),
            str(one.tries),
            age(one.time, now),
            Text(printable(one.error)),
        )
    return table


def dead_letter_panel(one: DeadLetter, now: datetime) -> Panel:
    """One dead letter in full, with the beginning of its data."""
    facts = [
        ("subject", one.subject),
        ("original", f"sequence {one.source_sequence:,} of stream {one.stream}"),
        ("group", f"{one.group}, member {one.member}"),
        ("key", f"{one.key}, partition {one.partition}"),
        ("tries", f"{one.tries:,}"),
        ("error", one.error),
        ("since", f"{as_utc(one.time)} ({age(one.time, now)} ago)"),
        *((f"header {name}", value) for name, value in one.headers.items()),
        ("bytes", f"{len(one.data):,}"),
    ]
    lines = [(printable(name), printable(value)) for name, value in facts]
    traceback = [("traceback", _lines(one.traceback))] if one.traceback else []
    return facts_panel(f"{one.stream} / dead letter {one.sequence}", [*lines, *traceback, ("data", _data(one.data))])


def _data(data: bytes) -> str:
    text = _lines(data[:_MAX_BYTES].decode("utf-8", "backslashreplace"))
    return text if len(data) <= _MAX_BYTES else f"{text}… (--json has all of it)"


def _lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))
