"""What the tables and panels of all commands share. Needs rich."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """A console for tables. A pipe has no width, and truncated names are useless, so it gets a wide one."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=_PIPE_WIDTH)


def facts_panel(title: str, facts: Iterable[tuple[str, Text | str]]) -> Panel:
    """Names and values in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value if isinstance(value, Text) else Text(value))  # a name may look like markup
    heading = Text(title, style="bold")
    return Panel(table, title=heading, title_align="left", box=box.ROUNDED, expand=False, padding=(0, 1))
