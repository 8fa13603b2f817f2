"""The row `exporter` in a small version: both kinds are read, in all their partitions. Figures do not count."""

from __future__ import annotations

import json

import pytest

from bench import exporter


@pytest.mark.long("two servers, a fleet whose partitions are taken over, and 40 scrapes")
@pytest.mark.timeout(180)
def test_a_scrape_shows_all_partitions() -> None:
    said: list[str] = []
    figures, text = exporter.run(1, 1.0, said.append, partitions=20, members=2, idle_s=1.0)
    for kind in ("elastic", "fleet"):
        assert figures[kind]["lag"] == 80
        assert figures[kind]["samples"] > 3 * 20
        assert figures[kind]["scrape_s"] > 0
    assert text.startswith("20 partitions, 2 members, messages wait in all: elastic: a scrape takes ")
    assert len(said) == 2
    assert json.dumps(figures)
