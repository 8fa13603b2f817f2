"""Fixtures of the tests that run on Apache Kafka."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
