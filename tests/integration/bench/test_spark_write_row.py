"""A short run of the row `spark-write`, so that it never rots. Its figures mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bench.spark_write import ATOMIC, AWAITING, IDLE, INGEST, LANES, OUTSIDE
from tests.peers.java import LIGHT_JAVA

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]


def test_the_row_prints_one_json_object_with_every_contestant() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "spark-write", "--json", "--rounds", "1", "--scale", "0.002"],
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
        env=os.environ | LIGHT_JAVA,
    )
    assert ended.returncode == 0, ended.stderr
    row = json.loads(ended.stdout)
    assert (row["row"], row["count"]) == ("spark-write", 2000)
    assert set(row["contestants"]) == {INGEST, LANES, ATOMIC, AWAITING, IDLE, OUTSIDE}
    assert all(one["rate"] > 0 for one in row["contestants"].values())
    assert f"{INGEST} / {AWAITING}" in row["ratios"]
    assert f"{LANES} / {AWAITING}" in row["ratios"]
