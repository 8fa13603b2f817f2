"""`python -m bench start`: how long `import keylane` and `keylane --help` take, against `python -c pass`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PROGRAMS = {
    "python -c pass": ["-c", "pass"],
    "import keylane": ["-c", "import keylane"],
    "keylane --help": ["-c", "from keylane.cli.main import main; main()", "--help"],
    "keylane stream ls --help": ["-c", "from keylane.cli.main import main; main()", "stream", "ls", "--help"],
}
AIMS = {"import keylane": 1.5, "keylane --help": 8.0}
RUNS_PER_ROUND = 10


def run(rounds: int, scale: float, say: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """The programs take turns, so that all of them meet the same machine. The quickest run of each counts."""
    runs = max(2, round(rounds * RUNS_PER_ROUND * scale))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in PROGRAMS}
    for number in range(runs + 1):
        for name, arguments in PROGRAMS.items():
            measured = _run(arguments)
            if number:  # the first turn fills the caches of the disk
                seconds[name].append(measured)
        say(f"turn {number} of {runs}")
    base_wall_s, base_cpu_s = _quickest(seconds["python -c pass"])
    rows = []
    for name, found in seconds.items():
        wall_s, cpu_s = _quickest(found)
        rows.append(
            {
                "program": name,
                "wall_ms": round(wall_s * 1000, 1),
                "median_ms": round(statistics.median(wall for wall, _ in found) * 1000, 1),
                "cpu_ms": round(cpu_s * 1000, 1),
                "ratio": round(wall_s / base_wall_s, 2),
                "cpu_ratio": round(cpu_s / base_cpu_s, 2),
                "aim": AIMS.get(name),
                "met": name not in AIMS or wall_s / base_wall_s <= AIMS[name],
            }
        )
    return {"row": "start", "runs": runs, "programs": rows}, _text(rows)


def _quickest(found: list[tuple[float, float]]) -> tuple[float, float]:
    return min(wall_s for wall_s, _ in found), min(cpu_s for _, cpu_s in found)


def _run(arguments: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return time.perf_counter() - begun, used.ru_utime + used.ru_stime


def _text(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'program':26} {'wall ms':>8} {'median':>8} {'cpu ms':>8} {'ratio':>6} {'cpu':>6}  aim"]
    for row in rows:
        aim = f"{row['aim']:g}: {'met' if row['met'] else 'missed'}" if row["aim"] else "-"
        lines.append(
            f"{row['program']:26} {row['wall_ms']:8} {row['median_ms']:8} {row['cpu_ms']:8} "
            f"{row['ratio']:6} {row['cpu_ratio']:6}  {aim}"
        )
    return "\n".join(lines)
