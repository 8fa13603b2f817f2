"""`keylane consumer watch`: look twice a second, listen for advisories, and show what changed.

`Watch` finds out what happens and tells it to a `Display`: a live screen, plain lines, or JSON. It goes on
while the server is away, and ends only by a signal or when the connection is closed for good.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from keylane.cli import consumer_view as view
from keylane.cli.connecting import ConnectionOptions
from keylane.cli.consumer_told import as_object, as_utc, pin_of
from keylane.cli.not_found import explained
from keylane.errors import KeylaneError, NotFound
from keylane.jetstream import consumers
from keylane.jetstream.connection import Connection
from keylane.jetstream.consumers import ConsumerInfo
from keylane.priority import Pinned, Unpinned, advisories

LOOK_EVERY_S = 0.5
_REASONS = {
    "admin": "an admin or its own client asked for it",
    "timeout": "its client did not pull in time",
}
_KEPT_EVENTS = 200
_FEWEST_EVENT_LINES = 5
_LINES_BESIDE = 6
"""Lines of the screen that are neither a consumer nor an event."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A consumer is new, or looks different."""

    info: ConsumerInfo


@dataclass(frozen=True, slots=True)
class Gone:
    """A consumer is not there any more."""

    stream: str
    consumer: str


@dataclass(frozen=True, slots=True)
class Link:
    """The link to the server, or the JetStream behind it, is lost or back."""

    good: bool
    text: str


Happening = Changed | Gone | Link | Pinned | Unpinned


@dataclass(slots=True)
class Sight:
    """What is known now."""

    stream: str
    consumer: str | None
    server: str = ""
    trouble: str = ""
    """Why what is known may be old; empty while all is well."""
    infos: tuple[ConsumerInfo, ...] = ()


class Display(Protocol):
    """Where a watch shows what it finds."""

    def happened(self, what: Happening, time: datetime) -> None: ...

    def refresh(self, sight: Sight) -> None: ...


