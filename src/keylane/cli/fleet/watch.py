"""`keylane fleet status --watch`: reads the fleet once a second and reports what changes.

It continues while the server is unreachable, and ends only on a signal or when the connection is closed for good.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from keylane import fleet as fleets
from keylane.cli.command import ConnectionOptions
from keylane.cli.display import Display, WatchEvent
from keylane.cli.fleet.render import lag_text, state_text, worker_table
from keylane.cli.fleet.worker_reports import owns
from keylane.cli.formatting import clock
from keylane.errors import KeylaneError
from keylane.fleet import FleetStatus
from keylane.jetstream import Connection

INTERVAL_S = 1.0


class FleetWatchView:
    """The fleet as it was last read."""

    def __init__(self, found: FleetStatus) -> None:
        self.found = found
        self.error = ""
        """Why it may be old; empty while the server answers."""

    @property
    def row_count(self) -> int:
        return len(self.found.workers) + 1

    def headline(self, now: datetime, *, ended: bool) -> Text:
        found = self.found
        text = Text(f"{found.stream} / {found.fleet}", style="bold", no_wrap=True, overflow="ellipsis")
        owned = sum(one.owner is not None for one in found.partitions)
        text.append(f"  {clock(now)}  {owned:,} of {len(found.partitions):,} partitions owned  ", style="not bold")
        text.append(f"lag {lag_text(found.partitions)}  ", style="not bold")
        if self.error:
            text.append(f"not answered ({self.error})", style="red")
        elif not ended:
            text.append("Ctrl-C ends", style="not bold dim")
        return text

    def table(self, now: datetime, *, width: int, rows: int) -> RenderableType:
        del now, width
        return worker_table(self.found, rows=rows)


class FleetWatch:
    """Follows one fleet."""

    def __init__(self, stream: str, fleet: str, display: Display) -> None:
        self._stream, self._fleet = stream, fleet
        self._display = display
        self._shown: dict[str, object] = {}

    async def run(self, link: ConnectionOptions) -> None:
        """Until cancelled. Raises if the first look fails."""
        async with link.open() as connection:
            view = FleetWatchView(await self._look(connection))
            while True:
                self._report(view.found)
                self._display.refresh(view)
                await asyncio.sleep(INTERVAL_S)
                await self._look_again(connection, view)

    async def _look_again(self, connection: Connection, view: FleetWatchView) -> None:
        try:
            view.found = await self._look(connection)
        except KeylaneError as error:
            if connection.is_closed:
                raise
            if not view.error:
                self._add("not_answered", f"not answered: {error}", reason=str(error))
            view.error = str(error)
        else:
            view.error = ""

    async def _look(self, connection: Connection) -> FleetStatus:
        return await fleets.status(connection, self._stream, self._fleet)

    def _report(self, found: FleetStatus) -> None:
        if self._is_news("assignment", found.version):
            text = f"assignment {found.version}, epoch {found.epoch}: {found.reason}"
            self._add("assignment", text, version=found.version, epoch=found.epoch, reason=found.reason)
        for one in found.workers:
            if self._is_news(one.id, (one.state, one.is_leader, one.is_drained, one.partitions)):
                self._add(
                    "worker",
                    f"{one.id}: {state_text(one)}, owns {owns(one.partitions)}",
                    id=one.id,
                    state=one.state,
                    leader=one.is_leader,
                    drained=one.is_drained,
                    partitions=list(one.partitions),
                )
        oldest = [one.oldest_s for one in found.partitions if one.lag]
        if self._is_news("lag", (found.lag, None in oldest)):
            oldest_s = max((age for age in oldest if age is not None), default=None)
            event = WatchEvent(
                "lag", f"lag {lag_text(found.partitions)}", {"lag": found.lag, "oldest_s": oldest_s}, in_table=True
            )
            self._display.add(event)

    def _is_news(self, what: str, value: object) -> bool:
        before = self._shown.get(what)
        self._shown[what] = value
        return before != value

    def _add(self, name: str, text: str, **facts: Any) -> None:
        self._display.add(WatchEvent(name, text, facts))
