"""Members of a keylane group, in this process or each in a process of its own; order is checked on every message.

With `--processes` every member starts in a process that waits until all are up, then joins. Time runs from the first
message of any member to the last ack of all; CPU time is the sum over the processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields

import keylane
from keylane import groups
from keylane.groups import GroupMessage
from keylane.metrics import MemberMetrics
from tests.peers import tether

DEADLINE_S = 110.0

Handler = Callable[[GroupMessage], Awaitable[None]]


@dataclass(slots=True)
class Result:
    """What one process did. Times are from the machine's monotonic clock, which all processes share."""

    count: int
    started: float
    ended: float
    cpu_seconds: float
    out_of_order: int

    @classmethod
    def of_all(cls, parts: Sequence[Result]) -> Result:
        return cls(
            sum(one.count for one in parts),
            min(one.started for one in parts),
            max(one.ended for one in parts),
            sum(one.cpu_seconds for one in parts),
            sum(one.out_of_order for one in parts),
        )

    @classmethod
    def read(cls, line: bytes) -> Result:
        values = json.loads(line)
        return cls(**{one.name: values[one.name] for one in fields(cls)})

    def line(self) -> str:
        return json.dumps({**asdict(self), "seconds": self.ended - self.started})


@dataclass(slots=True)
class Tally:
    """What the members of this process have handled together."""

    wanted: int
    sleep_s: float
    seen: int = 0
    out_of_order: int = 0
    start: tuple[float, float] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        if self.start is None:
            self.start = (time.monotonic(), time.process_time())

    def result(self) -> Result:
        assert self.start is not None
        wall, cpu = self.start
        return Result(self.seen, wall, time.monotonic(), time.process_time() - cpu, self.out_of_order)

    def handler(self) -> Handler:
        """For one member: no key belongs to two."""
        return self._sleeping() if self.sleep_s else self._quick()

    def _quick(self) -> Handler:
        last: dict[str, int] = {}

        async def handle(message: GroupMessage) -> None:
            if self.start is None:
                self.begin()
            key, sequence = message.key, message.delivery_sequence
            if sequence <= last.get(key, 0):
                self.out_of_order += 1
            last[key] = sequence
            self.seen += 1
            if self.seen == self.wanted:
                self.done.set()

        return handle

    def _sleeping(self) -> Handler:
        """Two messages of a key at work at the same time are out of order too."""
        last: dict[str, int] = {}
        at_work: set[str] = set()

        async def handle(message: GroupMessage) -> None:
            self.begin()
            key, sequence = message.key, message.delivery_sequence
            if key in at_work or sequence <= last.get(key, 0):
                self.out_of_order += 1
            last[key] = sequence
            at_work.add(key)
            await asyncio.sleep(self.sleep_s)
            at_work.discard(key)
            self.seen += 1
            if self.seen == self.wanted:
                self.done.set()

        return handle


async def take_part(options: argparse.Namespace) -> None:
    """All given members in this process, until they have handled what they were to."""
    members = shares(options.members)
    tally = Tally(sum(members.values()), options.sleep)
    async with asyncio.timeout(DEADLINE_S), await keylane.connect(options.url) as connection:
        if options.in_step:
            await in_step("ready")
        joined = [
            await groups.join(
                connection,
                options.stream,
                options.group,
                member,
                tally.handler(),
                order=options.order,
                concurrency=options.concurrency,
                max_ack_pending=options.max_ack_pending,
                hooks=MemberMetrics().hooks() if options.metrics else None,
            )
            for member in members
        ]
        await tally.done.wait()
        await connection.flush()
        line = tally.result().line()
        if options.in_step:
            await in_step(line)  # the others are still at work
        else:
            print(line, flush=True)
        for one in joined:
            await one.stop()


async def in_step(line: str) -> None:
    """Say something to the process that started this one, and wait for its answer."""
    print(line, flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def in_processes(options: argparse.Namespace) -> Result:
    """Each member in a process of its own; they join together, and none leaves before all are done."""
    async with started_processes() as started:
        for name, count in shares(options.members).items():
            started.append(await start(options, f"{name}={count}"))
        await asyncio.gather(*(said(one) for one in started))
        answer(started)
        lines = await asyncio.gather(*(said(one) for one in started))
        answer(started)
        await asyncio.gather(*(one.wait() for one in started))
    return Result.of_all([Result.read(line) for line in lines])


@asynccontextmanager
async def started_processes() -> AsyncIterator[list[Process]]:
    """For processes that end with the block, which has a deadline."""
    started: list[Process] = []
    async with asyncio.timeout(DEADLINE_S):
        try:
            yield started
        finally:
            for one in started:
                if one.returncode is None:
                    one.kill()
                    await one.wait()


async def start(options: argparse.Namespace, member: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, tether.__file__, sys.executable, "-m", "bench.contestants.keylane_group",
        "--url", options.url, "--stream", options.stream, "--group", options.group, "--members", member,
        "--order", options.order, "--concurrency", str(options.concurrency),
        "--max-ack-pending", str(options.max_ack_pending), "--sleep", str(options.sleep), "--in-step",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


async def said(process: Process) -> bytes:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise SystemExit("a process ended before it was done")
    return line


def answer(processes: Sequence[Process]) -> None:
    for one in processes:
        assert one.stdin is not None
        one.stdin.write(b"\n")


def shares(text: str) -> dict[str, int]:
    """`a=10,b=20`: each member and how many messages are its own."""
    return {name: int(count) for name, _, count in (one.partition("=") for one in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--members", required=True, help="with the number of messages of each, as a=10,b=20")
    parser.add_argument("--order", default="key", choices=["key", "partition", "strict", "none"])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-ack-pending", type=int, default=1000)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds that a handler waits")
    parser.add_argument("--processes", action="store_true", help="a process for every member")
    parser.add_argument("--metrics", action="store_true", help="count what happens, as for Prometheus")
    parser.add_argument("--in-step", action="store_true", help="wait for a line before joining and before leaving")
    options = parser.parse_args()
    if options.processes:
        print(asyncio.run(in_processes(options)).line())
    else:
        keylane.run(take_part(options))


if __name__ == "__main__":
    main()
