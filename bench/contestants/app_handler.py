"""One worker of a fleet that handles a stream once: with `fleet.join`, or as a handler of an app with typed payloads.

`python -m bench.contestants.app_handler URL STREAM GROUP KIND COUNT`. Time runs from the first message to the last.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic

import keylane
from keylane import fleet
from keylane.app import App

PARTITIONS = 10
FILTER = "bench.*"
IN_FLIGHT = 1000
_DEADLINE_S = 110.0


@dataclass
class DataclassOrder:
    customer: str
    cents: int


class StructOrder(msgspec.Struct):
    customer: str
    cents: int


class ModelOrder(pydantic.BaseModel):
    customer: str
    cents: int


PAYLOADS: dict[str, Any] = {
    "bytes": bytes,
    "dict": dict,
    "msgspec": StructOrder,
    "pydantic": ModelOrder,
    "dataclass": DataclassOrder,
}


class Counter:
    """Counts messages up to the last one."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._start: tuple[float, float] | None = None
        self._count = count
        self.done = asyncio.Event()
        self.result: dict[str, float] = {}

    def add(self) -> None:
        if self._start is None:
            self._start = time.monotonic(), time.process_time()
        self._left -= 1
        if not self._left:
            wall, cpu = self._start
            seconds, used = time.monotonic() - wall, time.process_time() - cpu
            self.result = {"count": self._count, "seconds": seconds, "cpu_seconds": used}
            self.done.set()


def app_handler(kind: str, counter: Counter) -> Callable[..., Any]:
    async def handle(order: Any) -> None:
        counter.add()

    handle.__annotations__ = {"order": PAYLOADS[kind], "return": None}
    return handle


async def main(url: str, stream: str, group: str, kind: str, count: int) -> None:
    counter = Counter(count)

    async def handle(message: keylane.Message) -> None:
        counter.add()

    async with asyncio.timeout(_DEADLINE_S), keylane.connect(url) as connection:
        if kind == "join":
            partitions = fleet.hashed(PARTITIONS, FILTER)
            async with fleet.join(connection, stream, group, handle, partitions=partitions, max_ack_pending=IN_FLIGHT):
                await counter.done.wait()
        else:
            app = App()
            decorate = app.handler(
                stream, group=group, partition_by=FILTER, partitions=PARTITIONS, max_ack_pending=IN_FLIGHT
            )
            decorate(app_handler(kind, counter))
            async with app.start(connection=connection):
                await counter.done.wait()
    print(json.dumps(counter.result))


if __name__ == "__main__":
    given = sys.argv[1:]
    keylane.run(main(given[0], given[1], given[2], given[3], int(given[4])))
