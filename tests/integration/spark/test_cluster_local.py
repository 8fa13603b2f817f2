"""A program submitted to `local-cluster`, and what `keylane spark submit` passes through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from keylane.server import NatsServer
from tests.integration.spark.cluster_rig import app_in, fill, found, judge, submit
from tests.peers.spark_cluster import spark_home

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_batch_and_query_on_a_local_cluster(
    nats_server: NatsServer, unique: Callable[..., str], packed: Path, tmp_path: Path
) -> None:
    filled = fill(unique("LOCAL"), nats_server.url)
    home = _home_with_own_work_directory(tmp_path / "spark")
    done = submit(
        tmp_path,
        *("--master", "local-cluster[2,1,1024]", "--env", str(packed), str(app_in(tmp_path))),
        *(filled.name, filled.url, str(tmp_path), "-"),
        environ={"SPARK_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    judge(found(tmp_path), filled, [str(home / "work")])


def _home_with_own_work_directory(home: Path) -> Path:
    """The workers of a local cluster write below SPARK_HOME."""
    home.mkdir()
    for part in ("bin", "jars", "python"):
        (home / part).symlink_to(spark_home() / part)
    return home


def test_output_and_exit_code_are_the_programs(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import sys; print('said', sys.argv[1:]); sys.exit(7)\n")
    done = submit(tmp_path, "app.py", "--conf", "a b")
    assert done.returncode == 7, done.stderr
    assert "said ['--conf', 'a b']" in done.stdout
