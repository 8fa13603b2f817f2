"""The Python of Spark's local workers: this one, with this process's PYTHONPATH and not Spark's zip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keylane.spark.cluster.local_python import local_python

ASK = "import json, os, sys; print(json.dumps([sys.executable, os.environ.get('PYTHONPATH'), sys.argv[1:]]))"


@pytest.mark.parametrize("path", ["/one:/two words", "/it's", None])
def test_it_has_the_path_of_this_process_whatever_spark_sets(tmp_path: Path, path: str | None) -> None:
    environ = {} if path is None else {"PYTHONPATH": path}
    python = local_python(tmp_path / "with blanks", environ)
    given = {**os.environ, "PYTHONPATH": "/spark/python/lib/pyspark.zip"}
    done = subprocess.run([python, "-c", ASK, "a b", "c"], env=given, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [sys.executable, path, ["a b", "c"]]


def test_another_spark_brings_its_own_packages(tmp_path: Path) -> None:
    assert local_python(tmp_path, {"SPARK_HOME": "/opt/spark"}) == sys.executable


def test_where_scripts_may_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert local_python(tmp_path, {}) == sys.executable
