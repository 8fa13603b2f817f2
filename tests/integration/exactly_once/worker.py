"""A member in a process of its own that writes exactly once, and kills or freezes itself where the test wants it.

    python -m tests.integration.exactly_once.worker '{"url": …}'

Says on its output what it handled: a line each, straight to the kernel.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

import keylane
from keylane import groups
from keylane.exactly_once import ExactlyOnce
from tests.integration.exactly_once.rig import write
from tests.integration.groups.rig import QUICK


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def main(job: dict[str, Any]) -> None:
    engine = create_async_engine(job["database"], pool_size=20)
    once = ExactlyOnce(engine, idle_timeout_s=job.get("idle_timeout_s", 10.0), lock_timeout_s=1.0)

    async def effect(message: groups.GroupMessage, connection: AsyncConnection) -> None:
        await write(message, connection, job["who"])
        if message.sequence == job.get("freeze_at"):
            say("freezing", message.sequence)
            os.kill(os.getpid(), signal.SIGSTOP)

    inner = once.handler(effect)

    async def handler(message: groups.GroupMessage) -> None:
        say("got", message.sequence)
        await inner(message)
        if message.sequence == job.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)  # committed, and not acked

    hooks = groups.MemberHooks(
        on_activated=lambda: say("active"),
        on_deactivated=lambda: say("inactive"),
        on_failure=lambda message, error, tries: say("failed", message.sequence, tries, type(error).__name__),
    )
    async with await keylane.connect(job["url"]) as connection:
        member = await groups.join(connection, job["stream"], "g", job["member"], handler, settings=QUICK, hooks=hooks)
        say("joined")
        await member.wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
