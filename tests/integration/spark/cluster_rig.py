"""What the tests on clusters stand on: a packed environment, a stream to read, and `keylane spark submit`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keylane
from keylane.jetstream import Outgoing, publish_many
from tests.peers.java import LIGHT_JAVA
from tests.peers.spark import find_spark

APP = Path(__file__).with_name("cluster_app.py")
PARTITIONS = 4
MESSAGES = 200
DEADLINE_S = 420.0
KEYLANE = [sys.executable, "-c", "from keylane.cli.main import main; main()"]
SMALL = {
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.log.level": "ERROR",
    "spark.task.maxFailures": "1",
    # Both executors are waited for, so that both get work.
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@dataclass(frozen=True)
class Filled:
    """A stream and what is in it, as the server's partitioning put it there."""

    name: str
    url: str
    by_partition: dict[int, list[int]]
    last_of_key: dict[str, int]


def fill(stream: str, url: str, nkey_seed_file: Path | None = None) -> Filled:
    """Make a stream with partition numbers and publish into it."""
    return asyncio.run(_fill(stream, url, nkey_seed_file))


async def _fill(stream: str, url: str, nkey_seed_file: Path | None) -> Filled:
    transform = {"src": f"{stream}.*", "dest": f"{{{{Partition({PARTITIONS},1)}}}}.{stream}.{{{{Wildcard(1)}}}}"}
    config = {"name": stream, "subjects": [f"{stream}.*"], "subject_transform": transform}
    by_partition: dict[int, list[int]] = defaultdict(list)
    last: dict[str, int] = {}
    async with await keylane.connect(url, nkey_seed_file=nkey_seed_file) as link:
        await link.api.request(f"STREAM.CREATE.{stream}", config)
        await publish_many(link, [Outgoing(f"{stream}.k{number % 17}", b"x" * 100) for number in range(MESSAGES)])
        for sequence in range(1, MESSAGES + 1):
            stored = await link.api.request(f"STREAM.MSG.GET.{stream}", {"seq": sequence})
            number, _, rest = stored["message"]["subject"].partition(".")
            by_partition[int(number)].append(sequence)
            last[rest.rpartition(".")[2]] = sequence
    return Filled(stream, url, dict(by_partition), last)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def submit(directory: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> Done:
    """Run `keylane spark submit` from a directory; past the deadline all of its processes are ended."""
    settings = [word for name, value in SMALL.items() for word in ("--conf", f"{name}={value}")]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NATS_", "PYSPARK"))}
    with subprocess.Popen(
        [*KEYLANE, "spark", "submit", *settings, *arguments],
        cwd=directory,
        env=clean
        | LIGHT_JAVA
        | {"JAVA_HOME": str(find_spark().home), "SPARK_LOCAL_IP": "127.0.0.1", **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Done(process.returncode, stdout, stderr)


def app_in(directory: Path) -> Path:
    """The program alone, where nothing of keylane lies beside it."""
    return Path(shutil.copy(APP, directory / "app.py"))


def found(results: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((results / "found.json").read_text())
    return read


def judge(seen: Mapping[str, Any], filled: Filled, environments: Sequence[str]) -> None:
    """All rows once and in order, read by tasks on executors that took keylane from the packed environment."""
    assert {int(number): rows for number, rows in seen["batch"].items()} == filled.by_partition
    assert seen["lasts"] == filled.last_of_key
    assert seen["stream"] == list(range(1, MESSAGES + 1))
    assert seen["batches"] == -(-MESSAGES // 70)
    assert sum(task["row_count"] for task in seen["tasks"]) == MESSAGES
    for task in seen["tasks"]:
        assert task["keylane"].startswith(f"{task['directory']}/.keylane-env-"), task
        assert task["directory"].startswith(tuple(environments)), task
