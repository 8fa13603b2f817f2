"""One reader of an account for all browsers: it reads while somebody looks, and tells them what has changed.

A section is what a browser can look at: the account, or one group in full. Each has a version, its view and the patch
from the version before. Whoever has the version before gets the patch, everybody else the whole view: so no browser has
a queue, and a slow one misses nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from datetime import UTC, datetime
from typing import Any

from keylane.errors import KeylaneError
from keylane.fleet import history
from keylane.jetstream import Connection
from keylane.overview import AccountOverview, GroupOverview, overview
from keylane.processing.dead_letters import DeadLetter
from keylane.web.given_up import ParkedKey, dead_letters, parked_keys
from keylane.web.marshal_groups import MarshalGroups
from keylane.web.merge_patch import merge_patch
from keylane.web.page_view import Json, account_view, group_id, group_view
from keylane.web.timeline import AccountTimeline, TimelineEntry, fleet_timeline

_log = logging.getLogger("keylane.web")

ACCOUNT = "account"
_QUIET_S = 15.0
"""After this time without news a browser gets a line all the same, so that nobody takes the link for dead."""
_REST = 2
"""A read is followed by a pause of at least this many times its duration."""
_FRESH_S = 5.0

ReadAccount = Callable[[bool], Awaitable[AccountOverview]]
"""Reads the account; True: also where members run."""


@dataclass(slots=True)
class _Section:
    version: int = 0
    view: Json = field(default_factory=dict)
    patch: str = ""
    """The event for those who have the version before."""

    def update(self, name: str, view: Json) -> None:
        patch = merge_patch(self.view, view)
        if patch or not self.version:
            self.version += 1
            self.view = view
            self.patch = event("patch", {"section": name, "patch": patch})


def event(name: str, data: Any) -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


class AccountWatch:
    """Reads an account every `interval_s` while somebody follows it, and not at all else."""

    def __init__(
        self,
        connection: Connection,
        *,
        server: str = "",
        interval_s: float = 1.0,
        read: ReadAccount | None = None,
    ) -> None:
        self._connection = connection
        self._server = server
        self._interval_s = interval_s
        self._read = read
        self._timeline = AccountTimeline()
        self._sections: dict[str, _Section] = {ACCOUNT: _Section()}
        self._followers: dict[object, str | None] = {}
        self._reading: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._wake = asyncio.Event()
        self._read_at = 0.0
        self.found: AccountOverview | None = None
        """What the newest read has found."""
        self.reads = 0

    @property
    def is_reading(self) -> bool:
        return self._reading is not None

    def look_now(self) -> None:
        """Read at once, as after a change that was made here."""
        self._wake.set()

    async def follow(self, group: str | None = None) -> AsyncGenerator[str]:
        """Events for one browser: the account, and a group by its id. Ends with the iteration."""
        me = object()
        self._followers[me] = group
        try:
            self._start(group)
            has: dict[str, int] = {}
            while True:
                news = self._news
                for text in self._events(group, has):
                    yield text
                try:
                    async with asyncio.timeout(_QUIET_S):
                        await news.wait()
                except TimeoutError:
                    yield ": quiet\n\n"
        finally:
            del self._followers[me]
            if not self._followers:
                await self.stop()

    async def stop(self) -> None:
        """End the reading."""
        task, self._reading = self._reading, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    # ---- what a browser is told ----------------------------------------------------------------------

    def _events(self, group: str | None, has: dict[str, int]) -> list[str]:
        if time.monotonic() - self._read_at > _FRESH_S + self._interval_s and not has:
            return []  # from an earlier visit: the first read is under way
        texts = []
        for name in (ACCOUNT, *([group] if group is not None else [])):
            section = self._sections.get(name)
            if section is None or not section.version or has.get(name) == section.version:
                continue
            if has.get(name) == section.version - 1:
                texts.append(section.patch)
            else:
                texts.append(event("view", {"section": name, "view": section.view}))
            has[name] = section.version
        return texts

    # ---- reading -------------------------------------------------------------------------------------

    def _start(self, group: str | None) -> None:
        if self._reading is None:
            self._reading = asyncio.create_task(self._run())
        elif group is not None and group not in self._sections:
            self._show(group)
            self.look_now()

    def _show(self, group: str) -> None:
        """What is known of a group at once; what must be read for it follows."""
        one = next((each for each in self.found.groups if group_id(each) == group), None) if self.found else None
        if one is not None:
            self._sections[group] = _Section()
            self._sections[group].update(group, group_view(one, timeline=self._timeline.of(one)))

    async def _run(self) -> None:
        async with MarshalGroups(self._connection) as marshal_groups:
            while True:
                began = time.monotonic()
                self._wake.clear()
                try:
                    await self._look(marshal_groups)
                except KeylaneError as error:
                    self._trouble(str(error))
                except Exception as error:  # noqa: BLE001 - the page shows it, and goes on when it can
                    _log.exception("the account cannot be read")
                    self._trouble(f"{type(error).__name__}: {error}")
                self._read_at = time.monotonic()
                self.reads += 1
                news, self._news = self._news, asyncio.Event()
                news.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(self._interval_s, _REST * (self._read_at - began))):
                        await self._wake.wait()

    async def _look(self, marshal_groups: MarshalGroups) -> None:
        watched = {group for group in self._followers.values() if group is not None}
        found = await self._overview(marshal_groups, ask_members=bool(watched))
        self.found = found
        self._timeline.see(found)
        self._sections[ACCOUNT].update(ACCOUNT, account_view(found, server=self._server))
        self._sections = {name: one for name, one in self._sections.items() if name == ACCOUNT or name in watched}
        groups = {group_id(one): one for one in found.groups}
        for name in watched:
            section = self._sections.setdefault(name, _Section())
            section.update(name, await self._full_view(groups[name]) if name in groups else {"is_gone": True})

    async def _overview(self, marshal_groups: MarshalGroups, *, ask_members: bool) -> AccountOverview:
        if self._read is not None:
            return await self._read(ask_members)
        found = await overview(self._connection, ask_members=ask_members)
        marshal = await marshal_groups.read(frozenset(one.name for one in found.streams), found.read_at)
        return replaced(found, groups=(*found.groups, *marshal))

    async def _full_view(self, group: GroupOverview) -> Json:
        timeline: tuple[TimelineEntry, ...] = self._timeline.of(group)
        letters: list[DeadLetter] = []
        parked: list[ParkedKey] = []
        if self._read is None:
            try:
                if group.kind == "fleet":
                    timeline = fleet_timeline(await history(self._connection, group.stream, group.name))
                if group.dead_letters:
                    letters = await dead_letters(self._connection, group)
                if group.parked_keys:
                    parked = await parked_keys(self._connection, group)
            except KeylaneError as error:
                group = replaced(group, problem=str(error))
        return group_view(group, timeline=timeline, dead_letters=letters, parked=parked)

    def _trouble(self, text: str) -> None:
        known = self.found or AccountOverview(read_at=datetime.now(UTC), groups=(), streams=())
        self._sections[ACCOUNT].update(ACCOUNT, account_view(known, server=self._server, trouble=text))
