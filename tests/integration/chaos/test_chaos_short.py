"""The chaos run itself: a short one is clean, ends by itself and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.peers.store import REPOSITORY

pytestmark = pytest.mark.timeout(180)

MARK = "KEYLANE_TEST_RUN"


async def start(mark: str, *arguments: str) -> asyncio.subprocess.Process:
    """`python -m chaos rebalance`, marked so that all its processes can be found again."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chaos", "rebalance", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=REPOSITORY, env=os.environ | {MARK: mark},
    )  # fmt: skip


def left_behind(mark: str) -> list[str]:
    """What still runs of it, as command lines."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or is not ours
    return [line for line in found if line]  # a process that is not waited for yet has no command line


async def test_ten_seconds_of_changes_are_clean(unique: Callable[..., str]) -> None:
    mark = unique("chaos")
    run = await start(mark, "--seconds", "10", "--every", "2", "--seed", "7", "--rate", "500", "--json")
    out, err = await run.communicate()
    assert run.returncode == 0, (out.decode(), err.decode())
    told: dict[str, Any] = json.loads(out)
    assert told["clean"] is True
    assert (told["lost"], told["duplicated"], told["out_of_order"], told["unknown"]) == (0, 0, 0, 0)
    assert told["explained"] == []
    assert told["sent"] > 2500
    assert len(told["changes"]) == 4
    assert any(one["moved"] for one in told["changes"])
    first = told["first_message_ms"]["all"]
    assert first["count"] == sum(len(one["moved"]) for one in told["changes"])
    assert first["never"] == 0
    assert left_behind(mark) == []


async def test_a_killed_run_takes_its_processes_along(unique: Callable[..., str]) -> None:
    mark = unique("chaos")
    run = await start(mark, "--seconds", "60", "--rate", "50")
    assert run.stderr is not None
    async with asyncio.timeout(40):
        line = await run.stderr.readline()
    assert b"members joined" in line
    assert len(left_behind(mark)) >= 6, "the run, its members and its server are alive"
    run.kill()
    await run.communicate()
    deadline_s = time.monotonic() + 30
    while left := left_behind(mark):
        assert time.monotonic() < deadline_s, left
        await asyncio.sleep(0.05)
