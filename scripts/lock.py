"""`make lock` writes constraints.txt anew; `make lint` checks with --check that it fits pyproject.toml.

The file names versions only, never where to fetch them: that is for each user's own settings to say.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
HEADER = "# Every version an install may use, for all Pythons and machines. Made by `make lock`.\n"


def main(arguments: list[str]) -> None:
    if arguments == ["--check"]:
        check()
    elif not arguments:
        lock()
    else:
        sys.exit("usage: lock.py [--check]")


def lock() -> None:
    """The newest version of everything, for every Python from 3.11 and every machine."""
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
    PINS.write_text(HEADER + compiled.stdout)
    print(f"constraints.txt: {len(compiled.stdout.splitlines())} pins")


def check() -> None:
    lines = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
    pins: dict[str, list[str]] = {}
    for pin in map(Requirement, lines):
        pins.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier).removeprefix("=="))
    for wanted in requirements():
        versions = pins.get(canonicalize_name(wanted.name), [])
        if not versions or not all(wanted.specifier.contains(version) for version in versions):
            found = ", ".join(versions) or "nothing"
            sys.exit(f"constraints.txt pins {found} where pyproject.toml wants {wanted}: run `make lock`.")


def requirements() -> Iterator[Requirement]:
    """Everything that pyproject.toml asks for by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = [
        project["build-system"]["requires"],
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        *project["dependency-groups"].values(),
    ]
    for texts in listed:
        yield from map(Requirement, texts)


if __name__ == "__main__":
    main(sys.argv[1:])
