"""Delta Lake's jars: fetched once by Maven into `.peers/delta`, so that no test needs a network."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

from tests.peers.java import java
from tests.peers.presence import PeerMissing
from tests.peers.store import REPOSITORY, Say, content_key, kept, run_tool, silent

_SOURCE = REPOSITORY / "tests" / "integration" / "spark"
_FETCH_TIMEOUT_S = 600.0


@cache
def find_delta() -> str:
    """The Maven that can fetch Delta Lake; PeerMissing where Maven or Java is not there."""
    maven = shutil.which("mvn")
    if maven is None:
        raise PeerMissing("Maven (`mvn`) is not on PATH: install Maven to run the tests of Delta tables")
    java()
    return maven


def jars(say: Say = silent) -> list[Path]:
    """Delta Lake's own jars. Spark brings everything else that they need."""
    maven = find_delta()
    pom = _SOURCE / "pom.xml"

    def fetch(directory: Path) -> None:
        say("delta: fetching Delta Lake with Maven")
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={directory}", "-DincludeGroupIds=io.delta"]
        run_tool(
            [maven, "-B", "-f", str(pom), *goal],
            cwd=_SOURCE,
            environ=os.environ | {"JAVA_HOME": str(java().home)},
            timeout_s=_FETCH_TIMEOUT_S,
            on_line=silent,
        )

    return sorted(kept("delta", content_key([pom]), fetch).glob("*.jar"))
