"""A standalone Spark cluster: a master and workers as processes of their own, on loopback and free ports.

Owns their processes and logs. Nothing of the tests' Python reaches them: their environment is made from scratch, so an
executor finds only what a submission brings along.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.peers import tether
from tests.peers.java import LIGHT_FLAGS
from tests.peers.presence import PeerBroken
from tests.peers.spark import find_spark

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 30.0
_MASTER_READY = re.compile(r"Starting Spark master at (spark://\S+)")
_WORKER_READY = re.compile(r"Successfully registered with master (spark://\S+)")
_CLEAN_PATH = "/usr/local/bin:/usr/bin:/bin"


def spark_home() -> Path:
    """Where pip put Spark."""
    import pyspark  # noqa: PLC0415 - optional, and slow to import

    return Path(pyspark.__file__).parent


class Daemon:
    """One process of the cluster; `ready` is what its log says when it can be used."""

    def __init__(self, name: str, directory: Path, ready: re.Pattern[str], arguments: list[str]) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        self._ready = ready
        self._said: str | None = None
        self._settled = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, tether.__file__, str(spark_home() / "bin" / "spark-class"), *arguments],
            cwd=directory,
            env=_environment(directory),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"spark-{name}-log")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def wait_ready(self, deadline: float) -> str:
        """The address that the process tells."""
        in_time = self._settled.wait(max(0.0, deadline - time.monotonic()))
        if self._said is None:
            why = "ended at its start" if in_time else "did not start in time"
            raise PeerBroken(f"Spark's {self.name} {why}; its log ends:\n{self.log[-3000:]}")
        return self._said

    def ask_to_end(self) -> None:
        self._process.terminate()

    def end(self) -> None:
        """Waits for the end; SIGKILL if that takes too long."""
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout, self._log.open("a") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                if self._said is None and (found := self._ready.search(line)):
                    self._said = found[1]
                    self._settled.set()
        self._settled.set()


class SparkCluster:
    """A running cluster: `with SparkCluster.start(workers=2) as cluster: ... cluster.url`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._daemons: list[Daemon] = []
        self.url = ""

    @classmethod
    def start(cls, workers: int = 2, *, cores: int = 1, memory: str = "1g") -> Self:
        cluster = cls(Path(tempfile.mkdtemp(prefix="keylane-spark-")))
        try:
            cluster._launch(workers, cores, memory)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @property
    def pids(self) -> list[int]:
        return [daemon.pid for daemon in self._daemons]

    @property
    def logs(self) -> str:
        """The ends of all logs, of the executors too: what a failed test shows."""
        executors = sorted(self.directory.glob("work-*/app-*/*/std*"))
        texts = {daemon.name: daemon.log for daemon in self._daemons}
        texts |= {str(log.relative_to(self.directory)): log.read_text(errors="replace") for log in executors}
        return "\n".join(f"==== {name}\n{text[-3000:]}" for name, text in texts.items() if text)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.ask_to_end()
        for daemon in self._daemons:
            daemon.end()
        self._daemons.clear()
        shutil.rmtree(self.directory, ignore_errors=True)  # an executor may still write its last words

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, workers: int, cores: int, memory: str) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        free = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        master = ["org.apache.spark.deploy.master.Master", *free]
        self._daemons.append(Daemon("master", self.directory, _MASTER_READY, master))
        self.url = self._daemons[0].wait_ready(deadline)
        for number in range(1, workers + 1):
            limits = ["--cores", str(cores), "--memory", memory]
            work = ["--work-dir", str(self.directory / f"work-{number}")]
            worker = ["org.apache.spark.deploy.worker.Worker", *free, *limits, *work, self.url]
            self._daemons.append(Daemon(f"worker-{number}", self.directory, _WORKER_READY, worker))
        for daemon in self._daemons[1:]:
            daemon.wait_ready(deadline)


def _environment(directory: Path) -> dict[str, str]:
    return {
        "HOME": str(directory),
        "PATH": _CLEAN_PATH,
        "JAVA_HOME": str(find_spark().home),
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(directory / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": LIGHT_FLAGS,
    }
