"""Fixtures of the tests that run on Apache Kafka."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from keylane.kafka import KafkaLink, open_kafka
from tests.integration.kafka.log_rig import Unique, delete
from tests.peers.kafka import Kafka


@pytest.fixture(scope="session")
def kafka() -> Iterator[Kafka]:
    """One broker for the whole run. A test that stops or kills a broker starts its own cluster.

    Everybody may do everything, but for what a test denies.
    """
    rules = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with Kafka.start(settings=rules) as running:
        yield running


@pytest.fixture
async def link(kafka: Kafka) -> AsyncIterator[KafkaLink]:
    async with open_kafka(kafka.bootstrap) as opened:
        yield opened


@pytest.fixture
async def name(link: KafkaLink, unique: Unique) -> AsyncIterator[str]:
    """The name of a topic that is gone after the test."""
    chosen = unique("claims")
    try:
        yield chosen
    finally:
        await delete(link, chosen)
