"""Which Java and which table formats fit which Spark, so that a misfit is one sentence and not a stack of JVM frames.

Owns the versions that are known to fit. Never imports pyspark and starts nothing but `java -version`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from keylane.errors import InvalidInput, JavaMissing
from keylane.extras import extra_missing
from keylane.spark.cluster.java import OLDEST as OLDEST_JAVA
from keylane.spark.cluster.java import find_java, java_cache

OLDEST_SPARK = (4, 2)
SCALA = "2.13"
DELTA = {(4, 2): "4.4.0"}
"""The Delta Lake that keylane was tested with, by Spark."""

_ARTIFACT = re.compile(r"(delta-spark|iceberg-spark-runtime)[_-](?:(\d+\.\d+)_)?(\d+\.\d+)[:-](\d+(?:\.\d+)*)")
_FORMATS = {"delta-spark": "Delta Lake", "iceberg-spark-runtime": "Iceberg"}


def delta_package(spark: str) -> str:
    """The Maven coordinates of the Delta Lake for a Spark; `InvalidInput` where there is none.

    >>> delta_package("4.2.0")
    'io.delta:delta-spark_4.2_2.13:4.4.0'
    """
    line = _line(spark)
    if line not in DELTA:
        fits = ", ".join(f"{major}.{minor}" for major, minor in DELTA)
        raise InvalidInput(
            f"no Delta Lake fits Spark {spark} yet: install pyspark=={fits}.0, or write Parquet (format parquet)"
        )
    return f"io.delta:delta-spark_{line[0]}.{line[1]}_{SCALA}:{DELTA[line]}"


def misfit(spark: str, *, java: int | None = None, jars: Iterable[str] = ()) -> str | None:
    """What does not fit together, in a sentence that says what to do; None where everything fits.

    `jars` are file names or Maven coordinates; those of Delta Lake and Iceberg say which Spark they are made for.

    >>> misfit("4.3.0", jars=["io.delta:delta-spark_4.2_2.13:4.4.0"])
    'Delta Lake 4.4.0 is made for Spark 4.2, and this is Spark 4.3.0: install pyspark==4.2.0'
    """
    line = _line(spark)
    if line < OLDEST_SPARK or line[0] > OLDEST_SPARK[0]:
        oldest = ".".join(map(str, OLDEST_SPARK))
        return f"keylane needs Spark {oldest} or newer, below {OLDEST_SPARK[0] + 1}, and this is Spark {spark}"
    if java is not None and java < OLDEST_JAVA:
        return f"Spark {spark} needs Java {OLDEST_JAVA} or newer, and this is Java {java}: set JAVA_HOME to another"
    for jar in jars:
        if (found := _ARTIFACT.search(jar)) is None:
            continue
        artifact, made_for, scala, release = found.groups()
        if scala != SCALA:
            return f"{jar} is made for Scala {scala}, and Spark {spark} has Scala {SCALA}: give the one for {SCALA}"
        if made_for is not None and _line(made_for) != line:
            usable = _line(made_for) >= OLDEST_SPARK
            instead = f"install pyspark=={made_for}.0" if usable else f"give a release for Spark {line[0]}.{line[1]}"
            return f"{_FORMATS[artifact]} {release} is made for Spark {made_for}, and this is Spark {spark}: {instead}"
    return None


def installed_misfit(jars: Iterable[str] = ()) -> str | None:
    """The same for the Spark that is installed and the Java that it would run on."""
    try:
        spark = version("pyspark")
    except PackageNotFoundError:
        return str(extra_missing("pyspark is not installed", "spark"))
    try:
        java = find_java(java_cache()).version
    except JavaMissing as missing:
        return str(missing)
    return misfit(spark, java=java, jars=jars)


def _line(spark: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", spark)
    if found is None:
        raise InvalidInput(f"Spark's version is {spark!r}: expected two or three numbers, such as 4.2.0")
    return int(found[1]), int(found[2])
