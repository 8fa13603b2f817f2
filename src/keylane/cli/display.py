"""What commands show with rich: tables and panels, and the live display that all `watch` commands share.

The live display is a table with a log of events in a terminal, lines in a pipe, or JSON lines.

A watch calls `add` for each event and `refresh` with a `WatchView` of what it knows now. Owns the layout of the screen
and the lines; the view owns the columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keylane.cli.formatting import as_utc, clock, json_text

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


_KEPT_EVENTS = 200
_FEWEST_EVENT_LINES = 5
_OTHER_LINES = 6
"""Lines of the screen that are neither a row nor an event."""


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change: as text for people, as facts for programs."""

    name: str
    text: str
    facts: dict[str, Any]
    time: datetime = field(default_factory=_now)
    in_table: bool = False
    """The table shows it, so the log of events does not repeat it."""


class WatchView(Protocol):
    """What a watch knows now."""

    @property
    def row_count(self) -> int: ...

    def headline(self, now: datetime, *, ended: bool) -> Text: ...

    def table(self, now: datetime, *, width: int, rows: int) -> RenderableType: ...


class Display(Protocol):
    """Where a watch shows what it finds."""

    def add(self, event: WatchEvent) -> None: ...

    def refresh(self, view: WatchView) -> None: ...


@contextmanager
def open_display(*, as_json: bool) -> Iterator[Display]:
    """JSON lines on request, a screen on a terminal, else plain lines."""
    console = Console()
    if as_json or not console.is_terminal or console.is_dumb_terminal:
        yield _Lines(as_json=as_json)
        return
    screen = _Screen(console)
    try:
        yield screen
    finally:
        screen.close()


class _Lines:
    """One line for each event, for pipes and programs."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def add(self, event: WatchEvent) -> None:
        if self._as_json:
            print(json_text({"time": as_utc(event.time), "event": event.name} | event.facts), flush=True)
        else:
            print(f"{clock(event.time)}  {event.text}", flush=True)

    def refresh(self, view: WatchView) -> None:
        """Lines show only changes."""


class _Screen:
    """A live table above a log of events. The last picture stays when the screen closes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._events: deque[WatchEvent] = deque(maxlen=_KEPT_EVENTS)
        self._live = Live(console=console, auto_refresh=False, screen=True)
        self._view: WatchView | None = None

    def close(self) -> None:
        if self._view is not None:
            self._live.stop()
            self._console.print(self._picture(self._view, ended=True))

    def add(self, event: WatchEvent) -> None:
        if not event.in_table:
            self._events.append(event)

    def refresh(self, view: WatchView) -> None:
        if self._view is None:  # not earlier: an error of the first request belongs on the normal screen
            self._live.start()
        self._view = view
        self._live.update(self._picture(view), refresh=True)

    def _picture(self, view: WatchView, *, ended: bool = False) -> RenderableType:
        now = _now()
        width, height = self._console.size
        free = height - _OTHER_LINES
        log = max(1, min(len(self._events), _FEWEST_EVENT_LINES))
        rows = max(free - log, 2)
        log = max(free - min(rows, view.row_count), log)
        events = [
            Text(f"{clock(event.time)}  {event.text}", no_wrap=True, overflow="ellipsis")
            for event in list(self._events)[-log:]
        ]
        return Group(
            view.headline(now, ended=ended),
            view.table(now, width=width, rows=rows),
            Text("events", style="bold"),
            *(events or [Text("none yet", style="dim")]),
        )
