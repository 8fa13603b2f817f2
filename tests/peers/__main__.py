"""`python -m tests.peers`: builds and fetches every peer that this machine can have, before the tests run.

A missing tool is one line, and an error only where KEYLANE_REQUIRE_PEERS is set. Where a tool is there and
fails, its words are shown: the tests that need it will fail, and the others still run.
"""

from __future__ import annotations

import sys

from tests.peers import delta, go, kafka, spark, spark_classes, spark_newest
from tests.peers.presence import PeerBroken, PeerMissing, peers_are_required


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    missing = False
    for name, prepare in {
        "go": _go,
        "kafka": _kafka,
        "spark": _spark,
        "delta": _delta,
        "newest Spark": _newest,
    }.items():
        try:
            prepare()
        except PeerMissing as error:
            missing = True
            say(f"{name}: {error}")
        except PeerBroken as error:
            say(f"{name}: {error}")
            missing = True
    return 1 if missing and peers_are_required() else 0


def _go() -> None:
    for name in go.PROGRAMS:
        go.program(name, say)


def _kafka() -> None:
    kafka.jars(say)


def _spark() -> None:
    spark.find_spark()
    try:
        spark_classes.spark_classes(say)
    except PeerBroken as error:  # nothing is missing without it
        say(f"spark: {error}")


def _delta() -> None:
    delta.jars(say)


def _newest() -> None:
    spark_newest.packages(say)


if __name__ == "__main__":
    sys.exit(main())
