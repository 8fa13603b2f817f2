"""`keylane web` as a process: what it prints, what it refuses, and that it ends with Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest

from keylane.server import NatsServer
from tests.waiter import until

EVERYWHERE = "0.0.0.0"  # noqa: S104 - that is the point
COMMAND = [sys.executable, "-m", "keylane.cli.main", "web", "--port", "0"]


@asynccontextmanager
async def running(
    server: NatsServer, *options: str
) -> AsyncIterator[tuple[str, list[str], asyncio.subprocess.Process]]:
    """The URL of the page, the lines that were printed, and the process."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("--server", server.url, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    lines: list[str] = []

    async def read() -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            lines.append(line.decode().rstrip())

    reading = asyncio.create_task(read())
    try:
        await until(lambda: lines, bool, deadline_s=45)
        found = re.search(r"http://\S+", lines[0])
        assert found is not None, lines
        yield found[0], lines, process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading


async def test_it_prints_a_token_once_and_ends_with_ctrl_c_while_somebody_looks(nats_server: NatsServer) -> None:
    async with running(nats_server, "--allow-actions") as (url, lines, process), aiohttp.ClientSession() as session:
        await until(lambda: len(lines), lambda count: count == 2)
        token = lines[1].removeprefix("token for actions: ")
        assert len(token) >= 20
        headers = {"Origin": url, "Content-Type": "application/json"}
        for given, expected in ((token, 422), ("guessed", 401)):
            sent = headers | {"X-Keylane-Token": given}
            async with session.post(f"{url}/actions/preview", data="{}", headers=sent) as answer:
                assert answer.status == expected
        async with session.get(f"{url}/events") as events:
            assert events.status == 200
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 20) == 0
    assert len(lines) == 2


async def test_it_is_read_only_by_default_and_warns_where_others_reach_it(nats_server: NatsServer) -> None:
    async with running(nats_server, "--host", EVERYWHERE) as (url, lines, _), aiohttp.ClientSession() as session:
        await until(lambda: len(lines), lambda count: count == 2)
        assert "everybody who reaches this port can read" in lines[1]
        own = url.replace(EVERYWHERE, "127.0.0.1")
        headers = {"Origin": own, "Content-Type": "application/json", "X-Keylane-Token": ""}
        async with session.post(f"{own}/actions/preview", data="{}", headers=headers) as answer:
            assert answer.status == 403
        async with session.get(own, headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        (["--token", "long enough for a token"], {}, "a token without --allow-actions has no use"),
        (["--allow-actions", "--token", "short"], {}, "at least 12 characters"),
        (["--allow-actions"], {"KEYLANE_WEB_TOKEN": "short"}, "at least 12 characters"),
    ],
)
def test_a_token_that_protects_nothing_is_refused(
    options: list[str], environment: dict[str, str], expected: str
) -> None:
    done = subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=50
    )
    assert done.returncode == 2
    assert expected in done.stderr
