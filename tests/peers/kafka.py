"""Apache Kafka: fetched once by Maven, started as a KRaft cluster of any size on loopback and free ports.

Owns the jars in `.peers/kafka`, the brokers' settings and processes. Each broker is also a controller.
"""

from __future__ import annotations

import base64
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from keylane.server.ports import ReservedPort
from tests.peers import tether
from tests.peers.java import java
from tests.peers.presence import PeerBroken, PeerMissing
from tests.peers.store import REPOSITORY, Say, content_key, kept, run_tool, silent

_SOURCE = REPOSITORY / "tests" / "integration" / "kafka"
_FETCH_TIMEOUT_S = 600.0
_FORMAT_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 30.0
_STARTED = "Kafka Server started"
_JVM = ["-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]


@cache
def find_kafka() -> str:
    """The Maven that can fetch Kafka; PeerMissing where Maven, Java or the Python client is not there."""
    maven = shutil.which("mvn")
    if maven is None:
        raise PeerMissing("Maven (`mvn`) is not on PATH: install Maven to run the Kafka tests")
    if importlib.util.find_spec("confluent_kafka") is None:
        raise PeerMissing("confluent-kafka is not installed: `make test` installs it for the Kafka tests")
    java()
    return maven


def jars(say: Say = silent) -> Path:
    """The directory of the broker's jars."""
    maven = find_kafka()
    pom = _SOURCE / "pom.xml"

    def fetch(directory: Path) -> None:
        say("kafka: fetching the broker with Maven")
        fetched = 0

        def count(line: str) -> None:
            nonlocal fetched
            if line.startswith("[INFO] Downloaded from"):
                fetched += 1
                if fetched % 25 == 0:
                    say(f"  {fetched} files")

        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={directory}", "-DincludeScope=runtime"]
        run_tool(
            [maven, "-B", "-f", str(pom), *goal],
            cwd=_SOURCE,
            environ=os.environ | {"JAVA_HOME": str(java().home)},
            timeout_s=_FETCH_TIMEOUT_S,
            on_line=count,
        )

    return kept("kafka", content_key([pom]), fetch)


class Broker:
    """One broker and controller in a process of its own; its data and ports survive `stop` and `kill`."""

    def __init__(self, node: int, directory: Path, port: int) -> None:
        self.node = node
        self.port = port
        self._directory = directory
        self._log = directory / "broker.log"
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._started = threading.Event()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def launch(self) -> None:
        """Starts the process, which ends with the thread that did this, and returns at once; see `wait_started`."""
        assert self._process is None, "the broker is already running"
        self._started.clear()
        self._log.unlink(missing_ok=True)
        command = _java_command("kafka.Kafka", str(self._directory / "server.properties"))
        self._process = subprocess.Popen(
            [sys.executable, tether.__file__, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), name=f"kafka-{self.node}-log")
        self._reader.start()

    def wait_started(self, deadline: float) -> None:
        if not self._started.wait(max(0.0, deadline - time.monotonic())):
            raise PeerBroken(f"Kafka broker {self.node} did not start in time; its log ends:\n{self.log[-3000:]}")
        if _STARTED not in self.log:
            raise PeerBroken(f"Kafka broker {self.node} ended at its start; its log ends:\n{self.log[-3000:]}")

    def start(self) -> None:
        """Starts a stopped or killed broker again, on its ports and with its data."""
        self.launch()
        self.wait_started(time.monotonic() + _START_TIMEOUT_S)

    def stop(self) -> None:
        """A clean shutdown; SIGKILL if that takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reap()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self._process is None:
            return
        self._process.kill()
        self._reap()

    def _reap(self) -> None:
        assert self._process is not None
        assert self._reader is not None
        self._process.wait()
        self._reader.join()
        self._process = None

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout, self._log.open("a") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                if _STARTED in line:
                    self._started.set()
        self._started.set()


class Kafka:
    """A running cluster: `with Kafka.start(brokers=3) as kafka: ... kafka.bootstrap`."""

    def __init__(self, brokers: list[Broker], directory: Path, ports: list[ReservedPort]) -> None:
        self.brokers = brokers
        self._directory = directory
        self._ports = ports

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{broker.port}" for broker in self.brokers)

    @classmethod
    def start(
        cls,
        brokers: int = 1,
        *,
        settings: Mapping[str, object] | None = None,
        logins: Mapping[str, str] | None = None,
        certificate: Path | None = None,
    ) -> Self:
        """Formats and starts the brokers on free ports, which are theirs until the end, also between two starts.

        `settings` are added to those of every broker. `logins`: names and passwords (SASL/PLAIN); the first may do
        everything, the others what ACLs allow. With a `certificate` (key, PKCS #8, and chain up to the CA, as PEM) they
        log in over TLS.
        """
        jars()
        directory = Path(tempfile.mkdtemp(prefix="keylane-kafka-"))
        ports = [ReservedPort() for _ in range(2 * brokers)]
        more = {**_login_settings(logins, certificate), **(settings or {})}
        kafka = cls(_prepare([one.number for one in ports], directory, more), directory, ports)
        try:
            _format(kafka.brokers, directory)
            for broker in kafka.brokers:
                broker.launch()
            deadline = time.monotonic() + _START_TIMEOUT_S
            for broker in kafka.brokers:
                broker.wait_started(deadline)
        except BaseException:
            kafka.kill()
            raise
        return kafka

    def stop(self) -> None:
        # Together: a lone controller waits for a majority that is already gone.
        with ExitStack() as ends:
            for broker in self.brokers[1:]:
                thread = threading.Thread(target=broker.stop)
                thread.start()
                ends.callback(thread.join)
            self.brokers[0].stop()
        self._clear()

    def kill(self) -> None:
        for broker in self.brokers:
            broker.kill()
        self._clear()

    def _clear(self) -> None:
        for port in self._ports:
            port.release()
        shutil.rmtree(self._directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _java_command(main_class: str, *arguments: str) -> list[str]:
    logging = (_SOURCE / "log4j2.properties").as_uri()
    classpath = str(jars() / "*")
    options = [*_JVM, f"-Dlog4j2.configurationFile={logging}", "-cp", classpath]
    return [str(java().executable), *options, main_class, *arguments]


def _prepare(ports: Sequence[int], directory: Path, more: Mapping[str, object]) -> list[Broker]:
    count = len(ports) // 2
    clients, controllers = ports[:count], ports[count:]
    voters = ",".join(f"{node}@127.0.0.1:{port}" for node, port in enumerate(controllers, start=1))
    brokers = []
    for node, (client, controller) in enumerate(zip(clients, controllers, strict=True), start=1):
        home = directory / str(node)
        home.mkdir()
        settings = _settings(node, client, controller, voters=voters, copies=min(count, 3), data=home / "data")
        listener = str(more.get("inter.broker.listener.name", "PLAINTEXT"))
        for name in ("listeners", "advertised.listeners"):
            settings[name] = str(settings[name]).replace("PLAINTEXT://", f"{listener}://")
        settings |= more
        (home / "server.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        brokers.append(Broker(node, home, client))
    return brokers


def _settings(node: int, client: int, controller: int, *, voters: str, copies: int, data: Path) -> dict[str, object]:
    return {
        "process.roles": "broker,controller",
        "node.id": node,
        "controller.quorum.voters": voters,
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{client}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": data,
        "auto.create.topics.enable": "false",
        "default.replication.factor": copies,
        "min.insync.replicas": max(1, copies - 1),
        "offsets.topic.num.partitions": 4,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.num.partitions": 4,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": max(1, copies - 1),
        "share.coordinator.state.topic.num.partitions": 1,
        "share.coordinator.state.topic.replication.factor": copies,
        "group.initial.rebalance.delay.ms": 0,
        # A killed broker may come back only when its old session is over.
        "broker.session.timeout.ms": 4000,
        "broker.heartbeat.interval.ms": 500,
        "log.cleaner.dedupe.buffer.size": 2_000_000,
        # What is to go by age goes soon, so that a test can wait for it.
        "log.retention.check.interval.ms": 300,
        "log.initial.task.delay.ms": 300,
    }


def _login_settings(logins: Mapping[str, str] | None, certificate: Path | None) -> dict[str, object]:
    if not logins:
        return {}
    listener = "SASL_PLAINTEXT" if certificate is None else "SASL_SSL"
    tls: dict[str, object] = {}
    if certificate is not None:
        for store in ("keystore", "truststore"):
            tls |= {f"ssl.{store}.type": "PEM", f"ssl.{store}.location": certificate}
    admin, password = next(iter(logins.items()))
    users = " ".join(f'user_{name}="{secret}"' for name, secret in logins.items())
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    return {
        "inter.broker.listener.name": listener,
        "listener.security.protocol.map": f"{listener}:{listener},CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        f"listener.name.{listener.lower()}.plain.sasl.jaas.config": (
            f'{module} required username="{admin}" password="{password}" {users};'
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:{admin};User:ANONYMOUS",  # controllers talk to each other without a login
        **tls,
    }


def _format(brokers: Sequence[Broker], directory: Path) -> None:
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    if cluster.startswith("-"):  # the tool would take the id for an option
        cluster = "k" + cluster[1:]
    with ExitStack() as running:
        tools = []
        for broker in brokers:
            settings = str(directory / str(broker.node) / "server.properties")
            command = _java_command("kafka.tools.StorageTool", "format", "--cluster-id", cluster, "--config", settings)
            tool = subprocess.Popen(
                [sys.executable, tether.__file__, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            running.callback(tool.wait)
            running.callback(tool.kill)
            tools.append(tool)
        for tool in tools:
            output, _ = tool.communicate(timeout=_FORMAT_TIMEOUT_S)
            if tool.returncode != 0:
                raise PeerBroken(f"Kafka could not format its storage:\n{output[-3000:]}")
