"""Spark sessions for tests: local, on loopback, with the Java and the Python that the tests run on.

One process holds one JVM, so a test that needs another Java starts another process.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from keylane.spark.cluster.java import Java
from keylane.spark.cluster.local_python import local_python
from keylane.spark.pipelines.delta_table import delta_settings
from tests.peers.delta import jars
from tests.peers.java import LIGHT_FLAGS, SPARK_CLASSES, java, shared_classes
from tests.peers.presence import PeerMissing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@cache
def find_spark() -> Java:
    """The Java that Spark will run on; PeerMissing where it or PySpark is not there."""
    if importlib.util.find_spec("pyspark") is None:
        raise PeerMissing("pyspark is not installed: `make test` installs it for the Spark tests")
    return java()


def spark_environment(jvm: Java) -> dict[str, str]:
    """What Spark reads from the environment when it starts its JVM and its Python workers."""
    return {
        "JAVA_HOME": str(jvm.home),
        "PYSPARK_PYTHON": _python(),
        "PYSPARK_DRIVER_PYTHON": _python(),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@cache
def _python() -> str:
    """This Python by a path without blanks: before Spark looks for data sources it asks a shell for it, unquoted."""
    directory = Path(tempfile.mkdtemp(prefix="keylane-python-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return local_python(directory, {name: value for name, value in os.environ.items() if name != "SPARK_HOME"})


@contextmanager
def spark_session(
    directory: Path, *, jvm: Java | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """A `local[2]` session whose files all live below `directory`; stopped at the end.

    >>> with spark_session(tmp_path) as spark:  # doctest: +SKIP
    ...     spark.range(3).count()
    """
    from pyspark import SparkContext  # noqa: PLC0415 - optional, and slow to import
    from pyspark.sql import SparkSession  # noqa: PLC0415 - optional, and slow to import

    before = dict(os.environ)
    os.environ.update(spark_environment(jvm or find_spark()))
    try:
        builder = SparkSession.builder.master("local[2]").appName("keylane-tests")
        classes = shared_classes(SPARK_CLASSES) if jvm is None else ""
        for name, value in (_settings(directory, classes) | dict(settings or {})).items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        try:
            yield session
        finally:
            if SparkContext._active_spark_context is not None:  # else its JVM was killed
                session.stop()
    finally:
        os.environ.clear()
        os.environ.update(before)


def delta_session() -> dict[str, str]:
    """The settings of a session that writes Delta tables; none where the jars cannot be had."""
    from pyspark import __version__  # noqa: PLC0415 - optional, and slow to import

    try:
        return delta_settings(__version__, ",".join(map(str, jars()))) | {
            "spark.databricks.delta.snapshotPartitions": "2"
        }
    except PeerMissing:
        return {}


class SharedSession:
    """One session for all tests of a process, replaced where a test left it broken.

    >>> with SharedSession(directory) as shared:  # doctest: +SKIP
    ...     shared.session().range(3).count()
    ...     shared.replace_if_broken()
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started = 0
        self._stack = ExitStack()
        self._session: SparkSession | None = None

    def session(self) -> SparkSession:
        if self._session is None:
            self._started += 1
            directory = self._directory / str(self._started)
            java = f'{LIGHT_FLAGS} "-Dderby.system.home={directory / "derby"}"'
            settings = {"spark.driver.extraJavaOptions": java} | delta_session()
            self._session = self._stack.enter_context(spark_session(directory, settings=settings))
        return self._session

    def replace_if_broken(self, *, timed_out: bool = False, within_s: float = 60.0) -> None:
        """After a test that failed: end its queries, and kill the JVM if it does not answer.

        `timed_out`: the test was interrupted. Its thread may have left an answer of the JVM unread, and would take it
        for the answer to its next question.
        """
        if self._session is not None and (timed_out or not _answers(self._session, within_s)):
            self._kill()

    def _kill(self) -> None:
        from pyspark import SparkContext  # noqa: PLC0415 - optional, and slow to import
        from pyspark.sql import SparkSession  # noqa: PLC0415 - optional, and slow to import

        gateway = SparkContext._gateway
        assert gateway is not None
        gateway.proc.kill()
        gateway.proc.stdin.close()
        gateway.proc.wait()
        gateway.close()
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = SparkSession._activeSession = None
        self._session = None
        self._stack.close()

    def __enter__(self) -> SharedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _answers(session: SparkSession, within_s: float) -> bool:
    """Whether a session can end its queries and run a job, tried by a thread of its own."""
    good = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # whatever it is, the session is broken
            for query in session.streams.active:
                query.stop()
            if session.range(3).count() == 3:
                good.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(within_s)
    return good.is_set()


def _settings(directory: Path, classes: str) -> dict[str, str]:
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": f'"-Dderby.system.home={directory / "derby"}"{classes}',
        "spark.log.level": "ERROR",
    }
