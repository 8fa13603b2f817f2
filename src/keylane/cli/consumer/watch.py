"""`keylane consumer watch`: asks for the consumers twice a second, listens for advisories, and reports changes.

It continues while the server is unreachable, and ends only on a signal or when the connection is closed for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.text import Text

from keylane.cli.command import ConnectionOptions, pin_of
from keylane.cli.consumer.json import consumer_object
from keylane.cli.consumer.render import consumer_line, consumer_table
from keylane.cli.display import Display, WatchEvent
from keylane.cli.formatting import clock
from keylane.errors import KeylaneError, NotFound
from keylane.jetstream import Connection, ConnectionHooks, ConsumerInfo, consumers
from keylane.priority import Pinned, Unpinned, advisories

POLL_INTERVAL_S = 0.5
_REASONS = {"admin": "an admin or its own client asked for it", "timeout": "its client did not pull in time"}


@dataclass(slots=True)
class ConsumersView:
    """The consumers as they were when they were last read."""

    stream: str
    consumer: str | None
    server: str = ""
    error: str = ""
    """Why the infos may be old; empty while the server answers."""
    infos: tuple[ConsumerInfo, ...] = ()

    @property
    def row_count(self) -> int:
        return len(self.infos)

    def headline(self, now: datetime, *, ended: bool) -> Text:
        name = f"{self.stream} / {self.consumer}" if self.consumer else self.stream
        text = Text(name, style="bold", no_wrap=True, overflow="ellipsis")
        text.append(f"  {clock(now)}  {self.server}  ", style="not bold dim")
        if self.error:
            text.append(f"reconnecting ({self.error})", style="red")
        elif not self.infos:
            text.append("not there" if self.consumer else "no consumers", style="yellow")
        elif not ended:
            text.append("Ctrl-C ends", style="not bold dim")
        return text

    def table(self, now: datetime, *, width: int, rows: int) -> RenderableType:
        return consumer_table(list(self.infos), now, width=width, rows=rows, stale=bool(self.error))


class ConsumerWatch:
    """Follows one consumer, or all of a stream."""

    def __init__(self, stream: str, consumer: str | None, display: Display) -> None:
        self._view = ConsumersView(stream, consumer)
        self._display = display
        self._states: dict[str, tuple[object, ...]] = {}
        self._wake = asyncio.Event()

    async def run(self, link: ConnectionOptions) -> None:
        """Until cancelled. Raises if the first request fails, or when the connection is closed for good."""
        stream, consumer = self._view.stream, self._view.consumer
        hooks = ConnectionHooks(on_disconnect=self._on_disconnect, on_reconnect=self._on_reconnect)
        async with link.open(hooks) as connection:
            self._view.server = connection.server
            first = await self._request(connection)
            async with advisories(connection, stream, consumer) as events:
                # Not in a task group, which would wrap its error in an exception group.
                listening = asyncio.create_task(self._listen(events))
                try:
                    self._update(first)
                    await self._poll(connection, listening)
                finally:
                    listening.cancel()

    async def _poll(self, connection: Connection, listening: asyncio.Task[None]) -> None:
        while not listening.done():
            self._display.refresh(self._view)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self._wake.wait()
            self._wake.clear()
            if connection.is_connected:
                await self._read(connection)
        listening.result()

    async def _read(self, connection: Connection) -> None:
        try:
            infos = await self._request(connection)
        except NotFound:
            infos = []
        except KeylaneError as error:
            if not self._view.error:
                self._disconnected(str(error))
            return
        if self._view.error:
            self._view.error = ""
            server = connection.server
            self._display.add(WatchEvent("connected", f"connected to {server}", {"server": server}))
        self._update(infos)

    async def _request(self, connection: Connection) -> list[ConsumerInfo]:
        stream, consumer = self._view.stream, self._view.consumer
        if consumer is not None:
            return [await consumers.info(connection, stream, consumer)]
        return sorted([info async for info in consumers.list_all(connection, stream)], key=lambda one: one.name)

    async def _listen(self, events: AsyncIterator[Pinned | Unpinned]) -> None:
        try:
            async for event in events:
                self._display.add(_advisory_event(event))
                self._wake.set()
        finally:
            self._wake.set()

    def _update(self, infos: list[ConsumerInfo]) -> None:
        self._view.infos = tuple(infos)
        now = datetime.now(UTC)
        for info in infos:
            state = (info.created, info.paused, pin_of(info), info.num_pending, info.num_ack_pending, info.leader)
            if self._states.get(info.name) != state:
                self._states[info.name] = state
                text = consumer_line(info, now)
                self._display.add(WatchEvent("state", text, consumer_object(info), now, in_table=True))
        for name in self._states.keys() - {info.name for info in infos}:
            del self._states[name]
            facts = {"stream": self._view.stream, "consumer": name}
            self._display.add(WatchEvent("gone", f"{name}: deleted", facts, now))

    def _on_disconnect(self, reason: str) -> None:
        self._disconnected(reason)
        self._wake.set()

    def _on_reconnect(self, server: str) -> None:
        self._view.server = server
        self._wake.set()  # the request that follows shows whether JetStream answers

    def _disconnected(self, reason: str) -> None:
        self._view.error = reason
        self._display.add(WatchEvent("reconnecting", f"reconnecting ({reason})", {"reason": reason}))


def _advisory_event(event: Pinned | Unpinned) -> WatchEvent:
    facts = {"stream": event.stream, "consumer": event.consumer, "group": event.group}
    if isinstance(event, Pinned):
        text = f"{event.consumer}: pinned {event.pin_id}"
        return WatchEvent("pinned", text, facts | {"pinned_id": event.pin_id}, event.time)
    meaning = _REASONS.get(event.reason)
    text = f"{event.consumer}: unpinned, reason {event.reason}" + (f" ({meaning})" if meaning else "")
    return WatchEvent("unpinned", text, facts | {"reason": event.reason}, event.time)
