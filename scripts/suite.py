"""Runs the tests in passes and adds up their counts: `python scripts/suite.py quick|test|long...`, called by make.

`--failed "lint"` names something that failed before, so that it is shown and counts at the end.

Tests that measure time have a pass of their own, one after the other; all others share the machine. Every pass runs,
also after one that failed. The last line has the counts of all of them; the exit code is 0 only if every pass was good.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit code where nothing was selected
FEW_FILES = 20
"""So many files every worker may compile for itself."""


@dataclass(frozen=True)
class Pass:
    title: str
    arguments: list[str]
    parallel: bool = True
    workers_per_core: float = 2.5
    """Most tests wait more than they compute."""
    worker_gigabytes: int = 2
    """What a worker may need, with the servers, processes and JVMs that its tests start."""


@dataclass
class Outcome:
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: int = 0
    broken: list[str] = field(default_factory=list)
    """What else went wrong, like a pass that ended badly without a failed test to show for it."""

    @property
    def total(self) -> int:
        return self.passed + len(self.failed) + self.skipped


def alone() -> list[str]:
    """The files with tests that measure time: to collect all others would take longer than to run these."""
    return [
        str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.alone(" in file.read_text()
    ]


SUITES = {
    "quick": [
        Pass(
            "rules, properties and the simulation",
            ["tests/core", "tests/properties", "tests/simulation", "--hypothesis-profile=quick"],
            workers_per_core=1,
        )
    ],
    "test": [
        Pass("tests", ["-m", "not long and not alone", "--spark-sessions=1"]),
        Pass("tests that measure time", ["-m", "alone and not long", *alone()], parallel=False),
    ],
    "long": [
        Pass("long tests", ["-m", "long and not alone"], workers_per_core=1.5, worker_gigabytes=4),  # many run JVMs
        Pass("long tests that measure time", ["-m", "alone and long", *alone()], parallel=False),
    ],
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="suite.py")
    parser.add_argument("suites", nargs="+", choices=SUITES)
    parser.add_argument("--failed", action="append", default=[], help="what failed before the tests")
    given = parser.parse_args(arguments)
    started, outcome = time.monotonic(), Outcome(broken=given.failed)
    planned = [one for suite in given.suites for one in SUITES[suite]]
    if any(one.parallel for one in planned):
        compile_tests()
    for number, one in enumerate(planned, start=1):
        say(f"==== {number} of {len(planned)}: {one.title}")
        run(one, outcome)
    if outcome.total == 0:
        outcome.broken.append("no tests were found")
    for line in [*outcome.failed, *outcome.broken]:
        say(f"FAILED {line}")
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    say(f"took {minutes} min {seconds} s")
    say(f"{outcome.passed} passed, {len(outcome.failed)} failed, {outcome.skipped} skipped")
    return 1 if outcome.failed or outcome.broken else 0


def run(one: Pass, outcome: Outcome) -> None:
    divided = ["-n", str(workers(one)), "--dist", "loadfile", "--no-loadscope-reorder"]
    parallel = [*divided, "-o", "console_output_style=classic"]  # tests/suite.py says how far it is
    with tempfile.TemporaryDirectory(prefix="keylane-suite-") as directory:
        counts = Path(directory) / "counts.json"
        options = [f"--counts={counts}", *(parallel if one.parallel else ())]
        command = [sys.executable, "-m", "pytest", "-q", *options, *one.arguments]
        pytest = subprocess.Popen(command, cwd=ROOT, env=environment())
        try:
            code = pytest.wait()
        except KeyboardInterrupt:
            pytest.wait()  # Ctrl-C reaches it too: it ends its peers and shows what has failed so far
            raise
        told: dict[str, Any] = {"passed": 0, "failed": [], "skipped": 0}
        if counts.exists():
            told = json.loads(counts.read_text())
    outcome.passed += told["passed"]
    outcome.failed += told["failed"]
    outcome.skipped += told["skipped"]
    if code not in (0, NO_TESTS) and not told["failed"]:
        outcome.broken.append(f"{one.title}: pytest ended with exit code {code}")


def environment() -> dict[str, str]:
    """Ours, but bytecode is kept: every worker and hundreds of commands would else compile the same files anew."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def workers(one: Pass) -> int:
    """So many for each core, as far as the memory allows."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, int(min(one.workers_per_core * (os.cpu_count() or 1), gigabytes / one.worker_gigabytes)))


def compile_tests() -> None:
    """In a fresh checkout, lets pytest write the bytecode of the tests, with one process for each core.

    Without it every worker would do so for every file, all at the same time.
    """
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if not is_compiled(file)]
    if len(files) < FEW_FILES:
        return
    cores = os.cpu_count() or 1
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq"]
    started = [
        subprocess.Popen(
            [*command, *map(str, files[first::cores])], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
        )
        for first in range(cores)
    ]
    for one in started:
        one.wait()  # a file that cannot be imported is a failure of the pass that has it


def is_compiled(file: Path) -> bool:
    kept = (file.parent / "__pycache__").glob(f"{file.stem}.{sys.implementation.cache_tag}-pytest-*.pyc")
    return any(one.stat().st_mtime >= file.stat().st_mtime for one in kept)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
