"""Each example runs from a bare command line, its numbers add up, and its page shows its code.

That the page shows what it says is checked with all pages (tests/integration/docs).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEADLINE_S = 120.0
PAGES = {
    "regional_overflow": "overflow",
    "hot_standby": "pinned-client",
    "priority_tiers": "prioritized",
}


def numbers(pattern: str, line: str) -> list[float]:
    found = re.search(pattern, line)
    assert found is not None, f"{pattern!r} is not in {line!r}"
    return [float(one) for one in found.groups()]


def line_of(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.strip().startswith(start))


def check_overflow(lines: list[str]) -> None:
    assert "a quiet time, 40 jobs: us-east did 40, us-west did 0" in lines
    east, west = numbers(r"us-east did (\d+), us-west did (\d+)", line_of(lines, "a rush"))
    assert east + west == 400
    assert west > 0
    assert numbers(r"at least (\d+) were waiting", line_of(lines, "each time us-west"))[0] >= 50
    assert "quiet again, 40 jobs: us-east did 40, us-west did 0" in lines


def check_standby(lines: list[str]) -> None:
    assert "orders handled: 225, each one's first time in order: yes" in lines
    assert numbers(r"B went on ([\d.]+) s after", line_of(lines, "B went on"))[0] < 10
    assert re.match(r"who did what: A 1-\d+, B \d+-", line_of(lines, "who did what"))
    assert "  B: on_unpinned" in lines
    clean = next(line for line in lines if line.endswith("a clean stop waits for no timeout"))
    assert numbers(r"B went on ([\d.]+) s after", clean)[0] < 1, "less than the timeout of a pin"


def check_tiers(lines: list[str]) -> None:
    assert "both are there, 40 frames, one after the other: the rack did 40, the cloud did 0" in lines
    rack, cloud = numbers(
        r"the rack did (\d+), the cloud did (\d+)", line_of(lines, "both are there, 200 frames at once")
    )
    assert rack + cloud == 200
    assert cloud > 0
    assert "the rack has left, 1 frame: the rack did 0, the cloud did 1" in lines
    assert numbers(r"had it (-?\d+) ms later", line_of(lines, "the cloud had it"))[0] < 5000
    assert "the rack is back, 40 frames, one after the other: the rack did 40, the cloud did 0" in lines


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "check"),
    [("regional_overflow", check_overflow), ("hot_standby", check_standby), ("priority_tiers", check_tiers)],
)
def test_it_runs_and_its_numbers_add_up(name: str, check: Callable[[list[str]], None]) -> None:
    """One after the other: each tells of who was quicker, and another beside it would take part in that."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    check(ran.stdout.splitlines())


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_code_that_is_in_the_example(name: str) -> None:
    source = bare((ROOT / "examples" / f"{name}.py").read_text())
    shown = [block for block in blocks(PAGES[name], "python") if block.startswith(f"# from examples/{name}.py")]
    assert shown
    for block in shown:
        for piece in re.split(r"^\.\.\.$", block.split("\n", 1)[1], flags=re.MULTILINE):
            assert bare(piece).rstrip(",") in source, f"not in the example:\n{piece}"


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / "priority" / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def bare(text: str) -> str:
    """Code without what a formatter may change."""
    return re.sub(r"\s+", "", text).replace(",)", ")")
