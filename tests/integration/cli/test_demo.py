"""`keylane demo` as a new user runs it, only shorter."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.timeout(120)
def test_the_demo_ends_with_a_clean_verdict() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "keylane.cli.main", "demo", "--seconds", "8", "--rate", "200"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"Verdict: sent 1,600, lost 0, duplicated \d+, out of order 0", ended.stdout)
    for event in ("was killed (SIGKILL)", "dave was added: 2 of 10", "carol was dropped"):
        assert event in ended.stdout
    assert not ended.stderr


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
