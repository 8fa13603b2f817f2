"""What every Python contestant shares: its arguments and its stopwatch."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import keylane


class Watch:
    """Runs from the first message on, as the Go contestant's does."""

    def __init__(self) -> None:
        self._start: tuple[float, float] | None = None

    def first(self) -> None:
        if self._start is None:
            self._start = (time.perf_counter(), time.process_time())

    def line(self, count: int) -> str:
        assert self._start is not None
        wall, cpu = self._start
        return json.dumps(
            {
                "count": count,
                "seconds": time.perf_counter() - wall,
                "cpu_seconds": time.process_time() - cpu,
            }
        )


def contestant(job: Callable[[argparse.Namespace, Watch], Awaitable[int]]) -> None:
    """Run the job and print its line. The job returns how many messages it handled."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--consumer", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--plain-asyncio", action="store_true")
    options = parser.parse_args()

    async def run() -> str:
        watch = Watch()
        count = await job(options, watch)
        return watch.line(count)

    print(asyncio.run(run()) if options.plain_asyncio else keylane.run(run()))
