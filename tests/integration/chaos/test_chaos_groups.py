"""Short fault runs, so that they never rot: real processes, a real server, real signals."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from tests.integration.exactly_once.postgres import find_postgres
from tests.peers.presence import require
from tests.peers.store import REPOSITORY


async def chaos(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """`python -m chaos … --json`: its exit code, what it printed, what it said meanwhile."""
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chaos", *arguments, "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=REPOSITORY,
    )  # fmt: skip
    try:
        out, err = await run.communicate()
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()
    assert out, err.decode()
    assert run.returncode is not None
    return run.returncode, json.loads(out), err.decode()


def nothing_is_wrong(told: dict[str, Any]) -> None:
    assert (told["lost"], told["out_of_order"], told["unknown"], told["left_in_queue"]) == (0, 0, 0, 0), told
    assert not any(told["store"].values()), told["store"]
    assert told["duplicated"] == told["explained"] + told["unexplained"]


@pytest.mark.timeout(240)
async def test_ten_seconds_of_faults_lose_nothing_and_keep_the_order() -> None:
    code, told, said = await chaos("groups", "--seconds", "10", "--seed", "10", "--rate", "300")
    nothing_is_wrong(told)
    assert told["unexplained"] == 0, told["findings"]
    assert code == (0 if told["clean"] else 1), said
    assert told["sent"] > 2500
    assert told["failed_tries"] > 0
    assert sum(told["faults_done"].values()) == len(told["fault_log"]) == 9
    assert set(told["faults_done"]) == {"kill", "freeze", "stop", "membership", "server"}
    assert all(one["over_s"] >= one["at_s"] for one in told["fault_log"])


@pytest.mark.timeout(240)
async def test_without_faults_nothing_is_handled_twice() -> None:
    code, told, said = await chaos("groups", "--seconds", "5", "--rate", "300", "--faults", "none", "--poison", "100")
    nothing_is_wrong(told)
    assert (code, told["clean"], told["duplicated"]) == (0, True, 0), said
    assert told["dead_letters"] > 0


@pytest.mark.timeout(240)
async def test_a_table_equals_the_stream_under_faults() -> None:
    require(find_postgres)
    _, told, _ = await chaos(
        "groups",
        "--seconds",
        "8",
        "--seed",
        "2",
        "--rate",
        "80",
        "--sink",
        "postgres",
        "--faults",
        "kill,freeze,server",
    )
    nothing_is_wrong(told)
    assert told["duplicated"] == 0, told["findings"]
    assert told["sent"] > 500


@pytest.mark.timeout(120)
async def test_the_memory_run_looks_at_a_member_and_judges() -> None:
    code, told, said = await chaos("memory", "--messages", "20000")
    assert code == (0 if told["clean"] else 1), said
    assert told["messages"] == 20_000
    assert told["samples"][-1]["handled"] == 20_000
    assert told["first_bytes"] > 10_000_000
