"""`keylane autoscale` as a process: its lines, its command, and the number that KEDA reads."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from keylane.jetstream import streams
from tests.integration.cli.groups_rig import here, running
from tests.integration.fleet.rig import FleetGround
from tests.integration.groups.rig import Ground
from tests.waiter import until


async def asked(url: str) -> tuple[int, dict[str, Any]]:
    def ask() -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - of this test
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    return await asyncio.to_thread(ask)


async def test_a_command_is_run_and_the_number_is_served(limits: FleetGround, tmp_path: Path) -> None:
    ended, written = asyncio.Event(), tmp_path / "replicas"

    async def wait(message: object) -> None:
        await ended.wait()

    await limits.shared(await limits.join("a", wait))
    await limits.publish([f"k{one}" for one in range(40)])
    write = f"import sys; open({str(written)!r}, 'a').write(sys.argv[1])"
    words = ["autoscale", limits.stream, "f", "--max", "4", "--target-age", "2", "--window", "1", "--interval", "0.2"]
    words += ["--exec", f'{shlex.quote(sys.executable)} -c "{write}" {{replicas}}']
    words += ["--port", "0", "--host", "127.0.0.1", "--json"]
    try:
        async with running(*words, "-s", limits.url) as command:
            url = f"http://127.0.0.1:{(await command.event('serving'))['port']}"
            done = await command.until(lambda line: bool(line.get("done")))
            assert written.read_text() == str(done["wanted"])
            assert done["wanted"] > 1
            assert "old" in done["reason"]
            code, served = await asked(f"{url}/wanted")
            assert (code, served["wanted"], served["stream"]) == (200, done["wanted"], limits.stream)
            assert (await asked(f"{url}/readyz"))[0] == 200
            await streams.delete(limits.connection, limits.stream)
            code, served = await until(lambda: asked(f"{url}/wanted"), lambda one: one[0] != 200)
            assert (code, served) == (503, {"problem": f"there is no stream {limits.stream!r}"})
            assert (await asked(f"{url}/healthz"))[0] == 200
            assert (await command.end(signal.SIGTERM)).returncode == 0
    finally:
        ended.set()


async def test_text_says_only_what_is_new(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    await ground.join("b")
    url = ground.url if isinstance(ground.url, str) else ground.url[0]
    words = ["autoscale", ground.stream, "g", "--min", "2", "--max", "4", "--window", "0.5", "--interval", "0.1"]
    async with running(*words, "--pool", "a,b", "-s", url) as command:
        assert command.process.stdout is not None
        async with asyncio.timeout(60):
            lines = [(await command.process.stdout.readline()).decode()[14:] for _ in range(3)]
    assert lines[0].startswith(
        "stays at 1: 1 workers are outside the limits, 2 to 4 workers for 4 partitions; the next"
    )
    assert lines[1].startswith("1 → 2, adds b: ")
    assert lines[2].startswith("stays at 2: lag 0")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max", "2", "--min", "3"], "the maximum is 2 workers and the minimum 3: it must not be smaller"),
        (["--max", "2", "--exec", "scale it"], "--exec 'scale it' has no {replicas}: say where the number goes"),
        (["--max", "2", "--window", "0"], "the window is 0.0: it must be more than 0"),
        (["--max", "2", "--dry-run", "--port", "0"], "--dry-run serves no number"),
    ],
)
async def test_wrong_options(words: list[str], said: str) -> None:
    done = await here("autoscale", "ORDERS", "billing", *words)
    assert done.returncode == 2
    assert said in done.stderr
