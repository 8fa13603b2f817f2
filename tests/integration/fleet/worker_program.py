"""A worker of a fleet in a process of its own: `python worker_program.py '{"url": …, "stream": …, "name": …}'`.

Prints one JSON line for each message that it has handled, and one whenever its partitions change.
"""

from __future__ import annotations

import json
import sys
import time

import keylane
from keylane import fleet
from keylane.groups import GroupMessage


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def handle(message: GroupMessage) -> None:
    say(at=time.monotonic(), partition=message.partition, key=message.key, sequence=message.delivery_sequence)


async def main() -> None:
    given = json.loads(sys.argv[1])
    stream = given["stream"]
    hooks = fleet.FleetHooks(on_partitions=lambda _, after: say(partitions=after))
    partitions = fleet.hashed(given.get("partitions", 8), f"{stream}.*", key=[1])
    async with keylane.connect(given["url"]) as connection:
        options = {name: given[name] for name in ("acks", "state", "checkpoint_s", "layout") if name in given}
        worker = fleet.join(
            connection, stream, "f", handle, partitions=partitions, name=given["name"], hooks=hooks, **options
        )
        async with worker as running:
            await running.wait()


keylane.run(main())
