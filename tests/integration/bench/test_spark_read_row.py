"""A short run of the bench, so that it never rots. Its figures mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.peers.java import LIGHT_JAVA

pytestmark = [pytest.mark.spark, pytest.mark.timeout(420)]


def bench(*arguments: str) -> dict[str, object]:
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "spark-read", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | LIGHT_JAVA,
    )
    assert ended.returncode == 0, ended.stderr
    row: dict[str, object] = json.loads(ended.stdout)
    return row


def test_the_row_has_every_contestant() -> None:
    row = bench("--rounds", "1", "--scale", "0.01")
    assert row["row"] == "spark-read"
    contestants = row["contestants"]
    assert isinstance(contestants, dict)
    assert {"keylane in Spark", "plain reader, 2 processes", "nats-py ordered consumer"} <= contestants.keys()
    assert all(figures["rate"] > 0 for figures in contestants.values())
    assert row["batch_ratio"]
    assert row["idle_calls_per_second"]


def test_growing_streams() -> None:
    row = bench("--rows", "0.02", "0.01")
    linear = row["linear"]
    assert isinstance(linear, list)
    assert [one["rows"] for one in linear] == [10_000, 20_000]
    assert all(one["rate"] > 0 and one["worker_megabytes"] > 0 for one in linear)


def test_a_connector_that_is_not_there() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "spark-read", "--connector", "/nowhere/connector.jar"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "/nowhere/connector.jar is not a file" in ended.stderr
