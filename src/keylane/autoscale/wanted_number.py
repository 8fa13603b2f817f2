"""The wanted number of workers over HTTP, as KEDA's metrics-api scaler reads it.

`/wanted` answers `{"wanted": 4, …}`. While the lag is unknown it answers 503, so that the scaler keeps what there is: a
0 would end all workers. `/healthz` answers 200 as long as the program looks at the group at all.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from time import monotonic

from keylane.autoscale.autoscaler import Autoscaler
from keylane.metrics.http_server import serve_pages


@asynccontextmanager
async def serve_wanted_number(
    scaler: Autoscaler,
    *,
    port: int,
    host: str = "0.0.0.0",  # noqa: S104 - KEDA asks from another machine
    stale_after_s: float,
) -> AsyncIterator[int]:
    """Serve while the block runs; yields the port, which 0 leaves to the system.

    `stale_after_s`: what was seen so long ago counts as unknown.
    """

    async def answer(path: str, accept: str) -> tuple[int, str, bytes]:
        del accept
        last, age_s = scaler.last, monotonic() - scaler.looked_at_s
        if path in {"/healthz", "/readyz"}:
            good = age_s <= stale_after_s and (path == "/healthz" or (last is not None and last.is_known))
            return _json(200 if good else 503, {"status": "ok" if good else "unknown"})
        if path != "/wanted":
            return 404, "text/plain", b"there is: /wanted /healthz /readyz\n"
        if last is None or age_s > stale_after_s:
            return _json(503, {"problem": "the group has not been read yet" if last is None else "no look for a while"})
        if not last.is_known:
            return _json(503, {"problem": last.reason})
        return _json(200, asdict(last) | {"time": last.time.isoformat()})

    async with serve_pages(answer, port=port, host=host) as chosen:
        yield chosen


def _json(code: int, content: dict[str, object]) -> tuple[int, str, bytes]:
    return code, "application/json", json.dumps(content).encode() + b"\n"
