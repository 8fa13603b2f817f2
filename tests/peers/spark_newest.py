"""The newest PySpark: kept in `.peers/spark-newest`, before the pinned one on the path of a smoke test's processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.peers.store import REPOSITORY, Say, content_key, kept, run_tool, silent

NEWEST = "4.3.0"
"""constraints.txt pins the Spark that Delta Lake fits; this one is tried beside it."""
_INSTALL_TIMEOUT_S = 900.0


def packages(say: Say = silent) -> Path:
    """A directory of packages: PySpark and what it needs. Everything else comes from this environment."""

    def install(directory: Path) -> None:
        say(f"spark: installing PySpark {NEWEST} besides the pinned one, for its smoke tests")
        run_tool(
            [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(directory), f"pyspark=={NEWEST}"],
            cwd=REPOSITORY,
            environ=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"},
            timeout_s=_INSTALL_TIMEOUT_S,
            on_line=lambda line: say(f"  {line}"),
        )

    return kept("spark-newest", content_key([], NEWEST, sys.version), install)
