"""Marshal consumers in processes of their own on a real Kafka: killed under load, and how soon they claim."""

from __future__ import annotations

import json

import pytest

from bench import claims
from chaos import marshal
from keylane.marshal.options import Mode
from tests.peers.kafka import Kafka

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]


@pytest.mark.parametrize("mode", ["at_least_once", "at_most_once"])
async def test_a_short_run_with_kills_is_clean(kafka: Kafka, mode: Mode) -> None:
    settings = marshal.Settings(
        on="kafka",
        seconds=12,
        seed=2,
        consumers=3,
        partitions=6,
        interval_s=3.0,  # a consumer that starts beside others may stand still for a while
        every_s=2.5,
        rate=200,
        mode=mode,
        batch=20,
        work_s=0.002,
    )
    outcome = await marshal.run(settings, lambda _: None, bootstrap=kafka.bootstrap)
    assert outcome.kills >= 2
    assert outcome.clean, marshal.as_text(outcome)
    assert outcome.start.claimed_twice == 0
    assert outcome.sent > 1000
    if mode == "at_most_once":
        assert outcome.found.repeated == 0
        assert outcome.found.most_lost_by_one <= settings.batch
    assert json.dumps(outcome.as_json())


def test_all_partitions_are_claimed_once_and_taken_over_in_time(kafka: Kafka) -> None:
    """A small version of the row `claims`, on a longer interval: the machine of a test may be slow."""
    figures, text = claims.run(1, 0.5, lambda _: None, on=["kafka"], interval_s=8.0, bootstrap=kafka.bootstrap)
    assert figures["kafka"]["two_owners"] == 0, text
    assert figures["met"], text
