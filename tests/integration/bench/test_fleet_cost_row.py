"""The row `fleet-cost` in a small version: every partition is owned once. Figures do not count."""

from __future__ import annotations

import json

import pytest

from bench import fleet_cost


@pytest.mark.long("partitions are taken over twice, with all their windows")
@pytest.mark.timeout(180)
def test_every_partition_has_one_owner_at_every_look() -> None:
    said: list[str] = []
    figures, text = fleet_cost.run(1, 1.0, said.append, partitions=200, workers=5, idle_s=3.0, settled_s=1.0)
    assert (figures["two_owners"], figures["without_owner"]) == (0, 0), text
    assert 0 < figures["moved"] < 100
    assert figures["looks"] > 10
    assert text.startswith("200 partitions, 5 workers, one server: all owned after ")
    assert len(said) == 3
    assert json.dumps(figures)
