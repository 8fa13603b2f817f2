"""A program submitted to a standalone cluster whose workers have no keylane: everything comes from the archive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import nkeys  # type: ignore[import-untyped]  # it has no types
import pytest

from keylane.server import NatsServer
from tests.integration.spark.cluster_rig import Filled, app_in, fill, found, judge, submit
from tests.peers.spark_cluster import SparkCluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SEED: bytes = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster.start(workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def seed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file: Path = tmp_path_factory.mktemp("login") / "orders.nk"
    file.write_bytes(SEED)
    return file


@pytest.fixture(scope="module")
def guarded() -> Iterator[NatsServer]:
    """A server that lets in only who has the seed."""
    public: bytes = nkeys.from_seed(bytearray(SEED)).public_key
    users = f"authorization {{ users: [ {{ nkey: {public.decode()} }} ] }}"
    with NatsServer.start(extra_config=users) as server:
        yield server


@pytest.fixture(scope="module")
def filled(guarded: NatsServer, seed_file: Path) -> Filled:
    return fill("CLUSTERED", url=guarded.url, nkey_seed_file=seed_file)


def test_batch_and_query_on_a_cluster(
    cluster: SparkCluster, filled: Filled, seed_file: Path, packed: Path, tmp_path: Path
) -> None:
    done = submit(
        tmp_path,
        *("--master", cluster.url, "--env", str(packed), "--files", str(seed_file), str(app_in(tmp_path))),
        *(filled.name, filled.url, str(tmp_path), seed_file.name),
    )
    assert done.returncode == 0, f"{done.stderr[-5000:]}\n{cluster.logs}"
    seen = found(tmp_path)
    judge(seen, filled, [str(cluster.directory)])
    assert {task["directory"].split("/work-")[1][0] for task in seen["tasks"]} == {"1", "2"}, "one worker did all"
    assert not list(tmp_path.glob(".keylane-env-*")), "the stand-in was left behind"
