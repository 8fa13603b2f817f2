"""A short run of the row `strict`, and proof that its contestants see what is out of order. Figures do not count."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from bench import group_ground
from bench.group_ground import Load
from keylane.server import NatsServer
from tests.peers.go import find_go
from tests.peers.presence import require

pytestmark = pytest.mark.timeout(300)


@pytest.mark.go
def test_the_strict_row_prints_one_json_object_and_keylane_keeps_the_order() -> None:
    require(find_go)
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "strict", "--json", "--rounds", "1", "--scale", "0.005"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    row = json.loads(ended.stdout)
    assert row["row"] == "strict"
    settings = {one["setting"]: one for one in row["settings"]}
    go = {"Go pcgroups, 1 in flight", "Go pcgroups, 1000 in flight"}
    elastic = {"keylane", "keylane, three processes"} | go
    feeds = {"keylane feed, unordered, same filters", "keylane feed, unordered, no filter"}
    assert {name: set(one["contestants"]) for name, one in settings.items()} == {
        "static": {"keylane"} | feeds | go,
        "elastic, memory": elastic,
        "elastic, file": elastic,
        "5 ms": {"keylane", "Go pcgroups, 1 in flight"},
        "keys": {"keylane, 10 keys", "keylane, 1,000 keys", "keylane, 100,000 keys"},
    }
    for setting in settings.values():
        assert setting["ratios"].keys() == setting["aims"].keys()
        for name, figures in setting["contestants"].items():
            assert figures["rate"] > 0
            assert figures["out_of_order"] == (None if name in feeds else 0), name
    assert settings["static"]["aims"] == {
        "keylane / Go pcgroups, 1 in flight": 15.0,
        "keylane / keylane feed, unordered, same filters": 0.9,
    }


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("kind", ["static", "elastic"])
def test_a_group_without_order_is_seen_to_have_none(kind: group_ground.Kind, processes: bool) -> None:
    with NatsServer.start() as server:
        load = Load(kind, "memory", keys=8, count=400, members=1 if kind == "static" else 2)
        asyncio.run(group_ground.fill(server.url, [load]))
        for order, expected in (("key", False), ("none", True)):
            result = _handle(server, load, "--order", order, *(["--processes"] if processes else []))
            assert (result["out_of_order"] > 0) is expected, (order, result)


@pytest.mark.parametrize("members", [1, 3])
def test_every_message_is_counted_once(members: int) -> None:
    with NatsServer.start() as server:
        load = Load("elastic", "memory", keys=37, count=1000, members=members)
        asyncio.run(group_ground.fill(server.url, [load]))
        result = _handle(server, load, "--processes")
        assert result["count"] == load.count
        assert sum(load.messages_of_partitions().values()) == load.count
        assert result["seconds"] == pytest.approx(result["ended"] - result["started"])
        assert result["cpu_seconds"] > 0


def _handle(server: NatsServer, load: Load, *options: str) -> dict[str, Any]:
    """One run of keylane's contestant in a new group, with handlers that wait a little."""
    place = asyncio.run(group_ground.group(server.url, load, dialect="present"))
    members = ",".join(f"{name}={count}" for name, count in place.shares.items())
    ended = subprocess.run(
        [
            sys.executable, "-m", "bench.contestants.keylane_group", "--url", place.url, "--stream", place.stream,
            "--group", place.group, "--members", members, "--sleep", "0.001", *options,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    asyncio.run(group_ground.clear(place))
    result = json.loads(ended.stdout)
    assert isinstance(result, dict)
    return result
