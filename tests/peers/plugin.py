"""What tests and peers agree on, as a pytest plugin: markers stand for peers, and fast rooms run first."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.peers.go import find_go
from tests.peers.kafka import find_kafka
from tests.peers.presence import require
from tests.peers.spark import find_spark

FINDERS: dict[str, Callable[[], object]] = {"go": find_go, "kafka": find_kafka, "spark": find_spark}

_FIRST = ("core", "properties")
_LAST = ("integration",)


def pytest_configure() -> None:
    # Processes of tests can be interrupted, also where a shell that runs this in the background lets nobody be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # No example of a property has a deadline: a machine that stands still for a moment proves nothing.
    settings.register_profile("keylane", deadline=None)
    settings.load_profile("keylane")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, find in FINDERS.items():
        if item.get_closest_marker(name) is not None:
            require(find)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = config.rootpath / "tests"
    items.sort(key=lambda item: _rank(item.path, tests))


def _rank(file: Path, tests: Path) -> int:
    room = file.relative_to(tests).parts[0] if file.is_relative_to(tests) else ""
    if room in _FIRST:
        return _FIRST.index(room) - len(_FIRST)
    return 1 + _LAST.index(room) if room in _LAST else 0