class Watch:
    """Follows one consumer, or all of a stream."""

    def __init__(self, stream: str, consumer: str | None, display: Display) -> None:
        self.sight = Sight(stream, consumer)
        self._display = display
        self._looks: dict[str, tuple[object, ...]] = {}
        self._wake = asyncio.Event()

    async def run(self, link: ConnectionOptions) -> None:
        """Until cancelled. Raises when the first look fails, or when the connection is over for good."""
        stream, consumer = self.sight.stream, self.sight.consumer
        async with await link.connect(on_disconnect=self._lost, on_reconnect=self._back) as connection:
            self.sight.server = connection.server
            try:
                first = await self._ask(connection)
            except NotFound as error:
                raise await explained(connection, error, stream, consumer) from error
            async with advisories(connection, stream, consumer) as events:
                listening = asyncio.create_task(self._listen(events))
                try:
                    self._saw(first)
                    await self._keep_looking(connection, listening)
                finally:
                    listening.cancel()

    async def _keep_looking(self, connection: Connection, listening: asyncio.Task[None]) -> None:
        while not listening.done():
            self._display.refresh(self.sight)
            woken = asyncio.create_task(self._wake.wait())
            try:
                await asyncio.wait({listening, woken}, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                woken.cancel()
            self._wake.clear()
            if connection.is_connected:
                await self._look(connection)
        listening.result()

    async def _look(self, connection: Connection) -> None:
        try:
            infos = await self._ask(connection)
        except NotFound:
            infos = []
        except KeylaneError as error:
            if not self.sight.trouble:
                self._link(False, str(error))
            return
        if self.sight.trouble:
            self._link(True, connection.server)
        self._saw(infos)

    async def _ask(self, connection: Connection) -> list[ConsumerInfo]:
        stream, consumer = self.sight.stream, self.sight.consumer
        if consumer is not None:
            return [await consumers.info(connection, stream, consumer)]
        return sorted([info async for info in consumers.list_all(connection, stream)], key=lambda one: one.name)

    async def _listen(self, events: AsyncIterator[Pinned | Unpinned]) -> None:
        async for event in events:
            self._display.happened(event, event.time)
            self._wake.set()

    def _saw(self, infos: list[ConsumerInfo]) -> None:
        self.sight.infos = tuple(infos)
        now = datetime.now(UTC)
        for info in infos:
            pin = pin_of(info)
            look = (info.created, info.paused, pin, info.num_pending, info.num_ack_pending, info.leader)
            if self._looks.get(info.name) != look:
                self._looks[info.name] = look
                self._display.happened(Changed(info), now)
        for name in self._looks.keys() - {info.name for info in infos}:
            del self._looks[name]
            self._display.happened(Gone(self.sight.stream, name), now)

    def _lost(self, reason: str) -> None:
        self._link(False, reason)
        self._wake.set()

    def _back(self, server: str) -> None:
        self.sight.server = server
        self._wake.set()  # the look that follows says whether all is well

    def _link(self, good: bool, text: str) -> None:
        self.sight.trouble = "" if good else text
        self._display.happened(Link(good, text), datetime.now(UTC))


# ---- displays ---------------------------------------------------------------------------------------


class JsonLines:
    """One JSON object for each thing that happens."""

    def happened(self, what: Happening, time: datetime) -> None:
        head = {"time": as_utc(time)}
        match what:
            case Changed(info):
                told = {"event": "state", **as_object(info)}
            case Gone(stream, consumer):
                told = {"event": "gone", "stream": stream, "consumer": consumer}
            case Link(good, text):
                told = {"event": "connected", "server": text} if good else {"event": "reconnecting", "reason": text}
            case Pinned():
                told = {"event": "pinned", **_where(what), "pinned_id": what.pin_id}
            case Unpinned():
                told = {"event": "unpinned", **_where(what), "reason": what.reason}
        print(json.dumps(head | told), flush=True)

    def refresh(self, sight: Sight) -> None:
        """Nothing: only changes are told."""


class PlainLines:
    """One line for each thing that happens, for pipes and logs."""

    def happened(self, what: Happening, time: datetime) -> None:
        print(f"{view.clock(time)}  {_in_words(what, time)}", flush=True)

    def refresh(self, sight: Sight) -> None:
        """Nothing: only changes are told."""


class Screen:
    """A live table with a log of events under it. Use it with `with`; what it showed last stays."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._events: deque[tuple[datetime, str]] = deque(maxlen=_KEPT_EVENTS)
        self._live = Live(console=console, auto_refresh=False, screen=True)
        self._sight: Sight | None = None

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sight is not None:
            self._live.stop()
            self._console.print(self._picture(self._sight, ended=True))

    def happened(self, what: Happening, time: datetime) -> None:
        if not isinstance(what, Changed):
            self._events.append((time, _in_words(what, time)))

    def refresh(self, sight: Sight) -> None:
        if self._sight is None:  # not sooner: an error of the first look belongs on the screen as it was
            self._live.start()
        self._sight = sight
        self._live.update(self._picture(sight), refresh=True)

    def _picture(self, sight: Sight, *, ended: bool = False) -> RenderableType:
        now = datetime.now(UTC)
        width, height = self._console.size
        room = height - _LINES_BESIDE
        log = max(1, min(len(self._events), _FEWEST_EVENT_LINES))
        rows = max(room - log, 2)
        table = view.board(list(sight.infos), now, width=width, rows=rows, stale=bool(sight.trouble))
        log = max(room - min(rows, len(sight.infos)), log)
        events = [
            Text(f"{view.clock(time)}  {text}", no_wrap=True, overflow="ellipsis")
            for time, text in list(self._events)[-log:]
        ]
        return Group(
            self._headline(sight, now, ended),
            table,
            Text("events", style="bold"),
            *(events or [Text("none yet", style="dim")]),
        )

    def _headline(self, sight: Sight, now: datetime, ended: bool) -> Text:
        what = f"{sight.stream} / {sight.consumer}" if sight.consumer else sight.stream
        text = Text(what, style="bold", no_wrap=True, overflow="ellipsis")
        text.append(f"  {view.clock(now)}  {sight.server}  ", style="not bold dim")
        if sight.trouble:
            text.append(f"reconnecting ({sight.trouble})", style="red")
        elif not sight.infos:
            text.append("not there" if sight.consumer else "no consumers", style="yellow")
        elif not ended:
            text.append("Ctrl-C ends", style="not bold dim")
        return text


def _where(event: Pinned | Unpinned) -> dict[str, str]:
    return {"stream": event.stream, "consumer": event.consumer, "group": event.group}


def _in_words(what: Happening, time: datetime) -> str:
    match what:
        case Changed(info):
            return view.line(info, time)
        case Gone(_, consumer):
            return f"{consumer}: deleted"
        case Link(good, text):
            return f"connected to {text}" if good else f"reconnecting ({text})"
        case Pinned():
            return f"{what.consumer}: pinned {what.pin_id}"
        case Unpinned():
            meaning = _REASONS.get(what.reason)
            return f"{what.consumer}: unpinned, reason {what.reason}" + (f" ({meaning})" if meaning else "")
