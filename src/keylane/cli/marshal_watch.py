"""`keylane marshal watch`: reads the log on and on, and shows what changes in it.

`Watch` finds out what happens and tells it to a `Display`: a live table, plain lines, or JSON. It goes on while the log
cannot be reached.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from keylane.cli.consumer_told import as_utc
from keylane.cli.consumer_view import clock
from keylane.cli.marshal_ground import Ground
from keylane.cli.marshal_told import chosen, claim_object, now_of, pause_object, table_of
from keylane.core.claim_facts import Claim, Key, Owner
from keylane.core.claims import World
from keylane.errors import KeylaneError
from keylane.marshal.log import catch_up
from keylane.marshal.retry import is_transient

LOOK_EVERY_S = 0.5
_KEPT_EVENTS = 200
_LINES_BESIDE = 6


@dataclass(frozen=True, slots=True)
class Happening:
    event: str
    words: str
    facts: dict[str, Any]


class Display(Protocol):
    """Where a watch shows what it finds."""

    def happened(self, what: Happening, time: datetime) -> None: ...

    def refresh(self, world: World, claims: list[Claim], trouble: str) -> None: ...


class Watch:
    """Follows one group, or all of a log."""

    def __init__(self, group: str | None, topic: str | None, display: Display) -> None:
        self._group = group
        self._topic = topic
        self._display = display
        self._known: dict[Key, tuple[Owner | None, int | None, str | None]] = {}
        self._paused: dict[str, int] = {}
        self._trouble = ""

    async def run(self, ground: Ground) -> None:
        """Until cancelled. Raises when the first look fails, or when the log is not the same any more."""
        world = await ground.admin.world()
        while True:
            claims = chosen(world, self._group, self._topic)
            self._compare(world, claims)
            self._display.refresh(world, claims, self._trouble)
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await catch_up(ground.log, world)
            except KeylaneError as error:
                if not is_transient(error):
                    raise
                self._link(str(error))
            else:
                self._link("")

    def _compare(self, world: World, claims: list[Claim]) -> None:
        for claim in claims:
            freshness = claim.freshness(now_of(world, claim))
            looks = claim.owner, claim.token, freshness.value if freshness else None
            before = self._known.get(claim.key)
            if looks != before:
                self._known[claim.key] = looks
                event, words = _in_words(claim, before, looks)
                self._tell(event, words, claim_object(claim, now_of(world, claim)))
        pauses = {one.group: one for one in world.pauses(self._group)}
        for group in pauses.keys() - self._paused.keys():
            self._tell(
                "paused", f"{group}: paused until {pause_object(pauses[group])['until']}", pause_object(pauses[group])
            )
        for group in self._paused.keys() - pauses.keys():
            self._tell("resumed", f"{group}: its pause is over", {"group": group})
        self._paused = {group: one.until_ms for group, one in pauses.items()}

    def _link(self, trouble: str) -> None:
        if bool(trouble) != bool(self._trouble):
            words = f"the log cannot be read ({trouble})" if trouble else "the log is read again"
            self._tell("trouble" if trouble else "connected", words, {"reason": trouble})
        self._trouble = trouble

    def _tell(self, event: str, words: str, facts: dict[str, Any]) -> None:
        self._display.happened(Happening(event, words, facts), datetime.now(UTC))


def _in_words(
    claim: Claim,
    before: tuple[Owner | None, int | None, str | None] | None,
    now: tuple[Owner | None, int | None, str | None],
) -> tuple[str, str]:
    where = f"{claim.key.group} {claim.key.topic}/{claim.key.partition}"
    owner, token, freshness = now
    if owner is None:
        return "free", f"{where}: free, at offset {'-' if claim.offset is None else claim.offset}"
    if before is None or before[:2] != now[:2]:
        return "owned", f"{where}: owned by {owner.client} ({owner.instance}), token {token}"
    return str(freshness), f"{where}: {owner.client} is {freshness}"


# ---- displays ---------------------------------------------------------------------------------------


class JsonLines:
    """One JSON object for each change."""

    def happened(self, what: Happening, time: datetime) -> None:
        print(json.dumps({"time": as_utc(time), "event": what.event} | what.facts), flush=True)

    def refresh(self, world: World, claims: list[Claim], trouble: str) -> None:
        """Nothing: only changes are told."""


class PlainLines:
    """One line for each change, for pipes and logs."""

    def happened(self, what: Happening, time: datetime) -> None:
        print(f"{clock(time)}  {what.words}", flush=True)

    def refresh(self, world: World, claims: list[Claim], trouble: str) -> None:
        """Nothing: only changes are told."""


class Screen:
    """A live table with a log of changes under it. Use it with `with`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._events: deque[tuple[datetime, str]] = deque(maxlen=_KEPT_EVENTS)
        self._live = Live(console=console, auto_refresh=False, screen=True)
        self._last: Group | None = None

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._last is not None:
            self._live.stop()
            self._console.print(self._last)

    def happened(self, what: Happening, time: datetime) -> None:
        self._events.append((time, what.words))

    def refresh(self, world: World, claims: list[Claim], trouble: str) -> None:
        if self._last is None:
            self._live.start()
        room = max(self._console.size.height - _LINES_BESIDE, 4)
        rows = claims[: max(room - 5, 2)]
        headline = Text(f"{len(claims)} partitions  {clock(datetime.now(UTC))}  ", style="bold")
        headline.append(
            f"the log cannot be read ({trouble})" if trouble else "Ctrl-C ends", style="red" if trouble else "dim"
        )
        events = list(self._events)[-max(room - len(rows), 1) :]
        self._last = Group(
            headline,
            table_of(world, rows, at_ms=None, lags=None),
            *([Text(f"and {len(claims) - len(rows)} more", style="dim")] if len(rows) < len(claims) else []),
            *(Text(f"{clock(time)}  {text}", no_wrap=True, overflow="ellipsis") for time, text in events),
        )
        self._live.update(self._last, refresh=True)
