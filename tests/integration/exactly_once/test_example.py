"""The example runs from a bare command line, its numbers add up, and its page shows its code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli.test_examples import bare

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "exactly_once.py"
PAGE = (ROOT / "docs" / "exactly-once.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(120)
def test_it_runs_and_its_numbers_add_up() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    lines = ran.stdout.splitlines()
    assert lines[0] == "200 payments into 10 accounts, 19900 in all"
    assert lines[-1] == "in the table: 200 payments into 10 accounts, 19900 in all"
    assert lines[-2].endswith("the fatal one too"), "the example shows nothing unless the payment came again"


def test_the_page_shows_code_that_is_in_the_example() -> None:
    source = bare(EXAMPLE.read_text())
    [shown] = [block for block in blocks("python") if block.startswith("# from examples/exactly_once.py")]
    for piece in re.split(r"^\.\.\.$", shown.split("\n", 1)[1], flags=re.MULTILINE):
        assert bare(piece).rstrip(",") in source, f"not in the example:\n{piece}"
