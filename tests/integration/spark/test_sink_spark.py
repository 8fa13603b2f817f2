"""`df.write` and `df.writeStream` with `format("keylane")`, in real Spark."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import keylane.spark
from keylane.server import NatsServer
from tests.integration.spark.sink_retry import ROWS
from tests.integration.spark.sink_rig import WAYS, judge, make_stream, stored
from tests.peers.store import REPOSITORY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _registered(spark: SparkSession) -> None:
    keylane.spark.register(spark)


def numbers(spark: SparkSession, stream: str, count: int) -> DataFrame:
    """Each subject in one task: between tasks there is no order."""
    return spark.range(count, numPartitions=2).selectExpr(
        f"concat('{stream}.', spark_partition_id(), '.', id % 7) AS subject", "cast(id AS string) AS data"
    )


def save(rows: DataFrame, url: str, stream: str, mode: str = "append", **options: str) -> None:
    rows.write.format("keylane").options(url=url, stream=stream, **options).mode(mode).save()


@pytest.mark.parametrize("way", WAYS)
def test_batch_write(spark: SparkSession, nats_server: NatsServer, unique: Callable[..., str], way: str) -> None:
    stream = make_stream(nats_server.url, unique("batch"), **WAYS[way])
    save(numbers(spark, stream, 20_000), nats_server.url, stream)
    judge(stored(nats_server.url, stream), range(20_000))


def test_two_writes_are_two_but_with_one_prefix(
    spark: SparkSession, nats_server: NatsServer, unique: Callable[..., str]
) -> None:
    stream = make_stream(nats_server.url, unique("batch"))
    rows = numbers(spark, stream, 100)
    for _ in range(2):
        save(rows, nats_server.url, stream)
    assert len(stored(nats_server.url, stream)) == 200
    for _ in range(2):
        save(rows, nats_server.url, stream, idPrefix="job-7")
    assert len(stored(nats_server.url, stream)) == 300


def test_all_columns(spark: SparkSession, nats_server: NatsServer, unique: Callable[..., str]) -> None:
    stream = make_stream(nats_server.url, unique("batch"))
    rows = spark.sql(
        f"""SELECT '{stream}.a' AS subject, X'00FF' AS data, map('Colour', 'red') AS headers, 'mine' AS message_id,
                   5L AS sequence, 'ORDERS' AS source_stream
            UNION ALL SELECT '{stream}.b', CAST(NULL AS BINARY), NULL, NULL, 6L, 'ORDERS'"""
    )
    save(rows, nats_server.url, stream, idPrefix="p")
    one, other = sorted(stored(nats_server.url, stream), key=lambda message: message.subject)
    assert (one.data, one.headers) == (b"\x00\xff", {"Nats-Msg-Id": "mine", "Colour": "red"})
    assert other.data == b""
    assert other.headers["Nats-Msg-Id"].startswith("p:ORDERS:6:")


@pytest.mark.parametrize(
    ("mode", "options", "columns", "told"),
    [
        ("overwrite", {}, "subject, data", "only appended to"),
        ("append", {}, "subject, data, data AS price", "column 'price' cannot be written: select only subject"),
        ("append", {}, "subject", "no column 'data'"),
        ("append", {"maxInFlight": "none"}, "subject, data", "option 'maxInFlight' is 'none'"),
        ("append", {"stream": "NOT-THERE"}, "subject, data", "there is no stream 'NOT-THERE'"),
        ("append", {"token": "hunter2"}, "subject, data", "option 'token' would put a secret"),
        ("append", {"atomic": "true"}, "subject, data", "takes no atomic batches"),
    ],
)
def test_mistakes_are_told_on_the_driver(  # noqa: PLR0917 - pytest passes them by name
    spark: SparkSession,
    nats_server: NatsServer,
    unique: Callable[..., str],
    mode: str,
    options: dict[str, str],
    columns: str,
    told: str,
) -> None:
    from pyspark.errors import AnalysisException  # noqa: PLC0415 - optional

    stream = make_stream(nats_server.url, unique("batch"))
    rows = numbers(spark, stream, 3).selectExpr(*columns.split(", "))
    with pytest.raises(AnalysisException) as raised:
        save(rows, nats_server.url, **{"stream": stream, "mode": mode} | options)
    assert told in str(raised.value)
    assert stored(nats_server.url, stream) == []


@pytest.mark.long("starts a Spark of its own")
def test_tasks_that_fail_or_die_once_write_nothing_twice(
    nats_server: NatsServer, unique: Callable[..., str], tmp_path: Path
) -> None:
    stream = make_stream(nats_server.url, unique("batch"))
    command = [sys.executable, "-m", "tests.integration.spark.sink_retry", str(tmp_path), nats_server.url, stream]
    job = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert job.returncode == 0, job.stderr
    assert "failed once: ['0', '1']" in job.stdout
    judge(stored(nats_server.url, stream), range(ROWS))


# ---- streaming ----------------------------------------------------------------------------------------


class Copy:
    """A query that copies one stream to another, each message as two rows."""

    def __init__(self, spark: SparkSession, url: str, source: str, target: str) -> None:
        self.spark, self.url, self.source, self.target = spark, url, source, target

    def run(self, checkpoint: Path, *, name: str | None = "copy", sequence: bool = True) -> None:
        read = self.spark.readStream.format("keylane").options(url=self.url, stream=self.source)
        columns = ["subject", "explode(array(0, 1)) AS half", "data", "sequence"]
        rows = read.option("maxOffsetsPerTrigger", "400").load().selectExpr(*columns)
        subject = f"concat('{self.target}', substring(subject, {len(self.source) + 1})) AS subject"
        wanted = [subject, "cast(2 * cast(cast(data AS string) AS int) + half AS string) AS data"]
        wanted += ["sequence"] if sequence else []
        write = rows.selectExpr(*wanted).writeStream.format("keylane").options(url=self.url, stream=self.target)
        write = write.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        query = (write.queryName(name) if name else write).start()
        query.awaitTermination()


def forget_last_commit(checkpoint: Path) -> int:
    """As if the driver had died before Spark wrote down the end of the last batch."""
    commits = checkpoint / "commits"
    last = max(int(one.name) for one in commits.iterdir() if one.name.isdecimal())
    for one in commits.glob(f"*{last}*"):
        if one.name in (str(last), f".{last}.crc"):
            one.unlink()
    return last


@pytest.fixture
def copy(spark: SparkSession, nats_server: NatsServer, unique: Callable[..., str]) -> Callable[..., Copy]:
    def make(**config: Any) -> Copy:
        source = make_stream(nats_server.url, unique("from"))
        target = make_stream(nats_server.url, unique("to"), **config)
        save(numbers(spark, source, 1000), nats_server.url, source)
        return Copy(spark, nats_server.url, source, target)

    return make


@pytest.mark.parametrize("way", WAYS)
def test_stream_to_stream(copy: Callable[..., Copy], tmp_path: Path, way: str) -> None:
    one = copy(**WAYS[way])
    one.run(tmp_path / "checkpoint")
    judge(stored(one.url, one.target), range(2000), ordered=False)


@pytest.mark.parametrize("sequence", [True, False])
def test_a_repeated_batch_is_known_by_its_ids(copy: Callable[..., Copy], tmp_path: Path, sequence: bool) -> None:
    one = copy()
    one.run(tmp_path / "checkpoint", name=None, sequence=sequence)
    forget_last_commit(tmp_path / "checkpoint")
    one.run(tmp_path / "checkpoint", name=None, sequence=sequence)
    judge(stored(one.url, one.target), range(2000), ordered=False)


@pytest.mark.long("runs two queries")
def test_a_repeated_batch_is_known_by_its_mark_when_the_ids_are_forgotten(
    copy: Callable[..., Copy], tmp_path: Path, unique: Callable[..., str]
) -> None:
    one = copy(duplicate_window=100_000_000)
    name = unique("copy")
    one.run(tmp_path / "checkpoint", name=name)
    forget_last_commit(tmp_path / "checkpoint")
    time.sleep(1)  # ten times the window
    one.run(tmp_path / "checkpoint", name=name)
    judge(stored(one.url, one.target), range(2000), ordered=False)


@pytest.mark.long("runs two queries")
def test_a_new_checkpoint_under_the_same_name_skips_nothing(
    copy: Callable[..., Copy], tmp_path: Path, unique: Callable[..., str]
) -> None:
    one = copy(duplicate_window=100_000_000)
    name = unique("copy")
    one.run(tmp_path / "first", name=name)
    time.sleep(1)  # ten times the window
    one.run(tmp_path / "second", name=name)
    found = Counter(int(message.data) for message in stored(one.url, one.target))
    assert found == dict.fromkeys(range(2000), 2)


def test_the_whole_result_cannot_be_written_again_and_again(
    spark: SparkSession, nats_server: NatsServer, unique: Callable[..., str], tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException  # noqa: PLC0415 - optional

    stream = make_stream(nats_server.url, unique("to"))
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", "10").load()
    counts = rate.groupBy().count().selectExpr("cast(count AS string) AS data")
    write = counts.writeStream.format("keylane").options(url=nats_server.url, stream=stream, subject=f"{stream}.count")
    with pytest.raises(StreamingQueryException, match="only appended to"):
        write.outputMode("complete").option("checkpointLocation", str(tmp_path / "c")).start().awaitTermination(120)
