"""`make lock`: writes constraints.txt anew, the newest version of everything for every Python and machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Every version an install may use, for all Pythons and machines. Made by `make lock`.\n"


def main() -> None:
    compiled = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml"),
            *("--universal", "--python-version", "3.11"),
            *("--all-extras", "--group", "dev", "--group", "build"),
            *("--upgrade", "--no-header", "--no-annotate", "--quiet"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if compiled.returncode != 0:
        sys.exit("constraints.txt is unchanged: the versions could not be resolved.")
    foreign = [line for line in compiled.stdout.splitlines() if "://" in line or line.startswith("-")]
    if foreign:
        sys.exit(f"constraints.txt is unchanged: it may name versions only, not {foreign[0]!r}.")
    (ROOT / "constraints.txt").write_text(HEADER + compiled.stdout)
    print(f"constraints.txt: {len(compiled.stdout.splitlines())} pins")


if __name__ == "__main__":
    main()
