"""A reader in a process of its own, for tests that kill or stop it. Writes one JSON line per event to stdout.

Run by tests with one JSON argument: url, stream, consumer, name, options.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import keylane
from keylane.jetstream.feed_pin import FeedPin
from keylane.priority import consume


def write(what: str, **facts: Any) -> None:
    """Straight to the pipe: what a killed process wrote is there."""
    line = json.dumps({"at": time.monotonic(), "what": what, **facts}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


async def work(job: dict[str, Any]) -> None:
    options = job["options"]
    if options.get("blind"):
        # What would happen without the check: only to show that the test sees it.
        FeedPin.check_for_standstill = lambda self: None  # type: ignore[method-assign]
    async with await keylane.connect(job["url"], name=job["name"]) as connection:
        feed = await consume(
            connection,
            job["stream"],
            job["consumer"],
            on_pinned=lambda pin_id: write("pinned", pin=pin_id),
            on_unpinned=lambda pin_id: write("unpinned", pin=pin_id),
            **options.get("consume", {}),
        )
        write("ready")
        async for message in feed:
            write("start", sequence=message.sequence, pin=feed.pin_id)
            await asyncio.sleep(options.get("handle_s", 0))
            if message.sequence not in options.get("unacked", []):
                message.ack()
            write("done", sequence=message.sequence)


if __name__ == "__main__":
    asyncio.run(work(json.loads(sys.argv[1])))
