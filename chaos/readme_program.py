"""README's app and the first program of docs/groups.md as processes: what their handlers print is the evidence.

Their text is run as it stands. Of the app only its address and its payload are replaced, and it creates its stream. Of
the group's program only the address of the server is replaced and, for a static group, the line that makes the group;
a line that creates the stream is added. `print` writes the lines that `chaos.evidence` reads, with the number in the
payload in place of the sequence, and joining writes `ready`. Signals are the program's own business.
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
from keylane.jetstream import streams
from tests.peers.store import REPOSITORY

PARTITIONS = 10
TRANSFORM = SubjectTransform(src="orders.*", dest=f"{{{{Partition({PARTITIONS},1)}}}}.orders.{{{{Wildcard(1)}}}}")
_OUT = sys.stdout.fileno()


def source(url: str, kind: str, replicas: int) -> str:
    """The first program of its page, for this server and this kind of group."""
    page = (REPOSITORY / ("README.md" if kind == "app" else "docs/groups.md")).read_text()
    program: str = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    if kind == "app":
        # The load publishes numbers.
        changes = {
            'keylane.App("nats://127.0.0.1:4222")': f"keylane.App({url!r}, create_streams=True)",
            "order: Order": "order: int",
            "order.cents": "str(order)",
        }
        return _changed(program, changes)
    create = "await groups.create_elastic("
    more = f", num_replicas={replicas}"
    changes = {"nats://127.0.0.1:4222": url}
    if kind == "static":
        more += ", subject_transform=TRANSFORM"
        changes['partition_by="orders.*", '] = ""
    stream = f'await streams.create(connection, streams.StreamConfig(name="ORDERS", subjects=["orders.>"]{more}))'
    changes[create] = f"{stream}\n        {create.replace('elastic', kind)}"
    return _changed(program, changes)


def _changed(program: str, changes: dict[str, str]) -> str:
    for before, after in changes.items():
        if program.count(before) != 1:
            raise SystemExit(
                f"the program of the page does not have {before!r} once: chaos/readme_program.py must follow it"
            )
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
    names = {"__name__": "__main__", "print": write_down, "streams": streams, "TRANSFORM": TRANSFORM}
    exec(compile(source(options.url, options.kind, options.replicas), "README.md", "exec"), names)  # noqa: S102


if __name__ == "__main__":
    main()
