"""WHERE of a batch read: the server is asked for less, and the rows are the same with and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, LessThan, StringStartsWith

from keylane.server import NatsServer
from keylane.spark.options import read_options
from keylane.spark.source import BatchReader, FilteredBatchReader
from keylane.spark.tasks import Split
from tests.integration.spark.source_rig import Ground, ground

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

Unique = Callable[..., str]
SETTING = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def here(nats_server: NatsServer, spark: SparkSession) -> Iterator[Ground]:
    with ground(nats_server.url, spark) as made:
        yield made


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[None]:
    before = spark.conf.get(SETTING)
    spark.conf.set(SETTING, "true")
    yield
    spark.conf.set(SETTING, str(before))


def planned(here: Ground, name: str, *asked: Filter) -> tuple[list[tuple[str | None, int, int]], list[Filter]]:
    """The splits that are read: filter, first and last sequence; and the filters that Spark must apply."""
    reader = FilteredBatchReader(read_options({"url": here.url, "stream": name}, "batch"))
    given_back = list(reader.pushFilters(list(asked)))
    splits = [one for one in reader.partitions() if isinstance(one, Split)]
    return [(one.subject_filter, one.after + 1, one.upto) for one in splits], given_back


def test_less_is_asked_for(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"), numbered=True)
    here.publish(name, range(70))
    rows = {row["sequence"]: row for row in here.read(name).collect()}
    third = rows[3]
    number, subject = third["partition"], third["subject"]
    of_subject = [sequence for sequence, row in rows.items() if row["subject"] == subject]
    of_partition = [sequence for sequence, row in rows.items() if row["partition"] == number]

    everything, given_back = planned(here, name)
    assert (len(everything), given_back) == (len({row["partition"] for row in rows.values()}), [])
    found, given_back = planned(here, name, EqualTo(("partition",), number))
    assert (found, given_back) == ([(f"{number}.>", 1, max(of_partition))], [])
    found, given_back = planned(here, name, EqualTo(("subject",), subject))
    assert (found, given_back) == ([(f"{number}.{subject}", 1, max(of_subject))], [])
    asked = EqualTo(("key",), third["key"])
    assert planned(here, name, asked) == ([(f"{number}.{subject}", 1, max(of_subject))], [asked])
    found, given_back = planned(here, name, GreaterThan(("sequence",), 60), StringStartsWith(("subject",), f"{name}."))
    assert {first for _, first, _ in found} == {61}
    assert given_back == []

    since, until = (rows[sequence]["timestamp"].astimezone() for sequence in (20, 31))
    times = [GreaterThanOrEqual(("timestamp",), since), LessThan(("timestamp",), until)]
    found, given_back = planned(here, name, *times)
    assert given_back == times
    stored_then = [one for one, row in rows.items() if since <= row["timestamp"].astimezone() < until]
    assert min(first for _, first, _ in found) == min(stored_then)
    assert max(last for _, _, last in found) == max(stored_then)
    assert planned(here, name, GreaterThan(("timestamp",), since + timedelta(days=1)))[0] == []
    assert planned(here, name, GreaterThan(("sequence",), 5), LessThan(("sequence",), 5))[0] == []


@pytest.mark.usefixtures("pushing")
def test_the_rows_are_the_same_and_the_plan_tells(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"), numbered=True)
    here.publish(name, range(40))
    where = f"sequence > 10 AND subject = '{name}.k3' AND timestamp > '2020-01-01' AND length(data) = 2"
    frame: DataFrame = here.read(name).where(where)
    assert sorted(row["sequence"] for row in frame.collect()) == [11, 18, 25, 32, 39]
    plan = frame._jdf.queryExecution().toString()  # explain() only prints it
    scan = plan.partition("== Physical Plan ==")[2]
    assert f"{name}.k3" not in scan, "the server applies it exactly, so Spark has nothing left to do"
    assert "timestamp" in scan.partition("Filter")[2].partition("BatchScan")[0], "clocks may differ: Spark looks again"
    assert frame.rdd.getNumPartitions() == 1
    assert here.read(name).count() == 40


def test_without_the_setting_nothing_changes(here: Ground, unique: Unique) -> None:
    name = here.make(unique("S"))
    here.publish(name, range(20))
    assert sorted(row["sequence"] for row in here.read(name).where("sequence > 15").collect()) == [16, 17, 18, 19, 20]


def test_a_reader_outside_of_the_planning_process_has_no_filters() -> None:
    """Spark refuses every read with such a reader while the setting is off, which is the default."""
    assert "pushFilters" not in vars(BatchReader)
