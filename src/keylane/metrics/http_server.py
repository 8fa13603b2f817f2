"""`/metrics`, `/healthz` and `/readyz` on one port.

`/healthz` answers 200 while the program can do its work, also in a degraded state, which it tells: a restart would not
help. It answers 503 if the program has failed. `/readyz` answers 200 if the program is at work, else 503.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from keylane.errors import InvalidInput
from keylane.metrics.catalogue import DEFAULT_PREFIX, Reading
from keylane.metrics.exposition import check_prefix, exposition, require_client

_log = logging.getLogger("keylane.metrics")

_REQUEST_S = 10.0
_LONGEST_REQUEST = 16_384
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error", 503: "Not Available"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """What `/healthz` and `/readyz` say."""

    failed: bool = False
    ready: bool = True
    degraded: tuple[str, ...] = ()
    """The degraded states, in words."""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return "failed" if self.failed else "degraded" if self.degraded else "ok"


ReadingsSource = Callable[[], Iterable[Reading] | Awaitable[Iterable[Reading]]]
HealthSource = Callable[[], HealthReport | Awaitable[HealthReport]]
PageSource = Callable[[str, str], Awaitable[tuple[int, str, bytes]]]
"""From the path and the accepted types to status, type and content."""


@asynccontextmanager
async def serve_metrics(
    readings: ReadingsSource,
    *,
    port: int,
    host: str = "0.0.0.0",  # noqa: S104 - Prometheus and Kubernetes ask from other machines
    prefix: str = DEFAULT_PREFIX,
    health: HealthSource = HealthReport,
) -> AsyncIterator[int]:
    """Serve while the block runs; yields the port, which 0 leaves to the system."""
    check_prefix(prefix)
    require_client()

    async def answer(path: str, accept: str) -> tuple[int, str, bytes]:
        if path == "/metrics":
            content, kind = exposition(await _awaited(readings()), prefix, accept)
            return 200, kind, content
        if path in {"/healthz", "/readyz"}:
            report: HealthReport = await _awaited(health())
            good = report.ready and not report.failed if path == "/readyz" else not report.failed
            told = {"status": report.status, "ready": report.ready, "degraded": list(report.degraded)} | report.details
            return 200 if good else 503, "application/json", json.dumps(told).encode() + b"\n"
        return 404, "text/plain", b"there is: /metrics /healthz /readyz\n"

    async with serve_pages(answer, port=port, host=host) as chosen:
        yield chosen


@asynccontextmanager
async def serve_pages(answer: PageSource, *, port: int, host: str) -> AsyncIterator[int]:
    """Answer GET requests while the block runs; yields the port, which 0 leaves to the system."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_REQUEST_S):
                writer.write(await _respond(await reader.readuntil(b"\r\n\r\n"), answer))
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(serve, host, port, limit=_LONGEST_REQUEST)
    except OSError as error:
        raise InvalidInput(f"nothing can be served on port {port} of {host}: {error.strerror}") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _respond(request: bytes, answer: PageSource) -> bytes:
    first, *lines = request.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    path = rest.split(" ")[0].split("?")[0]
    accept = next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("accept:")), "")
    if method not in {"GET", "HEAD"}:
        code, kind, content = 405, "text/plain", b"use GET\n"
    else:
        try:
            code, kind, content = await answer(path, accept)
        except Exception:  # noqa: BLE001 - a fault in a source must not end the program
            _log.exception("no answer to %s", path)
            code, kind, content = 500, "text/plain", b"internal error\n"
    head = f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode("latin-1") + (b"" if method == "HEAD" else content)


async def _awaited(value: Any) -> Any:
    return await value if isinstance(value, Awaitable) else value
