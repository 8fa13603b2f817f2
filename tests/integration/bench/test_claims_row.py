"""The row `claims` in a small version: all partitions claimed once, and taken over in time."""

from __future__ import annotations

import json

import pytest

from bench import claims


@pytest.mark.timeout(120)
def test_all_partitions_are_claimed_once_and_taken_over_in_time() -> None:
    """On a longer interval than the row's own: the machine of a test may be slow."""
    said: list[str] = []
    figures, text = claims.run(1, 0.5, said.append, on=["jetstream"], interval_s=6.0)
    assert figures["jetstream"]["two_owners"] == 0, text
    assert figures["jetstream"]["killed"] == 1
    assert figures["met"], text
    assert text.startswith("jetstream: 4 consumers, 32 partitions, interval 6 s: all claimed")
    assert len(said) == 1
    assert json.dumps(figures)
