"""One Marshal consumer in a process of its own; its standard output is the evidence.

    instance <id> <ns>
    ready
    claimed <partition> <token> <ns>
    b <partition> <offset> <token> <ns> <key>     a handler began
    e <partition> <offset> <token> <ns> <key>     it ended

Every line is one write, so that a kill loses none that was written. Times are the machine's monotonic nanoseconds,
which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from keylane.core.claim_choice import TopicPartition
from keylane.marshal import Consumer, ConsumerHooks, CoordinationLog, MarshalMessage, Source
from keylane.marshal.options import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a worker is told."""

    on: str
    url: str
    topic: str
    log: str
    group: str
    client: str
    mode: Mode
    interval_s: float
    batch: int
    work_s: float
    max_claims: int | None

    def as_argument(self) -> str:
        return json.dumps(asdict(self))


@asynccontextmanager
async def ground(on: str, url: str, log: str, interval_s: float) -> AsyncIterator[tuple[CoordinationLog, Source]]:
    """The log and the source of a run. Only the client library in use is loaded."""
    if on == "kafka":
        from keylane.kafka import open_kafka, open_kafka_log, open_kafka_source  # noqa: PLC0415 - see above

        async with (
            open_kafka(url) as link,
            open_kafka_log(link, log, interval_s=interval_s) as kafka_log,
            open_kafka_source(link) as kafka_source,
        ):
            yield kafka_log, kafka_source
    else:
        sys.modules.setdefault("aiohttp", None)  # type: ignore[arg-type]  # for websockets only, and slow to load
        import keylane  # noqa: PLC0415 - see above
        from keylane.marshal import StreamSource, open_jetstream_log  # noqa: PLC0415 - see above

        async with (
            await keylane.connect(url) as connection,
            open_jetstream_log(connection, log, interval_s=interval_s) as opened,
        ):
            yield opened, StreamSource(connection)


def _write(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def _work(orders: Orders) -> None:
    def told(kind: str, message: MarshalMessage) -> None:
        key = (message.key or b"-").decode()
        _write(f"{kind} {message.partition} {message.offset} {message.token} {time.monotonic_ns()} {key}")

    async def handler(message: MarshalMessage) -> None:
        told("b", message)
        if orders.work_s:
            await asyncio.sleep(orders.work_s)
        told("e", message)

    def claimed(where: TopicPartition, token: int) -> None:
        _write(f"claimed {where.partition} {token} {time.monotonic_ns()}")

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with ground(orders.on, orders.url, orders.log, orders.interval_s) as (log, source):
        consumer = Consumer(
            log,
            source,
            orders.group,
            orders.client,
            [orders.topic],
            handler,
            mode=orders.mode,
            heartbeat_interval_s=orders.interval_s,
            batch_size=orders.batch,
            max_claims=orders.max_claims,
            hooks=ConsumerHooks(on_claimed=claimed),
        )
        _write(f"instance {consumer.instance_id} {time.monotonic_ns()}")
        async with consumer:
            _write("ready")
            ended = asyncio.create_task(consumer.wait())
            asked = asyncio.create_task(stop.wait())
            await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if ended.done():
                ended.result()
            ended.cancel()


if __name__ == "__main__":
    asyncio.run(_work(Orders(**json.loads(sys.argv[1]))))
