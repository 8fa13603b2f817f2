"""A page that is served for a test, asked over HTTP or shown in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

from keylane import Connection
from keylane.web import serve_page
from keylane.web.account_watch import AccountWatch
from keylane.web.merge_patch import patched

TOKEN = "a token for the tests"  # noqa: S105 - not a secret
CHROMIUM = shutil.which("chromium")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE = {"width": 375, "height": 740}
DESK = {"width": 1280, "height": 900}


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """The Chromium of this machine, with an empty profile."""
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Site:
    """A page that is being served."""

    url: str
    watch: AccountWatch
    complaints: list[str] = field(default_factory=list)
    """Of the browser: errors and warnings on its console, requests to other hosts."""

    @asynccontextmanager
    async def opened(
        self, browser: Browser, group: str = "", *, size: dict[str, int] = DESK, dark: bool = False
    ) -> AsyncIterator[Page]:
        """The page in a tab of its own, which has no complaints when the block ends."""
        context = await browser.new_context(
            viewport=size,  # type: ignore[arg-type]
            color_scheme="dark" if dark else "light",
        )
        page = await context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda one: None if one.url.startswith(self.url) else self.complaints.append(one.url))
        try:
            await page.goto(f"{self.url}/#/{group}")
            yield page
            assert self.complaints == []
        finally:
            await context.close()

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    # ---- without a browser ---------------------------------------------------------------------------

    async def post(self, path: str, body: Any, **headers: str | None) -> tuple[int, dict[str, Any]]:
        """As the page does; `headers` replace its own, None leaves one out."""
        given: dict[str, str | None] = {
            "Origin": self.url,
            "Content-Type": "application/json",
            "X-Keylane-Token": TOKEN,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        sent = {name: value for name, value in given.items() if value is not None}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}{path}", data=json.dumps(body), headers=sent) as answer,
        ):
            return answer.status, await answer.json()

    async def act(self, action: str, stream: str, group: str, **arguments: Any) -> tuple[list[str], str]:
        """Preview and perform an action; what the preview said, and what was done."""
        request = {"action": action, "stream": stream, "group": group, "arguments": arguments}
        status, preview = await self.post("/actions/preview", request)
        assert status == 200, preview
        status, answer = await self.post("/actions/perform", request | {"confirmed": preview})
        assert status == 200, answer
        return [preview["title"], *preview["lines"]], answer["done"]

    @asynccontextmanager
    async def events(self, group: str = "") -> AsyncIterator[AsyncIterator[tuple[str, dict[str, Any]]]]:
        """The events of the page, as pairs of name and data."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/events", params={"group": group} if group else {}) as answer,
        ):
            assert answer.status == 200
            yield _parsed(answer)


async def _parsed(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for raw in answer.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


class Views:
    """What a page knows after the events that it got."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, Any]] = {}
        self.patches = 0

    def take(self, name: str, data: dict[str, Any]) -> None:
        if name == "view":
            self.of[data["section"]] = data["view"]
        elif name == "patch":
            self.of[data["section"]] = patched(self.of[data["section"]], data["patch"])
            self.patches += 1


@asynccontextmanager
async def served(
    connection: Connection, *, token: str | None = TOKEN, watch: AccountWatch | None = None, **options: Any
) -> AsyncIterator[Site]:
    watching = watch or AccountWatch(connection, interval_s=0.2, server="the test")
    async with serve_page(connection, token=token, watch=watching, **options) as port:
        yield Site(f"http://127.0.0.1:{port}", watching)
