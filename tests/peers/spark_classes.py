"""`python -m tests.peers.spark_classes`: the archive of the classes that Spark loads for a read, a query and a write.

Owns `.peers/spark-classes`, which set-up makes and `LIGHT_FLAGS` names. A JVM maps the archive instead of reading,
checking and linking ten thousand classes. Tests run without it too, only slower.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import keylane
from keylane.jetstream import Outgoing, StreamConfig, publish_many, streams
from keylane.server import NatsServer
from tests.peers.java import SMALL_JVM, SPARK_CLASSES
from tests.peers.presence import PeerBroken
from tests.peers.spark import find_spark, spark_session
from tests.peers.store import REPOSITORY, Say, content_key, kept, run_tool, silent

_TIMEOUT_S = 300
_ROWS = 100


def spark_classes(say: Say = silent) -> Path:
    """The directory of the archive, made where Java or Spark is another than before."""
    jvm = find_spark()
    from pyspark import __file__ as pyspark  # noqa: PLC0415 - optional, and slow to import
    from pyspark import __version__  # noqa: PLC0415

    version = subprocess.run([jvm.executable, "-version"], capture_output=True, text=True, check=True).stderr

    def build(directory: Path) -> None:
        say("spark: keeping its classes, so that it starts sooner")
        run_tool(
            [sys.executable, "-m", __spec__.name, str(directory / SPARK_CLASSES.name)],
            cwd=REPOSITORY,
            environ=os.environ,
            timeout_s=_TIMEOUT_S,
            on_line=silent,
        )
        if not (directory / SPARK_CLASSES.name).exists():
            raise PeerBroken("this Java wrote no archive of Spark's classes: the tests run without it, only slower")

    return kept(SPARK_CLASSES.parent.name, content_key([Path(__file__)], version, __version__, pyspark), build)


def load_classes(archive: Path) -> None:
    """Let a Spark do what tests do, and write what it loaded when it ends."""
    with tempfile.TemporaryDirectory(prefix="keylane-classes-") as name, NatsServer.start() as server:
        directory = Path(name)
        asyncio.run(_prepare(server.url))
        java = f'{SMALL_JVM} "-XX:ArchiveClassesAtExit={archive}" "-Dderby.system.home={directory / "derby"}"'
        with spark_session(directory, settings={"spark.driver.extraJavaOptions": java}) as spark:
            import keylane.spark  # noqa: PLC0415 - optional

            keylane.spark.register(spark)
            options = {"url": server.url, "stream": "FROM"}
            read = spark.readStream.format("keylane").options(**options).load().select("subject", "data")
            to = {"url": server.url, "stream": "TO", "subject": "to.all", "checkpointLocation": str(directory / "copy")}
            copy = read.select("data").writeStream.format("keylane").options(**to).trigger(availableNow=True).start()
            assert copy.awaitTermination(_TIMEOUT_S)
            rows, kept_at = str(directory / "rows"), str(directory / "checkpoint")
            files = read.writeStream.format("parquet").option("path", rows).option("checkpointLocation", kept_at)
            assert files.trigger(availableNow=True).start().awaitTermination(_TIMEOUT_S)
            assert spark.read.parquet(rows).groupBy("subject").count().orderBy("subject").count() == 1
            assert spark.read.format("keylane").options(**options).load().count() == _ROWS


async def _prepare(url: str) -> None:
    async with await keylane.connect(url) as connection:
        for name in ("from", "to"):
            await streams.create(connection, StreamConfig(name=name.upper(), subjects=[f"{name}.*"]))
        await publish_many(connection, [Outgoing("from.all", b"x") for _ in range(_ROWS)])


if __name__ == "__main__":
    load_classes(Path(sys.argv[1]))
