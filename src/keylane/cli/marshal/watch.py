"""`keylane marshal watch`: reads the log twice a second and reports what changes. Continues while it is unreachable."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from keylane.cli.display import Display, WatchEvent
from keylane.cli.formatting import clock
from keylane.cli.marshal.log_access import OpenLog
from keylane.cli.marshal.render import claim_object, claim_table, now_of, pause_object, select_claims
from keylane.core.claim_facts import Claim, Key, Owner
from keylane.core.world import World
from keylane.errors import KeylaneError
from keylane.marshal.log import catch_up

POLL_INTERVAL_S = 0.5

_ClaimState = tuple[Owner | None, int | None, str | None]
"""The owner, its token and its freshness."""


@dataclass(frozen=True, slots=True)
class ClaimsView:
    """The claims as they were when the log was last read."""

    world: World
    claims: list[Claim]
    error: str

    @property
    def row_count(self) -> int:
        return len(self.claims)

    def headline(self, now: datetime, *, ended: bool) -> Text:
        text = Text(f"{len(self.claims)} partitions  {clock(now)}  ", style="bold")
        if self.error:
            text.append(f"the log cannot be read ({self.error})", style="red")
        elif not ended:
            text.append("Ctrl-C ends", style="dim")
        return text

    def table(self, now: datetime, *, width: int, rows: int) -> RenderableType:
        return claim_table(self.world, self.claims, at_ms=None, lags=None, rows=rows)


class MarshalWatch:
    """Follows one group, or all of a log."""

    def __init__(self, group: str | None, topic: str | None, display: Display) -> None:
        self._group = group
        self._topic = topic
        self._display = display
        self._known: dict[Key, _ClaimState] = {}
        self._paused: dict[str, int] = {}
        self._error = ""

    async def run(self, opened: OpenLog) -> None:
        """Until cancelled. Raises if the first read fails, or when the log was replaced by another one."""
        world = await opened.admin.world()
        while True:
            claims = select_claims(world, self._group, self._topic)
            self._compare(world, claims)
            self._display.refresh(ClaimsView(world, claims, self._error))
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                await catch_up(opened.log, world)
            except KeylaneError as error:
                if not error.is_transient:
                    raise
                self._set_error(str(error))
            else:
                self._set_error("")

    def _compare(self, world: World, claims: list[Claim]) -> None:
        for claim in claims:
            freshness = claim.freshness(now_of(world, claim))
            state = claim.owner, claim.token, freshness.value if freshness else None
            before = self._known.get(claim.key)
            if state != before:
                self._known[claim.key] = state
                event, text = _claim_event(claim, before, state)
                self._add(event, text, claim_object(claim, now_of(world, claim)))
        pauses = {one.group: one for one in world.pauses(self._group)}
        for group in pauses.keys() - self._paused.keys():
            self._add(
                "paused", f"{group}: paused until {pause_object(pauses[group])['until']}", pause_object(pauses[group])
            )
        for group in self._paused.keys() - pauses.keys():
            self._add("resumed", f"{group}: its pause is over", {"group": group})
        self._paused = {group: one.until_ms for group, one in pauses.items()}

    def _set_error(self, error: str) -> None:
        if bool(error) != bool(self._error):
            text = f"the log cannot be read ({error})" if error else "the log is read again"
            self._add("trouble" if error else "connected", text, {"reason": error})
        self._error = error

    def _add(self, event: str, text: str, facts: dict[str, Any]) -> None:
        self._display.add(WatchEvent(event, text, facts))


def _claim_event(claim: Claim, before: _ClaimState | None, now: _ClaimState) -> tuple[str, str]:
    where = f"{claim.key.group} {claim.key.topic}/{claim.key.partition}"
    owner, token, freshness = now
    if owner is None:
        return "free", f"{where}: free, at offset {'-' if claim.offset is None else claim.offset}"
    if before is None or before[:2] != now[:2]:
        return "owned", f"{where}: owned by {owner.client} ({owner.instance}), token {token}"
    return str(freshness), f"{where}: {owner.client} is {freshness}"
