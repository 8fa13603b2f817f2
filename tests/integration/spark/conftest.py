"""Fixtures of the tests that run on Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.peers.java import LIGHT_FLAGS
from tests.peers.spark import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for the whole run: a process can hold only one JVM."""
    directory: Path = tmp_path_factory.mktemp("spark")
    java = f'{LIGHT_FLAGS} "-Dderby.system.home={directory / "derby"}"'
    with spark_session(directory, settings={"spark.driver.extraJavaOptions": java}) as session:
        yield session


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `keylane spark pack` writes: takes seconds to make."""
    from keylane.spark.cluster.packing import pack  # noqa: PLC0415 - few tests need it

    archive: Path = tmp_path_factory.mktemp("packed") / "env.tar.gz"
    pack(archive)
    return archive
