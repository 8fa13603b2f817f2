"""Workers of a fleet in one process: each on a connection of its own, each writing down every message before its ack.

`python -m chaos.fleet_worker '{"url": …, "stream": …, "fleet": …, "workers": {"w0": "w0#0"}, …}'`: the names that they
join with, and what they are called in the evidence. Standard output gets `ready` when all have joined, then one line
for each message: the machine's monotonic clock in nanoseconds, the subject, the sequence, the worker, the sequence
again, how often it was delivered, the fencing token that its handler began with, and when that was. A line `state` has
the clock, the worker and its state, or `linked` when a lost link is there again. Standard error gets the log.

SIGTERM stops all of them cleanly. A server that is away when they start is waited for, as a supervisor would.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import sys
import time
from typing import Any

import keylane
from chaos.load import FILTER
from chaos.worker import MachineClock, write
from keylane import fleet
from keylane.core.fleet_events import WorkerState
from keylane.errors import ApiError, ApiUnavailable, Disconnected, JetStreamDisabled, RequestTimeout, ServerUnreachable
from keylane.groups import GroupMessage
from keylane.jetstream import ConnectionHooks
from keylane.processing.handler_options import Handler

_log = logging.getLogger("chaos.fleet_worker")
_START_TIMEOUT_S = 60.0
_TRY_AGAIN_S = 0.3


def handler_of(by: str, work_s: float) -> Handler:
    who = by.encode()
    chance = random.Random(by)  # noqa: S311 - how long a handler takes

    async def handle(message: GroupMessage) -> None:
        begun_ns, token = time.monotonic_ns(), message.origin.revision
        if work_s:
            await asyncio.sleep(chance.uniform(0, 2 * work_s))
        write(
            b"%d %b %d %b %d %d %d %d\n"
            % (
                time.monotonic_ns(),
                message.subject.encode(),
                message.delivery_sequence,
                who,
                message.delivery_sequence,
                message.delivered_count,
                token,
                begun_ns,
            )
        )

    return handle


async def work(given: dict[str, Any]) -> None:
    asked_to_stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_stop.set)
    up = asyncio.Barrier(len(given["workers"]))
    async with asyncio.TaskGroup() as tasks:
        for name, by in given["workers"].items():
            tasks.create_task(_take_part(given, name, by, asked_to_stop, up), name=by)


async def _take_part(
    given: dict[str, Any], name: str, by: str, asked_to_stop: asyncio.Event, up: asyncio.Barrier
) -> None:
    def told(state: WorkerState, waiting_for: str | None) -> None:
        write(b"state %d %b %b\n" % (time.monotonic_ns(), by.encode(), state.value.replace(" ", "-").encode()))
        _log.info("%s: %s, waiting for %s", by, state, waiting_for)

    def linked(_server: str) -> None:
        write(b"state %d %b linked\n" % (time.monotonic_ns(), by.encode()))

    joined = False
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not asked_to_stop.is_set():
        try:
            async with await keylane.connect(
                given["url"], name=f"chaos {by}", hooks=ConnectionHooks(on_reconnect=linked)
            ) as connection:
                worker = await fleet.join(
                    connection,
                    given["stream"],
                    given["fleet"],
                    handler_of(by, given["work_s"]),
                    partitions=fleet.hashed(given["partitions"], FILTER),
                    name=name,
                    hooks=fleet.WorkerHooks(
                        on_state=told,
                        on_partitions=lambda before, after: _log.info("%s: %s -> %s", by, before, after),
                    ),
                    **given["options"],
                )
                joined = True
                if await up.wait() == 0:
                    write(b"ready\n")
                await _until_asked(worker, asked_to_stop)
                _log.info("%s: stopped", by)
                return
        except (ApiUnavailable, Disconnected, JetStreamDisabled, RequestTimeout, ServerUnreachable) as error:
            if joined or time.monotonic() > deadline_s:
                raise
            _log.info("the server is away: %s", error)
        except ApiError as error:
            if joined or error.code != 503 or time.monotonic() > deadline_s:
                raise
            _log.info("the server is starting: %s", error)
        await asyncio.sleep(_TRY_AGAIN_S)


async def _until_asked(worker: fleet.Worker, asked_to_stop: asyncio.Event) -> None:
    ended = asyncio.create_task(worker.wait())
    stopping = asyncio.create_task(asked_to_stop.wait())
    await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        await worker.stop()
    stopping.cancel()
    await ended


def main() -> None:
    told = logging.StreamHandler()
    told.setFormatter(MachineClock("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[told])
    keylane.run(work(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
