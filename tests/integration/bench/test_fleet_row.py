"""A short run of the row `fleet`, and proof that its contestant sees what is out of order. Figures do not count."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bench import fleet, fleet_load, group_ground
from bench.contestants.keylane_fleet import Seen
from bench.group_ground import Load
from bench.strict import GO_1, GO_1000, Entrant
from keylane.server import NatsServer
from tests.peers.go import find_go
from tests.peers.presence import require


@pytest.mark.go
@pytest.mark.long("every contestant starts three processes, on file and on memory")
@pytest.mark.timeout(300)
def test_the_fleet_row_prints_one_json_object_and_every_key_is_in_order() -> None:
    require(find_go)
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "fleet", "--json", "--rounds", "1", "--scale", "0.005"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    row = json.loads(ended.stdout)
    assert row["row"] == "fleet"
    for setting in row["settings"]:
        reached = setting["contestants"]
        assert reached.keys() >= {fleet.MESSAGE, fleet.GO_CONSUME, fleet.ELASTIC, GO_1, GO_1000}
        assert setting["ratios"].keys() == setting["aims"].keys()
        assert f"{fleet.MESSAGE} / {GO_1000}" in setting["ratios"]
        for name, figures in reached.items():
            assert figures["rate"] > 0
            assert figures["out_of_order"] == (None if name == fleet.GO_CONSUME else 0), name


def test_the_contestant_handles_everything_once() -> None:
    with NatsServer.start() as server:
        load = Load("fleet", "memory", keys=37, count=1000, members=2, partitions=5)
        asyncio.run(group_ground.fill(server.url, [load]))
        place = asyncio.run(group_ground.fleet(server.url, load))
        ended = subprocess.run(
            [*Entrant(fleet.MESSAGE, "fleet", load, max_ack_pending=100).command(place, None)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        result = json.loads(ended.stdout)
        assert (result["count"], result["out_of_order"]) == (load.count, 0)
        assert 0 < result["seconds"] < 60
        assert result["cpu_seconds"] > 0


async def test_a_message_that_is_out_of_order_is_counted() -> None:
    seen = Seen()
    seen.may_begin.set()
    handle: Any = seen.handler()
    for key, sequence in (("a", 1), ("b", 2), ("a", 4), ("a", 3), ("b", 5), ("b", 5)):
        await handle(SimpleNamespace(key=key, delivery_sequence=sequence))
    assert (seen.count, seen.out_of_order) == (6, 2)


@pytest.mark.long("25 workers join, and handle two loads")
@pytest.mark.timeout(120)
def test_the_load_tells_what_every_rate_costs() -> None:
    told, text = fleet_load.run(0.03, lambda _: None, rates=(500,), storage="memory")
    steps = told["steps"]
    assert isinstance(steps, list)
    [step] = steps
    assert (step["lost"], step["out_of_order"]) == (0, 0)
    assert step["handled_rate"] > 0
    assert step["p50_ms"] <= step["p99_ms"]
    assert "25 workers, 60 subjects, memory storage" in text
