"""The Python that Spark starts as its workers on this machine, spared the import of PySpark from a zip.

Spark puts its own `pyspark.zip` first on the PYTHONPATH of each worker. A zip holds no bytecode, so every worker would
compile PySpark again, which takes longer than the rest of its start. Where the package itself is installed, the workers
need no zip.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path


def local_python(directory: Path, environ: Mapping[str, str] = os.environ) -> str:
    """For PYSPARK_PYTHON of a local master: starts this Python with the PYTHONPATH of this process.

    It is a script below `directory`; where SPARK_HOME names another Spark, or scripts there may not run, this Python.
    """
    if environ.get("SPARK_HOME"):
        return sys.executable
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "python"
    path = environ.get("PYTHONPATH")
    change = "unset PYTHONPATH" if path is None else f"export PYTHONPATH={shlex.quote(path)}"
    script.write_text(f'#!/bin/sh\n{change}\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    return str(script) if os.access(script, os.X_OK) else sys.executable
