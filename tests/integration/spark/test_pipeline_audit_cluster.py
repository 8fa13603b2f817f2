"""The audit on a standalone cluster says what it says here: the same verdict, and every finding row for row."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from keylane import Connection
from keylane.cli.pipeline import program
from keylane.server import NatsServer
from keylane.spark.address import Address
from keylane.spark.pipelines import audit
from tests.integration.spark import journal_rig as rig
from tests.integration.spark.cluster_rig import submit
from tests.integration.spark.planted import faulty, findings_in, told
from tests.peers.spark_cluster import SparkCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster.start(workers=1, cores=2) as running:
        yield running


@pytest.fixture
async def stream(connection: Connection, unique: Callable[..., str]) -> AsyncIterator[str]:
    """Where the faults are planted."""
    async with rig.named(connection, unique("orders")) as name:
        await rig.stage(connection, name, faulty()[0])
        yield name


async def test_a_cluster_finds_what_is_found_here(  # noqa: PLR0917 - each is a fixture
    spark: SparkSession, nats_server: NatsServer, cluster: SparkCluster, packed: Path, stream: str, tmp_path: Path
) -> None:
    settings = audit.Settings(
        stream=stream, group=rig.GROUP, address=Address(url=nats_server.url), work=str(tmp_path / "here"),
        tolerance_s=0.1, settle_s=0.0, complete=True,
    )  # fmt: skip
    here = await asyncio.to_thread(audit.run, spark, settings)
    assert program.__file__ is not None
    done = await asyncio.to_thread(
        submit,
        tmp_path,
        *("--master", cluster.url, "--env", str(packed), program.__file__),
        *("run", "audit", "--stream", stream, "--group", rig.GROUP, "--server", nats_server.url),
        *("--work", str(tmp_path / "there"), "--tolerance", "0.1", "--settle", "0", "--complete", "--json", "--quiet"),
    )
    assert done.returncode == here.exit_code == 3, f"{done.stderr[-5000:]}\n{cluster.logs}"
    assert told(json.loads(done.stdout)) == told(here.as_json())
    planted = faulty()[1]
    assert {kind: here.violations[kind] for kind in planted} == {kind: len(found) for kind, found in planted.items()}
    assert findings_in(tmp_path / "there") == findings_in(tmp_path / "here") != []
    executors = list(cluster.directory.glob("work-1/app-*/*/stderr"))
    assert executors, "nothing ran on the cluster's worker"
