"""A misfit of Spark, Java, Delta Lake or Iceberg is one sentence."""

from __future__ import annotations

import pytest

from keylane.errors import InvalidInput
from keylane.spark.compatibility import delta_package, installed_misfit, misfit

DELTA = "io.delta:delta-spark_4.2_2.13:4.4.0"


@pytest.mark.parametrize(
    ("spark", "java", "jars"),
    [
        ("4.2.0", 17, []),
        ("4.2.1", 25, [DELTA]),
        ("4.3.0", None, ["/jars/kafka_2.13-4.3.1.jar", "/jars/delta-storage-4.4.0.jar"]),
        ("4.2.0", 21, ["/jars/delta-spark_4.2_2.13-4.4.0.jar", "org.example:other_2.12:1.0"]),
        ("4.2.0", 21, ["io.delta:delta-spark_2.13:4.4.0"]),
    ],
)
def test_what_fits(spark: str, java: int | None, jars: list[str]) -> None:
    assert misfit(spark, java=java, jars=jars) is None


@pytest.mark.parametrize(
    ("spark", "java", "jars", "said"),
    [
        ("4.1.1", None, [], "keylane needs Spark 4.2 or newer, below 5, and this is Spark 4.1.1"),
        ("5.0.0", None, [], "below 5, and this is Spark 5.0.0"),
        ("4.2.0", 11, [], "Spark 4.2.0 needs Java 17 or newer, and this is Java 11"),
        (
            "4.3.0",
            17,
            [DELTA],
            "4.4.0 is made for Spark 4.2, and this is Spark 4.3.0: install pyspark==4.2.0",
        ),
        (
            "4.2.0",
            17,
            ["/x/delta-storage-4.4.0.jar", "/x/iceberg-spark-runtime-4.1_2.13-1.12.0.jar"],
            "Iceberg 1.12.0 is made for Spark 4.1, and this is Spark 4.2.0: give a release for Spark 4.2",
        ),
        ("4.2.0", 17, ["delta-spark_2.12-3.2.0.jar"], "is made for Scala 2.12, and Spark 4.2.0 has Scala 2.13"),
    ],
)
def test_what_does_not_fit(spark: str, java: int | None, jars: list[str], said: str) -> None:
    told = misfit(spark, java=java, jars=jars)
    assert told is not None
    assert said in told
    assert "\n" not in told


def test_the_package_of_delta() -> None:
    assert delta_package("4.2.0") == DELTA
    with pytest.raises(InvalidInput, match=r"no Delta Lake fits Spark 4\.3\.0 yet: install pyspark==4\.2\.0"):
        delta_package("4.3.0")


def test_what_is_installed_here_fits() -> None:
    assert installed_misfit([DELTA]) is None
