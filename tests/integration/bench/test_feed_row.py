"""A short run of the bench, so that it never rots. Its figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.peers.go import find_go
from tests.peers.presence import require


@pytest.mark.go
@pytest.mark.timeout(240)
def test_the_feed_row_prints_one_json_object_with_every_contestant() -> None:
    require(find_go)
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "feed", "--json", "--rounds", "1", "--scale", "0.01"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    row = json.loads(ended.stdout)
    assert row["row"] == "feed"
    assert {(one["storage"], one["max_ack_pending"]) for one in row["settings"]} == {
        ("memory", 1000),
        ("file", 1000),
        ("memory", 1),
    }
    for setting in row["settings"]:
        assert {"keylane feed", "Go Consume", "nats-py fetch"} <= setting["contestants"].keys()
        assert all(figures["rate"] > 0 for figures in setting["contestants"].values())
        assert setting["ratios"]["keylane feed / Go Consume"] > 0


@pytest.mark.parametrize("arguments", [["nothing"], ["feed", "--rounds", "0"], ["feed", "--scale", "-1"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bench", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 2
    assert "error:" in ended.stderr
