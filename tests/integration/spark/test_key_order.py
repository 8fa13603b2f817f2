"""Functions per key in the order of the sequence: on batch reads, streams and inside foreachBatch, judged by rows."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest

import keylane.spark
from keylane.errors import InvalidInput
from keylane.jetstream import Outgoing, publish_many
from keylane.server import NatsServer
from keylane.spark import in_key_order
from keylane.spark.address import Address
from keylane.spark.sync_connection import SyncConnection, shared_connection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]

KEYS = 13
PARTITIONS = 4
MESSAGES = 400
EVIDENCE = "key STRING, sequence BIGINT, place INT, size INT"


def evidence(key: str | None, rows: pa.Table) -> pa.Table:
    """Each row as it was handed over: under which key, where in the table, and how large the table was."""
    size = rows.num_rows
    return pa.table(
        {
            "key": pa.array([key] * size, pa.string()),
            "sequence": rows["sequence"],
            "place": pa.array(range(size), pa.int32()),
            "size": pa.array([size] * size, pa.int32()),
        }
    )


def calls(df: DataFrame) -> dict[str | None, list[list[int]]]:
    """The sequences of each call, by key, in the order of the evidence."""
    found: dict[str | None, list[list[int]]] = defaultdict(list)
    for row in df.collect():
        if row.place == 0:
            found[row.key].append([])
        assert len(found[row.key][-1]) == row.place
        found[row.key][-1].append(row.sequence)
        assert row.size >= len(found[row.key][-1])
    return dict(found)


def shuffles(df: DataFrame) -> int:
    """How often rows change their task, in the plan that Spark starts with."""
    return len(re.findall(r"\bExchange\b", df._jdf.queryExecution().executedPlan().toString()))


def table(rows: Sequence[tuple[str | None, int]]) -> pa.Table:
    return pa.table(
        {"key": pa.array([key for key, _ in rows], pa.string()), "sequence": [number for _, number in rows]}
    )


@pytest.fixture
def scattered(spark: SparkSession) -> DataFrame:
    """Rows of three keys, in no order, in several tasks."""
    rows = [(f"k{number % 3}", number) for number in range(300)]
    random.Random(7).shuffle(rows)  # noqa: S311 - the same in every run
    return spark.createDataFrame(table(rows)).repartition(3)


@pytest.fixture(scope="module")
def orders(nats_server: NatsServer) -> Iterator[dict[str, list[int]]]:
    """A stream ORDERS_IN_KEYS with partition numbers: the sequences of each key."""
    link = shared_connection(Address(url=nats_server.url))
    name = "ORDERS_IN_KEYS"
    transform = {"src": f"{name}.*", "dest": f"{{{{Partition({PARTITIONS},1)}}}}.{name}.{{{{Wildcard(1)}}}}"}
    link.call(_create(link, {"name": name, "subjects": [f"{name}.*"], "subject_transform": transform}))
    sent: dict[str, list[int]] = defaultdict(list)
    chosen = random.Random(5)  # noqa: S311 - the same in every run
    messages = []
    for sequence in range(1, MESSAGES + 1):
        key = f"k{chosen.randrange(KEYS)}"
        sent[key].append(sequence)
        messages.append(Outgoing(f"{name}.{key}", b"%d" % sequence))
    link.call(publish_many(link.connection, messages))
    yield dict(sent)
    link.call(link.connection.api.request(f"STREAM.DELETE.{name}"))


async def _create(link: SyncConnection, config: dict[str, Any]) -> None:
    await link.connection.api.request(f"STREAM.CREATE.{config['name']}", config)


@pytest.fixture
def read(spark: SparkSession, nats_server: NatsServer, orders: dict[str, list[int]]) -> Callable[..., DataFrame]:
    def load(*, streaming: bool = False, **options: object) -> DataFrame:
        keylane.spark.register(spark)
        reader: Any = (spark.readStream if streaming else spark.read).format("keylane")
        wanted = {"url": nats_server.url, "stream": "ORDERS_IN_KEYS", **options}
        df: DataFrame = reader.options(**wanted).load()
        return df

    return load


# ---- any DataFrame ----------------------------------------------------------------------------------------


def test_scattered_rows_come_once_per_key_in_order(scattered: DataFrame) -> None:
    done = in_key_order(scattered, evidence, EVIDENCE)
    assert calls(done) == {f"k{one}": [list(range(one, 300, 3))] for one in range(3)}
    assert shuffles(done) > 0


def test_rows_without_a_key_come_together_under_none(spark: SparkSession) -> None:
    df = spark.createDataFrame(table([(None, 5), ("a", 4), (None, 3), ("a", 2), (None, 1)]))
    assert calls(in_key_order(df, evidence, EVIDENCE)) == {None: [[1, 3, 5]], "a": [[2, 4]]}


def test_key_and_order_can_be_other_columns(spark: SparkSession) -> None:
    df = spark.createDataFrame(pa.table({"user id": [2, 1, 2, 1], "at": [4, 3, 2, 1]}))

    def joined(key: int, rows: pa.Table) -> pa.Table:
        return pa.table({"user": [key], "ats": ["-".join(map(str, rows["at"].to_pylist()))]})

    done = in_key_order(df, joined, "user INT, ats STRING", key="user id", order="at")
    assert sorted((row.user, row.ats) for row in done.collect()) == [(1, "1-3"), (2, "2-4")]


def test_a_function_may_return_no_rows_or_columns_in_another_order(scattered: DataFrame) -> None:
    def only_k1(key: str, rows: pa.Table) -> pa.Table | None:
        return pa.table({"count": [rows.num_rows], "key": [key]}) if key == "k1" else None

    rows = in_key_order(scattered, only_k1, "key STRING, count INT").collect()
    assert [(row.key, row["count"]) for row in rows] == [("k1", 100)]


def _raise(key: str, rows: pa.Table) -> pa.Table:
    raise ValueError(f"no luck with {key}")


def _other_columns(key: str, rows: pa.Table) -> pa.Table:
    return pa.table({"name": [key]})


def _other_type(key: str, rows: pa.Table) -> pa.Table:
    return pa.table({"key": [key], "count": ["many"]})


def _no_table(key: str, rows: pa.Table) -> Any:
    return [key]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_raise, r"the function failed for key 'k2', sequence 2 to 8 \(3 rows\): ValueError: no luck with k2"),
        (_other_columns, r"returned columns \['name'\] for key 'k2', .* the schema has \['key', 'count'\]"),
        (_other_type, r"answer for key 'k2', sequence 2 to 8 .* does not fit the schema key string, count int32"),
        (_no_table, r"returned list for key 'k2'.*: return a pyarrow.Table"),
    ],
)
def test_what_goes_wrong_in_a_function_names_the_key(
    spark: SparkSession, function: Callable[[str, pa.Table], Any], words: str
) -> None:
    from pyspark.errors import PythonException  # noqa: PLC0415 - optional

    df = spark.createDataFrame(table([("k2", 8), ("k2", 2), ("k2", 5)]))
    with pytest.raises(PythonException, match=words):
        in_key_order(df, function, "key STRING, count INT").collect()


def test_wrong_arguments_are_refused_at_once(scattered: DataFrame) -> None:
    with pytest.raises(InvalidInput, match="column 'user' must be in the DataFrame once, and it has: key, sequence"):
        in_key_order(scattered, evidence, EVIDENCE, key="user")
    with pytest.raises(InvalidInput, match="give a function"):
        in_key_order(scattered, "evidence", EVIDENCE)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"shuffle=False, .* the plan has RepartitionByExpression|Repartition"):
        in_key_order(scattered, evidence, EVIDENCE, shuffle=False)


# ---- streams of JetStream, batch --------------------------------------------------------------------------


def test_whole_partitions_need_no_shuffle(read: Callable[..., DataFrame], orders: dict[str, list[int]]) -> None:
    done = in_key_order(read().where("sequence > 0").select("key", "sequence"), evidence, EVIDENCE, shuffle=False)
    assert shuffles(done) == 0
    assert calls(done) == {key: [sequences] for key, sequences in orders.items()}


@pytest.mark.parametrize(
    "options", [{"splitBy": "sequence", "minPartitions": 3}, {"minPartitions": 9}, {"filter": "ORDERS_IN_KEYS.k1,*.k2"}]
)
def test_splits_that_cut_keys_are_shuffled(
    read: Callable[..., DataFrame], orders: dict[str, list[int]], options: dict[str, object]
) -> None:
    df = read(**options)
    with pytest.raises(InvalidInput, match="shuffle=False, but rows with the same 'key' may be in several tasks"):
        in_key_order(df, evidence, EVIDENCE, shuffle=False)
    done = in_key_order(df, evidence, EVIDENCE)
    assert shuffles(done) == 1
    wanted = {"k1", "k2"} if "filter" in options else orders.keys()
    assert calls(done) == {key: [orders[key]] for key in wanted}


def test_other_plans_are_shuffled(spark: SparkSession, read: Callable[..., DataFrame]) -> None:
    df = read()
    df.createOrReplaceTempView("orders_in_keys")
    one_key = spark.range(1).selectExpr("'k1' AS key")
    for plan in (
        df.withColumnRenamed("key", "k").selectExpr("concat(k, '') AS key", "sequence"),
        df.distinct(),
        df.unionByName(df),
        df.join(one_key, "key"),
        df.where("sequence > (SELECT 3)"),
    ):
        with pytest.raises(InvalidInput, match="shuffle=False"):
            in_key_order(plan, evidence, EVIDENCE, shuffle=False)
    assert shuffles(in_key_order(spark.table("orders_in_keys"), evidence, EVIDENCE)) == 0
    assert shuffles(in_key_order(df, evidence, EVIDENCE, shuffle=True)) == 1


# ---- streams of JetStream, streaming ----------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [None, True])
def test_a_stream_keeps_order_through_its_batches(
    read: Callable[..., DataFrame], orders: dict[str, list[int]], tmp_path: Path, shuffle: bool | None
) -> None:
    df = in_key_order(read(streaming=True, maxOffsetsPerTrigger=150), evidence, EVIDENCE, shuffle=shuffle)
    batches: list[dict[str | None, list[list[int]]]] = []
    query = (
        df.writeStream.foreachBatch(lambda batch, _number: batches.append(calls(batch)))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(90)
    assert ("Exchange" in query._jsq.explainInternal(False)) is bool(shuffle)
    assert len(batches) == 3
    merged: dict[str | None, list[int]] = defaultdict(list)
    for batch in batches:
        for key, handed in batch.items():
            assert len(handed) == 1, f"{key} was handed over {len(handed)} times in a batch"
            merged[key] += handed[0]
    assert merged == orders


@pytest.mark.long("runs a query with a function for each batch")
def test_inside_foreach_batch(read: Callable[..., DataFrame], orders: dict[str, list[int]], tmp_path: Path) -> None:
    shuffled: list[tuple[int, ...]] = []
    merged: dict[str | None, list[int]] = defaultdict(list)

    def handle(batch: DataFrame, _number: int) -> None:
        done = in_key_order(batch.where("key != ''"), evidence, EVIDENCE)
        elsewhere = [in_key_order(one, evidence, EVIDENCE) for one in (batch.repartition(3), batch.localCheckpoint())]
        shuffled.append((shuffles(done), *(shuffles(one) for one in elsewhere)))
        for key, handed in calls(done).items():
            assert len(handed) == 1
            merged[key] += handed[0]

    query = (
        read(streaming=True, maxOffsetsPerTrigger=250)
        .select("sequence", "key")
        .writeStream.foreachBatch(handle)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(90)
    assert shuffled == [(0, 1, 1)] * 2
    assert merged == orders
