"""The Spark session of a pipeline's command: one of its own, or the one that `spark-submit` has made.

Owns the settings of its own session: quiet, on this machine's Python and Java, on loopback where the master is local.
Secrets are for the environment, which driver and local workers share; they never become settings of Spark.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from keylane.errors import InvalidInput, KeylaneError
from keylane.extras import extra_missing
from keylane.spark.address import check_setting, without_value
from keylane.spark.cluster.java import find_java, java_cache
from keylane.spark.cluster.local_python import local_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[*]"
_SETTING = re.compile(r"(spark\.[^=\s]+)=(.*)")
_QUIET = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
_QUIET_LOG = """\
rootLogger.level = error
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %p %c{1}: %m%n
logger.queries.name = org.apache.spark.sql.execution.streaming
logger.queries.level = off
logger.tasks.name = org.apache.spark.scheduler
logger.tasks.level = off
logger.executors.name = org.apache.spark.executor
logger.executors.level = off
logger.writers.name = org.apache.spark.sql.execution.datasources
logger.writers.level = off
logger.workers.name = org.apache.spark.api.python
logger.workers.level = off
"""
"""Spark logs an error of a task or a query several times over; the command says it once."""


def is_installed() -> bool:
    return importlib.util.find_spec("pyspark") is not None


def check_installed() -> None:
    if not is_installed():
        raise extra_missing("pipelines run on Spark, and pyspark is not installed", "spark")


def is_submitted() -> bool:
    """Whether `spark-submit` runs this process: then master and settings are decided."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def is_local(master: str) -> bool:
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def check_settings(texts: tuple[str, ...]) -> dict[str, str]:
    """`spark.NAME=VALUE` as pairs."""
    found = {}
    for text in texts:
        pair = _SETTING.fullmatch(text)
        if pair is None:
            raise InvalidInput(
                f"conf is {without_value(text)!r}: write spark.NAME=VALUE, such as spark.driver.memory=4g"
            )
        check_setting("conf", pair[1], pair[2])
        found[pair[1]] = pair[2]
    return found


@contextmanager
def spark_session(
    name: str, *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """A session, stopped at the end if it is our own."""
    check_installed()
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 - it has no types
    from pyspark import SparkContext  # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415 - optional, and slow to import
    from pyspark.sql import SparkSession  # noqa: PLC0415

    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # it prints what a failed batch raised, which we do too
    if is_submitted() or SparkContext._active_spark_context is not None:
        if master is not None or settings:
            raise InvalidInput("master and conf are given, but Spark runs already: give them to `keylane spark submit`")
        builder = SparkSession.builder
        for setting, value in _QUIET.items():
            builder = builder.config(setting, value)
        yield builder.getOrCreate()
        return
    chosen = master or DEFAULT_MASTER
    with tempfile.TemporaryDirectory(prefix="keylane-pipeline-") as directory:
        os.environ.update(_environment(Path(directory), chosen))
        builder = SparkSession.builder.master(chosen).appName(name)
        for setting, value in (_settings(Path(directory), chosen) | dict(settings or {})).items():
            builder = builder.config(setting, value)
        try:
            with _quiet_start(Path(directory) / "spark.log"):
                session = builder.getOrCreate()
        except (PySparkException, Py4JError, OSError) as error:
            told = [*str(error).splitlines(), "it gave no reason"]
            raise KeylaneError(f"Spark did not start with master {chosen!r}: {told[0]}") from error
        try:
            yield session
        finally:
            session.stop()


@contextmanager
def _quiet_start(log: Path) -> Iterator[None]:
    """What the JVM and its workers print goes to a file: they keep the standard error that they are started with."""
    sys.stderr.flush()
    ours = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def _environment(directory: Path, master: str) -> dict[str, str]:
    """What Spark reads from the environment when it starts its JVM and its Python workers."""
    chosen = {"JAVA_HOME": str(find_java(java_cache()).home), "PYSPARK_DRIVER_PYTHON": sys.executable}
    if is_local(master):
        chosen |= {"PYSPARK_PYTHON": local_python(directory), "SPARK_LOCAL_IP": "127.0.0.1"}
    elif "PYSPARK_PYTHON" not in os.environ:
        chosen["PYSPARK_PYTHON"] = sys.executable
    return chosen


def _settings(directory: Path, master: str) -> dict[str, str]:
    log = directory / "log4j2.properties"
    log.write_text(_QUIET_LOG)
    settings = _QUIET | {
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile={log}" "-Dderby.system.home={directory}"',
    }
    if is_local(master):
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.local.dir": str(directory / "local"),
            "spark.sql.shuffle.partitions": str(max(8, 2 * (os.cpu_count() or 1))),
        }
    return settings
