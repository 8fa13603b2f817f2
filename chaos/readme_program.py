"""README's programs as processes: their text is run as it stands, and what the handler prints is the evidence.

Of the app only its address and its payload are replaced, and it creates its stream. Of the group's program only the
address of the server, the number of replicas and, for a static group, the two lines that make stream and group are
replaced. `print` writes the lines that `chaos.evidence` reads, with the number in the payload in place of the sequence,
and joining writes `ready`. Signals are the program's own business.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

from nats.js.api import SubjectTransform

from keylane import groups
from keylane.app import RunningApp
from tests.peers.store import REPOSITORY

PARTITIONS = 10
TRANSFORM = SubjectTransform(src="orders.*", dest=f"{{{{Partition({PARTITIONS},1)}}}}.orders.{{{{Wildcard(1)}}}}")
_OUT = sys.stdout.fileno()


def source(url: str, kind: str, replicas: int) -> str:
    """The program of README.md, for this server and this kind of group."""
    page = (REPOSITORY / "README.md").read_text()
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    [program] = [one for one in blocks if ("keylane.App(" in one) == (kind == "app")]
    if kind == "app":
        # The load publishes numbers.
        changes = {
            'keylane.App("nats://127.0.0.1:4222")': f"keylane.App({url!r}, create_streams=True)",
            "order: Order": "order: int",
            "order.cents": "str(order)",
        }
        return _changed(program, changes)
    config = 'streams.StreamConfig(name="ORDERS", subjects=["orders.>"]'
    changes = {"nats://127.0.0.1:4222": url}
    more = f", num_replicas={replicas}"
    if kind == "static":
        more += ", subject_transform=TRANSFORM"
        changes |= {"groups.create_elastic(": "groups.create_static(", 'partitioning=[("orders.*", [1])], ': ""}
    changes[config] = config + more
    return _changed(program, changes)


def _changed(program: str, changes: dict[str, str]) -> str:
    for before, after in changes.items():
        if program.count(before) != 1:
            raise SystemExit(f"README's program does not have {before!r} once: chaos/readme_program.py must follow it")
        program = program.replace(before, after)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.readme_program", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--kind", choices=("app", "elastic", "static"), default="app")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--member", required=True)
    options = parser.parse_args()
    who = options.member.encode()

    def write_down(key: str, subject: str, data: str) -> None:
        os.write(_OUT, b"%d %b %d %b\n" % (time.monotonic_ns(), subject.encode(), int(data), who))

    def ready() -> None:
        os.write(_OUT, b"ready\n")

    join = groups.join

    def join_and_say_so(*arguments: Any) -> Any:
        return join(*arguments, hooks=groups.MemberHooks(on_joined=ready))

    groups.join = join_and_say_so  # type: ignore[assignment]
    watch = RunningApp.watch

    def watch_and_say_so(running: RunningApp, stack: AsyncExitStack) -> None:
        watch(running, stack)
        ready()

    RunningApp.watch = watch_and_say_so  # type: ignore[assignment,method-assign]
    sys.argv = ["readme.py", options.member]
    names = {"__name__": "__main__", "print": write_down, "TRANSFORM": TRANSFORM}
    exec(compile(source(options.url, options.kind, options.replicas), "README.md", "exec"), names)  # noqa: S102


if __name__ == "__main__":
    main()
