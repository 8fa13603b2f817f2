"""Fixtures of the tests that run on Spark."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.peers.spark import SharedSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_FAILURE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def shared_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSession]:
    """One session for the whole run: a process can hold only one JVM."""
    directory: Path = tmp_path_factory.mktemp("spark")
    with SharedSession(directory) as shared:
        yield shared


@pytest.fixture
def spark(shared_spark: SharedSession, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """The shared session. What a test that failed left broken, the next one does not get."""
    yield shared_spark.session()
    failure = request.node.stash.get(_FAILURE, None)
    if failure is not None:
        shared_spark.replace_if_broken(timed_out="from pytest-timeout" in failure)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILURE] = report.longreprtext
    return report


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `keylane spark pack` writes: takes seconds to make."""
    from keylane.spark.cluster.packing import pack  # noqa: PLC0415 - few tests need it

    archive: Path = tmp_path_factory.mktemp("packed") / "env.tar.gz"
    pack(archive)
    return archive
