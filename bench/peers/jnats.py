"""The Java contestant: the Java client fetched by Maven, and our program on it compiled once into `.peers/jnats`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.peers.java import java
from tests.peers.presence import PeerMissing
from tests.peers.store import Say, content_key, kept, run_tool, silent

_SOURCE = Path(__file__).resolve().parent / "java"
_PROGRAM = "ConnectorReader"
_TIMEOUT_S = 600.0


def connector_reader(say: Say = silent) -> Sequence[str]:
    """The command without its arguments; `PeerMissing` where Maven or a Java compiler is not there."""
    maven, compiler = shutil.which("mvn"), shutil.which("javac")
    if maven is None or compiler is None:
        raise PeerMissing("Maven (`mvn`) and `javac` are needed on PATH for the Java contestant")
    machine = java()
    pom, source = _SOURCE / "pom.xml", _SOURCE / f"{_PROGRAM}.java"

    def build(directory: Path) -> None:
        say("jnats: fetching the Java client with Maven")
        environ = os.environ | {"JAVA_HOME": str(machine.home)}
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={directory}", "-DincludeScope=runtime"]
        run_tool(
            [maven, "-B", "-q", "-f", str(pom), *goal],
            cwd=_SOURCE,
            environ=environ,
            timeout_s=_TIMEOUT_S,
            on_line=silent,
        )
        command = [compiler, "-cp", f"{directory}/*", "-d", str(directory), str(source)]
        run_tool(command, cwd=_SOURCE, environ=environ, timeout_s=_TIMEOUT_S, on_line=silent)

    directory = kept("jnats", content_key([pom, source]), build)
    return [str(machine.executable), "-cp", f"{directory}{os.pathsep}{directory}/*", _PROGRAM]
