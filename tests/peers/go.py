"""The Go programs: `pcgroups-peer` (members written with the reference library), `bench-peer`, and `helm-render`.

Finds a Go new enough for our modules and builds each program once, keyed by its sources and the compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.peers.presence import PeerMissing
from tests.peers.store import REPOSITORY, Say, content_key, kept, run_tool, silent

_SOURCES = {
    "pcgroups-peer": REPOSITORY / "tests" / "integration" / "go",
    "bench-peer": REPOSITORY / "bench" / "peers" / "go",
    "helm-render": REPOSITORY / "tests" / "integration" / "deploy" / "helm",
}
PROGRAMS = tuple(_SOURCES)
_BUILD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Go:
    executable: str
    version: str


@cache
def find_go() -> Go:
    """The Go on PATH; PeerMissing where there is none or it is older than our modules ask for."""
    oldest = _oldest()
    wanted = ".".join(map(str, oldest))
    executable = shutil.which("go")
    if executable is None:
        raise PeerMissing(f"Go is not on PATH: install Go {wanted} or newer to run these tests")
    version = _version(executable)
    if _numbers(version) < oldest:
        raise PeerMissing(f"{executable} is {version}: install Go {wanted} or newer to run these tests")
    return Go(executable, version)


def program(name: str, say: Say = silent) -> Path:
    """The built program.

    >>> subprocess.run([program("pcgroups-peer"), "version"], check=True)  # doctest: +SKIP
    """
    go = find_go()
    source = _SOURCES[name]
    files = [*source.glob("*.go"), source / "go.mod", source / "go.sum"]

    def build(directory: Path) -> None:
        say(f"go: building {name} with {go.version}")
        run_tool(
            [go.executable, "build", "-trimpath", "-mod=readonly", "-o", str(directory / name), "."],
            cwd=source,
            environ=os.environ | {"GOTOOLCHAIN": "local", "GOWORK": "off", "CGO_ENABLED": "0"},
            timeout_s=_BUILD_TIMEOUT_S,
            on_line=lambda line: say(f"  {line}"),
        )

    return kept(f"go/{name}", content_key(files, go.version), build) / name


def _oldest() -> tuple[int, ...]:
    lines = "\n".join((source / "go.mod").read_text() for source in _SOURCES.values())
    return max(_numbers(text) for text in re.findall(r"^go ([\d.]+)$", lines, re.MULTILINE))


def _version(executable: str) -> str:
    answer = subprocess.run(
        [executable, "env", "GOVERSION"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env=os.environ | {"GOTOOLCHAIN": "local"},
        cwd="/",
    )
    return answer.stdout.strip()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
