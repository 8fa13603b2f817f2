"""SQL: a stream as a view, rows inserted into a stream, and a table for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

import keylane.spark
from keylane.server import NatsServer
from tests.integration.spark.source_rig import Ground, ground

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

Unique = Callable[..., str]


@pytest.fixture
def here(nats_server: NatsServer, spark: SparkSession) -> Iterator[Ground]:
    with ground(nats_server.url, spark) as made:
        yield made


def test_a_view_a_query_and_an_insert(here: Ground, unique: Unique, spark: SparkSession) -> None:
    source, target = here.make(unique("S")), here.make(unique("T"))
    here.publish(source, range(21))
    for name, more in ((source, f", keyFilter '{source}.*', keyPartitions '4'"), (target, "")):
        spark.sql(
            f"CREATE OR REPLACE TEMPORARY VIEW {name} USING keylane OPTIONS (url '{here.url}', stream '{name}'{more})"
        )
    counted = spark.sql(f"SELECT key, count(*) AS orders FROM {source} GROUP BY key ORDER BY key").collect()  # noqa: S608
    assert [(row["key"], row["orders"]) for row in counted] == [(f"k{number}", 3) for number in range(7)]
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW counts AS SELECT concat('{target}.', key) AS subject, "  # noqa: S608
        f"CAST(CAST(count(*) AS STRING) AS BINARY) AS data FROM {source} GROUP BY key"
    )
    spark.sql(f"INSERT INTO {target} (subject, data) SELECT subject, data FROM counts")  # noqa: S608
    stored = {row["subject"]: bytes(row["data"]) for row in here.read(target).collect()}
    assert stored == {f"{target}.k{number}": b"3" for number in range(7)}

    with pytest.raises(Exception, match=r"column '(timestamp|partition|key)' has values"):
        spark.sql(f"INSERT INTO {target} SELECT * FROM {source}")  # noqa: S608


def test_a_table_for_notebooks(here: Ground, unique: Unique, spark: SparkSession) -> None:
    name = here.make(unique("S"))
    here.publish(name, range(5))
    frame = keylane.spark.table(spark, name, url=here.url, startingOffsets=3)
    assert [row["sequence"] for row in frame.collect()] == [3, 4, 5]
