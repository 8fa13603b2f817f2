"""Serves the page, its events and its actions over HTTP.

Needs aiohttp (`keylane[web]`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keylane.errors import GroupConflict, InvalidInput, KeylaneError
from keylane.extras import extra_missing
from keylane.web.access import is_loopback, refuse_acting, refuse_reading
from keylane.web.account_watch import AccountWatch
from keylane.web.actions import ActionRequest, perform, prepare

if TYPE_CHECKING:
    from aiohttp import web

    from keylane.jetstream import Connection

_log = logging.getLogger("keylane.web")

STATIC = Path(__file__).parent / "static"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_MOST_BODY = 1_000_000
_ACTION_S = 30.0
_LOOK_S = 1.0
"""How often it is looked whether a browser is still there. Nothing is written to it while nothing changes."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@asynccontextmanager
async def serve_page(
    connection: Connection,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    names: Collection[str] = (),
    watch: AccountWatch | None = None,
) -> AsyncIterator[int]:
    """Serve the page while the block runs; yields the port, which 0 leaves to the system.

    `token`: what an operator must enter to act; None: the page is read-only. `names`: further host names that it is
    served under, such as that of a proxy. Raises `InvalidInput` if the port is taken, `ExtraMissing` without aiohttp.

    >>> async with serve_page(connection, port=8230) as port:
    ...     print(f"http://127.0.0.1:{port}")
    ...     await asyncio.Event().wait()
    """
    try:
        from aiohttp import web  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise extra_missing("the page needs aiohttp", "web") from error

    site_watch = watch or AccountWatch(connection, server=server_name(connection))
    page = _Page(connection, site_watch, token)

    @web.middleware
    async def checked(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        refusal = refuse_reading(request.headers, host=host, names=names)
        if refusal is None and request.method == "POST":
            refusal = refuse_acting(request.headers, token=token)
        if refusal is not None:
            return web.json_response({"error": refusal.text}, status=refusal.status, headers=_HEADERS)
        return await handler(request)

    app = web.Application(middlewares=[checked], client_max_size=_MOST_BODY)
    app.router.add_get("/", page.file)
    app.router.add_get("/static/{name}", page.file)
    app.router.add_get("/events", page.events)
    app.router.add_post("/actions/preview", page.preview)
    app.router.add_post("/actions/perform", page.perform)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise InvalidInput(f"the page cannot be served on port {port} of {host}: {error.strerror}") from error
        yield runner.addresses[0][1]
    finally:
        page.is_over.set()
        await runner.cleanup()
        await site_watch.stop()


def server_name(connection: Connection) -> str:
    """The server that is read from, without what its URL may hide."""
    url = connection.nats.connected_url
    return url.netloc.rpartition("@")[2] if url is not None else ""


class _Page:
    def __init__(self, connection: Connection, watch: AccountWatch, token: str | None) -> None:
        self._connection = connection
        self._watch = watch
        self._may_act = token is not None
        self._files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _KINDS}
        self.is_over = asyncio.Event()

    async def file(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web  # noqa: PLC0415

        name = request.match_info.get("name", "index.html")
        if name not in self._files:
            raise web.HTTPNotFound(text="there is no such file\n", headers=_HEADERS)
        kind = _KINDS[Path(name).suffix]
        return web.Response(body=self._files[name], content_type=kind, charset="utf-8", headers=_HEADERS)

    async def events(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web  # noqa: PLC0415

        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        hello = json.dumps({"may_act": self._may_act})
        await response.write(f"retry: 1000\nevent: hello\ndata: {hello}\n\n".encode())
        over = asyncio.ensure_future(self.is_over.wait())
        try:
            async with aclosing(self._watch.follow(request.query.get("group"))) as events:
                following = asyncio.ensure_future(anext(events))
                try:
                    while not over.done() and _is_connected(request):
                        await asyncio.wait({following, over}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                        if following.done():
                            await response.write(following.result().encode())
                            following = asyncio.ensure_future(anext(events))
                finally:
                    following.cancel()
                    await asyncio.wait({following})
        except ConnectionError:
            _log.debug("a browser is gone")
        finally:
            over.cancel()
        return response

    async def preview(self, request: web.Request) -> web.Response:
        async def work(wire: Any) -> dict[str, Any]:
            return (await prepare(self._connection, ActionRequest.from_json(wire))).preview.to_json()

        return await self._answer(request, work)

    async def perform(self, request: web.Request) -> web.Response:
        async def work(wire: Any) -> dict[str, Any]:
            asked = ActionRequest.from_json(wire)
            done = await perform(self._connection, asked, wire.get("confirmed"))
            _log.info("%s of %s/%s: %s", asked.action, asked.stream, asked.group, done)
            self._watch.look_now()
            return {"done": done}

        return await self._answer(request, work)

    async def _answer(self, request: web.Request, work: Callable[[Any], Awaitable[dict[str, Any]]]) -> web.Response:
        from aiohttp import web  # noqa: PLC0415

        try:
            async with asyncio.timeout(_ACTION_S):
                answer, status = await work(await _json(request)), 200
        except GroupConflict as error:
            answer, status = {"error": str(error)}, 409
        except KeylaneError as error:
            answer, status = {"error": str(error)}, 422
        except TimeoutError:
            answer, status = {"error": f"it took longer than {_ACTION_S:g} s: look whether it was done"}, 504
        return web.json_response(answer, status=status, headers=_HEADERS)


def _is_connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.text())
    except ValueError as error:
        raise InvalidInput(f"this is no JSON: {error}") from error


def warning_for(host: str) -> str | None:
    """What to say about a page that other machines reach; None: they do not."""
    if is_loopback(host):
        return None
    return (
        f"{host}: everybody who reaches this port can read names, keys and tracebacks of the account; "
        "put a proxy with a login and TLS before it"
    )
