"""A process that takes a lease and acts for as long as it holds it; for tests that kill, freeze and orphan it.

Every line that it prints begins with the time on the machine's clock. `--below` starts another one of these as a child
and waits, as a JVM does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import keylane
from keylane.errors import QueryFenced
from keylane.spark.driver.lease import Lease, holder_name


def say(text: str) -> None:
    sys.stdout.write(f"{time.monotonic()} {text}\n")
    sys.stdout.flush()


async def hold(url: str, name: str, lease_s: float) -> None:
    async with await keylane.connect(url) as connection:
        lease = Lease(connection, name, holder_name(), lease_s)
        say(f"started {os.getpid()}")
        try:
            await lease.take(on_waiting=lambda holder: say(f"waits for {holder}"))
            say("holds")
            acted_at = 0.0
            while True:
                now = time.monotonic()
                lease.check()
                acted_at = now
                await asyncio.sleep(0.005)
        except QueryFenced as fenced:
            if "acted_at" in locals():
                say(f"acted last at {acted_at}")
            say(f"fenced: {fenced}")


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[0] == "--below":
        subprocess.run([sys.executable, "-m", __spec__.name, *arguments[1:]], check=False)
    else:
        url, name, lease_s = arguments
        asyncio.run(hold(url, name, float(lease_s)))


if __name__ == "__main__":
    main()
