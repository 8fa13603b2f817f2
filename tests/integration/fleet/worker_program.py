"""A worker of a fleet in a process of its own: `python worker_program.py '{"url": …, "stream": …, "name": …}'`.

Prints one JSON line for each message that it has handled, and one whenever its partitions change. Fails on messages
with the data `bad` as long as the file `broken` exists, if one is given. With `dies_delaying` it kills itself when a
message is stored for a delayed retry, and its ack is not sent; with `hangs_retrying` it never ends a retry.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time

import keylane
from keylane import fleet
from keylane.groups import GroupMessage
from keylane.processing.delayed_retries import DelayedRetries

OPTIONS = ("acks", "state", "checkpoint_s", "layout", "max_tries", "after_tries", "retry_delays")


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


given = json.loads(sys.argv[1])


def is_broken() -> bool:
    return "broken" in given and os.path.exists(given["broken"])


async def handle(message: GroupMessage) -> None:
    if message.earlier_tries and given.get("hangs_retrying"):
        say(retrying=message.sequence)
        await asyncio.sleep(3600)
    if message.data == b"bad" and is_broken():
        raise ValueError("bad")
    say(at=time.monotonic(), partition=message.partition, key=message.key, sequence=message.sequence)


async def delay_and_die(retries: DelayedRetries, message: GroupMessage, error: BaseException, tries: int) -> None:
    await delay(retries, message, error, tries)
    os.kill(os.getpid(), signal.SIGKILL)


delay = DelayedRetries.delay
if given.get("dies_delaying"):
    DelayedRetries.delay = delay_and_die  # type: ignore[method-assign, assignment]


async def main() -> None:
    stream = given["stream"]
    hooks = fleet.WorkerHooks(on_partitions=lambda _, after: say(partitions=after))
    partitions = fleet.hashed(given.get("partitions", 8), f"{stream}.*")
    async with keylane.connect(given["url"]) as connection:
        options = {name: given[name] for name in OPTIONS if name in given}
        worker = fleet.join(
            connection, stream, "f", handle, partitions=partitions, name=given["name"], hooks=hooks, **options
        )
        async with worker as running:
            await running.wait()


keylane.run(main())
