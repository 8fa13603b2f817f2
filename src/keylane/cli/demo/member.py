"""A member of the demo's group, in a process of its own: handles orders and reports each one as a line on stdout.

It writes the line before it acks the order, so the evidence of a killed process is complete. The line of an order has
the machine's monotonic clock, which all processes share. The process ends when its stdin ends, and so never outlives
the demo.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time

import keylane
from keylane import groups
from keylane.jetstream import ConsumerConfig
from keylane.journal import Journal

JOURNAL_FLUSH_S = 0.05


def _report(event: str, value: object = None) -> None:
    os.write(sys.stdout.fileno(), json.dumps([event, value]).encode() + b"\n")


async def _handle(message: groups.GroupMessage) -> None:
    _report("handled", [message.key, message.sequence, time.monotonic()])


async def _until_stdin_ends() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def run_member(url: str, stream: str, group: str, member: str, ack_wait_s: float) -> None:
    hooks = groups.MemberHooks(
        on_joined=lambda: _report("standby"),
        on_activated=lambda: _report("active"),
        on_deactivated=lambda: _report("standby"),
        on_partitions=lambda _, now: _report("partitions", list(now)),
    )
    async with (
        keylane.connect(url) as connection,
        Journal(connection, stream=stream, flush_s=JOURNAL_FLUSH_S) as journal,
        groups.join(
            connection,
            stream,
            group,
            member,
            _handle,
            settings=ConsumerConfig(ack_wait_s=ack_wait_s),
            hooks=hooks,
            journal=journal,
        ) as handle,
    ):
        ended = asyncio.ensure_future(handle.wait())
        stdin_ended = asyncio.ensure_future(_until_stdin_ends())
        await asyncio.wait({ended, stdin_ended}, return_when=asyncio.FIRST_COMPLETED)
        stdin_ended.cancel()
        if ended.done():
            ended.result()


if __name__ == "__main__":
    # The table of the demo shows states. One member waits on purpose until the group lists it: no warning for that.
    logging.getLogger("keylane.groups.state").setLevel(logging.ERROR)
    _url, _stream, _group, _member, _ack_wait = sys.argv[1:]
    keylane.run(run_member(_url, _stream, _group, _member, float(_ack_wait)))
