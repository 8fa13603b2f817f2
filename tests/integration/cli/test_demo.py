"""`keylane demo` as a new user runs it, only shorter."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.chaos.test_chaos_short import MARK, left_behind


def play(*options: str, timeout_s: float, directory: Path | None = None) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "keylane.cli.main", "demo", "--seconds", "8", "--rate", "200", *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=directory,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"Verdict: sent 1,600, lost 0, duplicated \d+, out of order 0", ended.stdout)
    assert not ended.stderr
    return ended.stdout


def state_of(said: str, instance: str) -> str:
    """What the table says in the end."""
    rows = [[cell.strip() for cell in line.split("│")] for line in said.splitlines() if "│" in line]
    [state] = [row[2] for row in rows if row[1] == instance]
    return state


@pytest.mark.timeout(120)
def test_the_demo_ends_with_a_clean_verdict() -> None:
    said = play("--without-spark", timeout_s=100)
    for event in ("dave was added: 2 of 10", "carol was dropped: 3 of 10"):
        assert event in said
    told = re.search(
        r"(bob #[12]) was killed \(SIGKILL\): (bob #[12]) handled its first order (\d+\.\d\d) s later", said
    )
    assert told is not None, said
    killed, standby, later_s = told.groups()
    assert killed != standby
    assert 0.2 < float(later_s) < 20, "measured: the server waits 1.5 s from the last sign of life"
    assert state_of(said, killed) == "killed"
    assert state_of(said, standby) == "active"
    assert state_of(said, "carol") == "dropped"
    assert "Spark" not in said


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_demo_audits_itself_and_plans(tmp_path: Path) -> None:
    said = play(timeout_s=550, directory=tmp_path)
    assert re.search(r"lost +0\n", said)
    assert re.search(r"out of order +0\n", said)
    assert "two owners at once     0" in said
    without = re.search(r"without a record +([1-9]\d*)\n", said)
    assert ("without a record are not lost" in said) is (without is not None)
    assert re.search(r"imbalance now +1\.\d\d", said)
    assert re.search(r"customer-7 .* 17\.\d%", said)
    assert "orders by partition" in said
    assert re.search(r"│ customer-7 │ \d+ +│", said)
    assert (tmp_path / "keylane-demo.png").read_bytes().startswith(b"\x89PNG")
    assert "keylane stream create" in said


@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_demo_and_its_processes(unique: Callable[..., str]) -> None:
    mark = unique("demo")
    demo = subprocess.Popen(
        [sys.executable, "-u", "-m", "keylane.cli.main", "demo", "--seconds", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {MARK: mark},
    )
    assert demo.stdout is not None
    while "elastic group" not in demo.stdout.readline():
        assert demo.poll() is None
    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: its members are just starting
    _, complaints = demo.communicate(timeout=60)
    assert (demo.returncode, complaints) == (130, "")
    assert left_behind(mark) == []


def test_impossible_options_are_refused() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "keylane.cli.main", "demo", "--seconds", "1"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert "--seconds" in ended.stderr
