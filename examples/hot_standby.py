"""Hot standby: of two processes one works and one waits; when the first dies, the other continues in order.

Starts its own server and its own worker processes, runs for a few seconds and needs nothing prepared:

    python examples/hot_standby.py
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from nats.js.api import RetentionPolicy, StreamConfig

import keylane
from keylane import Connection, priority
from keylane.jetstream import streams
from keylane.server import NatsServer

LAST = 225
PIN_TIMEOUT_S = 1.0
AN_ORDER_TAKES_S = 0.01


# ---- the worker, in a separate process ---------------------------------------------------------------


async def work(url: str) -> None:
    """Handle orders while this process is the pinned one. `keylane.run` ends it cleanly on SIGTERM and Ctrl-C."""

    def say(*words: object) -> None:
        print(*words, flush=True)

    def stop() -> None:
        asyncio.get_running_loop().remove_reader(sys.stdin)
        signal.raise_signal(signal.SIGTERM)

    asyncio.get_running_loop().add_reader(sys.stdin, stop)  # the parent process is gone
    async with (
        keylane.connect(url) as connection,
        priority.consume(
            connection,
            "ORDERS",
            "billing",
            on_pinned=lambda pin_id: say("pinned", pin_id),
            on_unpinned=lambda pin_id: say("unpinned", pin_id),
            reset_on_takeover=True,  # the default on server 2.14 and newer
            max_messages=20,
        ) as feed,
    ):
        await connection.flush()
        say("ready")
        async for order in feed:
            await asyncio.sleep(AN_ORDER_TAKES_S)  # the work
            say("did", order.data.decode(), time.monotonic())
            order.ack()
    # Leaving the feed hands the pin over at once, so the other process does not wait for the timeout. It begins with
    # the interrupted order.


# ---- the scenario: starts workers, kills one, stops one ---------------------------------------------


class Worker:
    """A worker process and its output."""

    def __init__(self, name: str, story: Story) -> None:
        self.name = name
        self._story = story
        self._ready = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self, url: str) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--worker",
            url,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the main process, which then stops its workers
        )
        if self._process.stdout is not None:
            self._listening = asyncio.create_task(self._listen(self._process.stdout))
        async with asyncio.timeout(20):
            await self._ready.wait()

    async def end(self, how: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(how)
            await self._process.wait()
        if self._listening is not None:
            await self._listening

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            what, *rest = line.decode().split()
            if what == "ready":
                self._ready.set()
            elif what == "did":
                self._story.did(float(rest[1]), self.name, int(rest[0]))
            else:
                print(f"  {self.name}: on_{what}")


class Story:
    """Which worker handled which order, and when."""

    def __init__(self) -> None:
        self.handled: list[tuple[float, str, int]] = []
        self._news = asyncio.Event()

    def did(self, when: float, worker: str, order: int) -> None:
        self.handled.append((when, worker, order))
        self._news.set()

    async def until(self, order: int) -> None:
        async with asyncio.timeout(30):
            while not any(done >= order for _, _, done in self.handled):
                self._news.clear()
                await self._news.wait()

    def shares(self) -> list[list[tuple[float, str, int]]]:
        """Every order at its first handling, split where the worker changes."""
        shares: list[list[tuple[float, str, int]]] = []
        seen = set()
        for one in sorted(self.handled):
            if one[2] in seen:
                continue
            seen.add(one[2])
            if not shares or shares[-1][-1][1] != one[1]:
                shares.append([])
            shares[-1].append(one)
        return shares

    def last_gap_s(self) -> float:
        """How long nobody worked at the last change."""
        before, after = self.shares()[-2:]
        return after[0][0] - before[-1][0]


async def publish(connection: Connection, first: int, last: int) -> None:
    for number in range(first, last + 1):
        await connection.jetstream.publish("orders.new", str(number).encode())


async def main() -> None:
    async with NatsServer.start() as server, keylane.connect(server.url) as connection:
        await streams.create(
            connection,
            StreamConfig(name="ORDERS", subjects=["orders.>"], retention=RetentionPolicy.WORK_QUEUE),
        )
        await priority.create(
            connection,
            "ORDERS",
            priority.ConsumerConfig(
                durable_name="billing",
                priority_groups=("billing",),
                priority_policy="pinned_client",
                priority_timeout_s=PIN_TIMEOUT_S,
                max_ack_pending=100,
            ),
        )
        story = Story()
        workers = (Worker("A", story), Worker("B", story), Worker("A", story))
        try:
            await tell(story, connection, server.url, workers)
        finally:
            for worker in workers:
                await worker.end(signal.SIGKILL)
    shares = story.shares()
    orders = [order for share in shares for _, _, order in share]
    print("who did what: " + ", ".join(f"{share[0][1]} {share[0][2]}-{share[-1][2]}" for share in shares))
    in_order = orders == list(range(1, LAST + 1))
    print(f"orders handled: {len(orders)}, each one's first time in order: {'yes' if in_order else 'NO'}")
    print(f"handled twice: {len(story.handled) - len(orders)} (what was in flight when the pin moved)")


async def tell(story: Story, connection: Connection, url: str, workers: tuple[Worker, Worker, Worker]) -> None:
    first, second, third = workers
    await first.start(url)
    print("A is up; the first order pins it")
    await publish(connection, 1, 1)
    await story.until(1)
    await second.start(url)
    print("B is up and waits; orders come in")
    await publish(connection, 2, 75)
    await story.until(40)

    await first.end(signal.SIGKILL)
    print("A is killed in the middle of its work (kill -9)")
    await story.until(75)
    gap_s = story.last_gap_s()
    print(f"  B went on {gap_s:.1f} s after A's last order; the pin's timeout is {PIN_TIMEOUT_S:g} s")

    await third.start(url)
    print("A is up again and waits; orders come in")
    await publish(connection, 76, 150)
    await story.until(110)
    await priority.unpin(connection, "ORDERS", "billing")
    print("an admin takes the pin from B (as `keylane consumer unpin ORDERS billing` does)")
    await story.until(150)
    print(f"  A went on {story.last_gap_s():.2f} s after B's last order")

    print("more orders come in, and A is told to stop (SIGTERM)")
    await publish(connection, 151, LAST)
    await story.until(170)
    await third.end(signal.SIGTERM)
    await story.until(LAST)
    gap_s = story.last_gap_s()
    print(f"  B went on {gap_s:.2f} s after A's last order: a clean stop waits for no timeout")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        keylane.run(work(sys.argv[2]))
    else:
        keylane.run(main())
