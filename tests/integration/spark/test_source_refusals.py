"""What a user sees of a mistake: the words of the source, at once, in Spark's own exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from keylane.server import NatsServer
from tests.integration.spark.source_rig import Ground, ground

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(500)]

Unique = Callable[..., str]


@pytest.fixture
def here(nats_server: NatsServer, spark: SparkSession) -> Iterator[Ground]:
    with ground(nats_server.url, spark) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strem": "S"}, r"option 'strem' is not one of the reader's: did you mean 'stream'\?"),
        ({"stream": "S", "natsPassword": "hunter2"}, r"option 'natspassword' would put a secret"),
        ({"stream": "S", "url": "alice:hunter2@host"}, r"option 'url' has a user or a password"),
        ({"stream": "S", "password": "hunter2"}, r"option 'password' would put a secret into Spark's plans"),
        ({"stream": "S", "member": "m"}, r"option 'member' \('m'\) needs option 'group'"),
    ],
)
def test_load_refuses(here: Ground, options: dict[str, str], told: str) -> None:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - optional

    for reader in (here.spark.read, here.spark.readStream):
        with pytest.raises(PySparkException, match=told) as caught:
            reader.format("keylane").option("url", here.url).options(**options).load()
        assert "hunter2" not in str(caught.value)


def test_start_and_collect_refuse_what_belongs_to_the_other(here: Ground, unique: Unique, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - optional

    name = here.make(unique("S"))
    with pytest.raises(PySparkException, match=r"option 'maxOffsetsPerTrigger' \(value '5'\) is for streaming reads"):
        here.read(name, maxOffsetsPerTrigger=5).collect()
    query = here.start(here.stream(name, endingOffsets=5), tmp_path)
    with pytest.raises(PySparkException, match=r"option 'endingOffsets' \(value '5'\) is for batch reads"):
        query.awaitTermination(150)


def test_a_schema_of_ones_own_is_refused(here: Ground, unique: Unique, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - optional

    name = here.make(unique("S"))
    reader = here.spark.read.format("keylane").option("url", here.url).option("stream", name)
    with pytest.raises(PySparkException, match=r"the schema given to the reader is struct<subject:string,data:string>"):
        reader.schema("subject STRING, data STRING").load().collect()
    frame = (
        here.spark.readStream.format("keylane").option("url", here.url).option("stream", name).schema("a INT").load()
    )
    query = here.start(frame, tmp_path)
    with pytest.raises(PySparkException, match=r"leave \.schema\(\) out"):
        query.awaitTermination(150)
    same = reader.schema(here.read(name).schema).load()
    assert same.collect() == []


@pytest.mark.long("waits until a query gives its server up")
def test_no_stream_no_group_no_server(here: Ground, unique: Unique, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - optional

    name = here.make(unique("S"))
    with pytest.raises(PySparkException, match=r"NotFound: .*there is no stream 'NOBODY'"):
        here.read("NOBODY").collect()
    with pytest.raises(PySparkException, match=r"NoSuchGroup: stream .* has no group 'g'"):
        here.read(name, group="g").collect()
    frame = here.spark.readStream.format("keylane").option("url", "nats://127.0.0.1:1").option("stream", name).load()
    query = here.start(frame, tmp_path)
    with pytest.raises(PySparkException, match=r"ServerUnreachable: gave up after \d+ s trying to look at stream"):
        query.awaitTermination(150)


@pytest.mark.long("runs three queries")
def test_a_loss_is_told_in_the_querys_exception(here: Ground, unique: Unique, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - optional

    name = here.make(unique("S"), numbered=True)
    here.publish(name, range(10))
    here.run(here.stream(name), tmp_path)
    here.publish(name, range(10, 20))
    here.api(f"STREAM.PURGE.{name}", {"seq": 15})
    with pytest.raises(PySparkException, match=r"DataLost: .*sequences 11 to 14, at most 4 messages, are gone"):
        here.run(here.stream(name), tmp_path)
    here.run(here.stream(name, failOnDataLoss="false"), tmp_path)
    assert [row["sequence"] for row in here.written(tmp_path)] == [*range(1, 11), *range(15, 21)]
