"""A keylane member in a process of its own, which writes down every message before it is acked.

Standard output gets `ready` once it has joined, then one line per message: the machine's monotonic clock in
nanoseconds, the subject, the sequence in the source stream, the member. `pcgroups-peer consume --evidence` writes
the same. SIGTERM stops it cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time

import keylane
from keylane import groups
from keylane.jetstream.consumers import ConsumerConfig


async def work(options: argparse.Namespace) -> None:
    out = sys.stdout.fileno()
    member = options.member.encode()

    async def handler(message: groups.GroupMessage) -> None:
        if options.work:
            await asyncio.sleep(options.work)
        # Straight to the kernel: what a killed process wrote is there.
        os.write(
            out,
            b"%d %b %d %b\n" % (time.monotonic_ns(), message.subject.encode(), message.source_sequence, member),
        )

    asked_to_stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_stop.set)
    async with await keylane.connect(options.url, name=f"chaos {options.member}") as connection:
        handle = await groups.join(
            connection,
            options.stream,
            options.group,
            options.member,
            handler,
            max_ack_pending=options.max_ack_pending,
            settings=ConsumerConfig(ack_wait_s=options.ack_wait) if options.ack_wait else None,
            hooks=groups.MemberHooks(on_joined=lambda: _write(out, b"ready\n")),
        )
        ended = asyncio.create_task(handle.wait())
        stopping = asyncio.create_task(asked_to_stop.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await handle.stop()
        stopping.cancel()
        await ended


def _write(out: int, line: bytes) -> None:
    os.write(out, line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m chaos.worker", description=__doc__)
    for name in ("url", "stream", "group", "member"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--ack-wait", type=float, default=0.0, help="seconds; 0 leaves keylane's default")
    parser.add_argument("--work", type=float, default=0.0, help="seconds that each message takes")
    parser.add_argument("--max-ack-pending", type=int, default=1000, help="unacknowledged messages allowed")
    keylane.run(work(parser.parse_args()))
