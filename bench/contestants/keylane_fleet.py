"""Workers of a fleet, each in a process of its own; the order of every key is checked on every message.

`python -m bench.contestants.keylane_fleet '{"url": …, "stream": …, "fleet": …, "filter": …, "partitions": 10,
"workers": 3, "count": 100000, "join": {}}'`. The workers join together, and none leaves before all is handled. Time
runs from the first message of any worker to the last ack of all; CPU time is the sum over the processes. With
`"in_process": true` all workers share a process. With `"assigned_first": true` no handler goes on, and the clock does
not run, before every partition has its owner: else the start of many partitions is what is measured.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from typing import Any

import keylane
from bench.contestants.keylane_group import DEADLINE_S, Result, answer, in_step, said, started_processes
from keylane import fleet
from keylane.groups import GroupMessage
from tests.peers import tether

_TELL_EVERY_S = 0.01


class Seen:
    """What the workers of this process have handled together."""

    def __init__(self) -> None:
        self.count = 0
        self.out_of_order = 0
        self.start: tuple[float, float] | None = None
        self.ended_s = 0.0
        self.may_begin = asyncio.Event()

    def handler(self) -> Callable[[GroupMessage], Awaitable[None]]:
        """For one worker: no key belongs to two, as long as none moves."""
        last: dict[str, int] = {}

        async def handle(message: GroupMessage) -> None:
            if not self.may_begin.is_set():
                await self.may_begin.wait()
            if self.start is None:
                self.start = (time.monotonic(), time.process_time())
            key, sequence = message.key, message.delivery_sequence
            if sequence <= last.get(key, 0):
                self.out_of_order += 1
            last[key] = sequence
            self.count += 1

        return handle

    def result(self, flushed_s: float) -> Result:
        wall, cpu = self.start or (time.monotonic(), time.process_time())
        return Result(self.count, wall, self.ended_s + flushed_s, time.process_time() - cpu, self.out_of_order)


async def take_part(given: dict[str, Any]) -> None:
    """The workers of this process. Tells how many messages were handled, until a line says that all are."""
    seen = Seen()
    async with asyncio.timeout(DEADLINE_S), await keylane.connect(given["url"]) as connection:
        await in_step("ready")
        partitions = fleet.hashed(given["partitions"], given["filter"])
        workers = [
            await fleet.join(
                connection, given["stream"], given["fleet"], seen.handler(), partitions=partitions, **given["join"]
            )
            for _ in range(given["workers"])
        ]
        if given.get("assigned_first"):
            await _all_assigned(workers)
        seen.may_begin.set()
        over = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        told = 0
        while not over.done():
            if seen.count != told:
                told, seen.ended_s = seen.count, time.monotonic()
                print(told, flush=True)
            await asyncio.sleep(_TELL_EVERY_S)
        begun_s = time.monotonic()
        await connection.flush()
        print(seen.result(time.monotonic() - begun_s).line(), flush=True)
        for worker in workers:
            await worker.stop()


async def _all_assigned(workers: list[fleet.Worker]) -> None:
    """Tell how many partitions are owned here, until a line says that all are owned somewhere."""
    begin = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    told = -1
    while not begin.done():
        owned = sum(len(worker.partitions) for worker in workers)
        if owned != told:
            told = owned
            print(f"owned {owned}", flush=True)
        await asyncio.sleep(_TELL_EVERY_S)


async def in_processes(given: dict[str, Any]) -> Result:
    """Processes that join together, until they have handled everything."""
    shares = [given["workers"]] if given.get("in_process") else [1] * given["workers"]
    counts, owned = [0] * len(shares), [0] * len(shares)
    async with started_processes() as started:
        started += [await _start({**given, "workers": share}) for share in shares]
        for one in started:
            await said(one)
        answer(started)
        assigned, everything = asyncio.Event(), asyncio.Event()

        async def follow(number: int) -> Result:
            while True:
                line = await said(started[number])
                if line.startswith(b"{"):
                    return Result.read(line)
                if line.startswith(b"owned "):
                    owned[number] = int(line.split()[1])
                    if sum(owned) >= given["partitions"] and not assigned.is_set():
                        assigned.set()
                        answer(started)
                    continue
                counts[number] = int(line)
                if sum(counts) >= given["count"] and not everything.is_set():
                    everything.set()
                    answer(started)

        results = await asyncio.gather(*(follow(number) for number in range(len(started))))
        await asyncio.gather(*(one.wait() for one in started))
    return Result.of_all([one for one in results if one.count])


async def _start(given: dict[str, Any]) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, tether.__file__, sys.executable, "-m", "bench.contestants.keylane_fleet",
        json.dumps({**given, "child": True}), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def main() -> None:
    given = json.loads(sys.argv[1])
    if given.get("child"):
        keylane.run(take_part(given))
    else:
        print(asyncio.run(in_processes(given)).line())


if __name__ == "__main__":
    main()
