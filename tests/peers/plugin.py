"""What tests and peers agree on, as a pytest plugin: markers stand for peers."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from hypothesis import settings

from tests.peers.go import find_go
from tests.peers.kafka import find_kafka
from tests.peers.presence import require
from tests.peers.spark import find_spark

FINDERS: dict[str, Callable[[], object]] = {"go": find_go, "kafka": find_kafka, "spark": find_spark}


def pytest_configure() -> None:
    # Processes of tests can be interrupted, also where a shell that runs this in the background lets nobody be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # No example of a property has a deadline: a machine that stands still for a moment proves nothing.
    settings.register_profile("keylane", deadline=None)
    settings.register_profile("quick", deadline=None, max_examples=30)  # --hypothesis-profile, by `make test-quick`
    settings.load_profile("keylane")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, find in FINDERS.items():
        if item.get_closest_marker(name) is not None:
            require(find)
