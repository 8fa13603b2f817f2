"""Workers of a fleet in one process, under a load that others make: tells what they handled whenever it is asked.

`python -m bench.contestants.fleet_load '{"url": …, "stream": …, "fleet": …, "subjects": […], "workers": 13, "join":
{}}'`. Every line on standard input is answered with a JSON line about the time since the line before. The first eight
bytes of a message say when it was published, by the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import keylane
from keylane import fleet
from keylane.groups import GroupMessage

QUANTILES = 1000


class Tally:
    """What was handled since it was last told."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._cpu = time.process_time()
        self._clear()

    def _clear(self) -> None:
        self._waits_ns: list[int] = []
        self._seen: set[int] = set()
        self._redelivered = self._out_of_order = 0

    async def handle(self, message: GroupMessage) -> None:
        self._waits_ns.append(time.monotonic_ns() - int.from_bytes(message.data[:8], "big"))
        subject, sequence = message.subject, message.delivery_sequence
        self._seen.add(sequence)
        self._redelivered += message.delivered_count > 1
        if sequence <= self._last.get(subject, 0) and message.delivered_count == 1:
            self._out_of_order += 1
        self._last[subject] = sequence

    def told(self) -> dict[str, Any]:
        waits, cpu = sorted(self._waits_ns), time.process_time()
        found = {
            "handled": len(waits),
            "unique": len(self._seen),
            "redelivered": self._redelivered,
            "out_of_order": self._out_of_order,
            "waits_ms": [waits[number * (len(waits) - 1) // QUANTILES] / 1e6 for number in range(QUANTILES + 1)]
            if waits
            else [],
            "cpu_seconds": cpu - self._cpu,
            "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        }
        self._cpu = cpu
        self._clear()
        return found


async def take_part(given: dict[str, Any]) -> None:
    tally = Tally()
    workers = []
    for _ in range(given["workers"]):
        connection = await keylane.connect(given["url"])
        partitions = fleet.listed(given["subjects"])
        workers.append(
            await fleet.join(
                connection, given["stream"], given["fleet"], tally.handle, partitions=partitions, **given["join"]
            )
        )
    print(json.dumps({"joined": len(workers)}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps({**tally.told(), "owned": sum(len(one.partitions) for one in workers)}), flush=True)


if __name__ == "__main__":
    keylane.run(take_part(json.loads(sys.argv[1])))
