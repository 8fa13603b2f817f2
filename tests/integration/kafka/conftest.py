"""Fixtures of the tests that run on Apache Kafka."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.peers.kafka import Kafka


@pytest.fixture(scope="session")
def kafka() -> Iterator[Kafka]:
    """One broker for the whole run. A test that stops or kills a broker starts its own cluster."""
    with Kafka.start() as running:
        yield running
