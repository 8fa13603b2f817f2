"""What the lake refuses before anything runs, and the Spark session that it asks for."""

from __future__ import annotations

import pytest

from keylane.errors import InvalidInput
from keylane.spark.pipelines import lake


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"format": "iceberg"}, "no Iceberg fits Spark 4.2 or newer yet; give delta or parquet"),
        ({"format": "orc"}, "format is 'orc': give delta or parquet"),
        ({"format": "parquet", "end": "latest"}, "has no transactions"),
        ({"format": "parquet", "compact": True}, "has no transactions"),
        ({"end": "latest", "available_now": True}, "give one of them"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"interval_s": -1}, "interval_s is -1"),
        ({"vacuum_hours": -1}, "vacuum_hours is -1"),
        ({"start": "soon"}, "from is 'soon'"),
        ({"end": "later"}, "to is 'later'"),
        ({"partitions": "x"}, "option 'partitions' is 'x'"),
        ({"stream": "a.b"}, "a.b"),
        ({"start": "20", "end": "10"}, "before 'startingOffsets' 20"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        lake.Settings(**({"stream": "ORDERS", "table": "/tmp/x"} | wrong))  # type: ignore[arg-type]  # noqa: S108 - never made


def test_the_session_that_a_run_needs() -> None:
    into = lake.Settings(stream="ORDERS", table="s3a://bucket/orders")
    assert into.path == "s3a://bucket/orders"
    assert into.checkpoint == "s3a://bucket/orders/_keylane/checkpoint"
    needed = lake.session_settings(into, "4.2.0")
    assert needed["spark.jars.packages"] == "io.delta:delta-spark_4.2_2.13:4.4.0"
    given = lake.Settings(stream="ORDERS", table="t", jars="/x/delta-spark_4.1_2.13-4.4.0.jar")
    with pytest.raises(InvalidInput, match=r"Delta Lake 4\.4\.0 is made for Spark 4\.1, and this is Spark 4\.2\.0"):
        lake.session_settings(given, "4.2.0")
    with pytest.raises(InvalidInput, match=r"no Delta Lake fits Spark 4\.3\.0 yet"):
        lake.session_settings(into, "4.3.0")
    assert lake.session_settings(lake.Settings(stream="ORDERS", table="t", format="parquet"), "4.3.0") == {}
