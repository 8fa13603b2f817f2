"""The reader's options: what they say, and what is told about each mistake."""

from __future__ import annotations

import traceback
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.core.partitions import Partitioning
from keylane.errors import InvalidInput
from keylane.spark.address import ADDRESS_NAMES
from keylane.spark.options import READER_NAMES, Mode, RangeBound, read_options

SEED = "SUhunter2".upper() + "A" * 52
CREDS = "-----BEGIN NATS USER JWT-----\nhunter2"
MODES: tuple[Mode, ...] = ("batch", "streaming")
NOON = datetime(2025, 3, 31, 12, tzinfo=UTC)


def test_defaults() -> None:
    read = read_options({"stream": "ORDERS"}, "streaming")
    assert (read.stream, read.group, read.member, read.partitions, read.filters) == ("ORDERS", None, None, None, ())
    assert (read.start, read.end) == (RangeBound("earliest"), RangeBound("latest"))
    assert (read.fail_on_data_loss, read.with_headers, read.with_data, read.acknowledge) == (True, False, True, False)
    assert (read.max_offsets, read.max_bytes, read.split_by, read.min_partitions) == (None, None, None, None)
    assert (read.query_name, read.lease_s) == (None, 10.0)


def test_names_in_any_case() -> None:
    read = read_options(
        {"STREAM": "ORDERS", "startingoffsets": "Earliest", "IncludeHeaders": "TRUE", "URL": "nats://x"}, "batch"
    )
    assert (read.stream, read.with_headers, read.address.url) == ("ORDERS", True, "nats://x")


def test_everything_that_a_streaming_read_takes() -> None:
    read = read_options(
        {
            "stream": "ORDERS",
            "group": "billing",
            "queue": "true",
            "member": "m1",
            "filter": "orders.eu.*, orders.us.*",
            "splitBy": "Sequence",
            "minPartitions": "8",
            "startingOffsets": "latest",
            "maxOffsetsPerTrigger": "1000",
            "maxBytesPerTrigger": "1000000",
            "failOnDataLoss": "false",
            "queryName": "lake-1",
            "leaseSeconds": "2.5",
            "acknowledge": "true",
        },
        "streaming",
    )
    assert (read.group, read.queue, read.member) == ("billing", True, "m1")
    assert read.filters == ("orders.eu.*", "orders.us.*")
    assert (read.split_by, read.min_partitions, read.start.kind) == ("sequence", 8, "latest")
    assert (read.max_offsets, read.max_bytes, read.fail_on_data_loss) == (1000, 1_000_000, False)
    assert (read.query_name, read.lease_s, read.acknowledge) == ("lake-1", 2.5, True)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0", (0,)), ("0-3,7", (0, 1, 2, 3, 7)), (" 7 , 0-1", (0, 1, 7)), ("5-5", (5,))],
)
def test_partitions(text: str, numbers: tuple[int, ...]) -> None:
    assert read_options({"stream": "S", "partitions": text}).partitions == numbers


@given(st.sets(st.integers(0, 500), min_size=1))
def test_partitions_one_by_one(numbers: set[int]) -> None:
    text = ",".join(map(str, numbers))
    assert read_options({"stream": "S", "partitions": text}).partitions == tuple(sorted(numbers))


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2025-03-31T12:00:00Z", NOON),
        ("2025-03-31T14:00:00+02:00", NOON),
        ("1743422400000", NOON),
        ("1743422400001", NOON + timedelta(milliseconds=1)),
    ],
)
def test_timestamps(text: str, time: datetime) -> None:
    assert read_options({"stream": "S", "startingTimestamp": text}).start == RangeBound("time", time=time)
    assert read_options({"stream": "S", "endingTimestamp": text}, "batch").end.time.tzinfo == timezone.utc  # noqa: UP017 - the object itself


def test_a_subject_that_looks_like_a_login_is_none() -> None:
    assert read_options({"stream": "S", "filter": "door:1@home.open"}).filters == ("door:1@home.open",)
    assert read_options({"stream": "S", "credsFile": "/home/a@b/x.creds"}).address.creds_file == "/home/a@b/x.creds"


def test_keys_of_a_plain_stream() -> None:
    keys = {"stream": "S", "keyFilter": "orders.*.*", "keyPartitions": "10"}
    assert read_options(keys).keys == Partitioning("orders.*.*", (1, 2), 10)
    assert read_options({**keys, "keyWildcards": "2,1"}).keys == Partitioning("orders.*.*", (2, 1), 10)
    assert read_options({"stream": "S", "keyFilter": "orders.>", "keyPartitions": "4"}).keys == Partitioning(
        "orders.>", (), 4
    )


BOTH: list[tuple[dict[str, str], str]] = [
    ({}, r"option 'stream' is missing"),
    ({"stream": ""}, r"option 'stream' is empty"),
    ({"stream": "a.b"}, r"option 'stream': stream name 'a\.b' holds '\.'"),
    ({"strem": "S"}, r"option 'strem' is not one of the reader's: did you mean 'stream'\?.*It knows stream, group"),
    ({"stream": "S", "startingOffset": "1"}, r"did you mean 'startingOffsets'"),
    ({"stream": "S", "kafka.bootstrap.servers": "x"}, r"option 'kafka.bootstrap.servers' .*It knows stream"),
    ({"stream": "S", "path": "/x"}, r"option 'path'"),
    ({"stream": "S", "servers": "nats://u:hunter2@h"}, r"option 'servers' is not one of the reader's"),
    ({"stream": "S", "credFile": "hunter2"}, r"option 'credFile' is not one .*did you mean 'credsFile'"),
    ({"stream": "nats://u:hunter2@h/S"}, r"option 'stream' would put a secret"),
    ({"stream": "S", "context": "u:hunter2@h"}, r"option 'context' would put a secret"),
    ({"stream": "S", "nkeySeedFile": SEED}, r"option 'nkeySeedFile' would put a secret"),
    ({"stream": "S", "credsFile": CREDS}, r"option 'credsFile' would put a secret"),
    ({"stream": "S", "filter": "nats://u:hunter2@h:4222"}, r"option 'filter' would put a secret"),
    *(
        ({"stream": "S", name: "hunter2"}, rf"option '{name}' would put a secret")
        for name in (
            "password",
            "passwd",
            "natsPassword",
            "NATS_PASSWORD",
            "pw",
            "natsPw",
            "pwd",
            "passphrase",
            "secret",
            "clientSecret",
            "token",
            "authToken",
            "nkey",
            "nkeySeed",
            "seed",
            "creds",
            "natsCredentials",
            "jwt",
            "userJwt",
            "privateKey",
            "signing_key",
            "apiKey",
            "user",
            "natsUser",
            "username",
        )
    ),
    *(
        ({"stream": "S", "url": url}, r"option 'url' has a user or a password")
        for url in (
            "nats://u:hunter2@h",
            "u:hunter2@h",
            "hunter2@h",
            "nats://hunter2@h",
            "nats://h,u:hunter2@i",
            "//u:hunter2@h",
            "nats://u:hunter2/x@h",
            "nats://u:hunter2?x#y@h",
            "nats:u:hunter2@h",
            "TLS://u:hunter2@h",
            "u:hunter2%40h",
        )
    ),
    ({"stream": "S", "group": "a b"}, r"option 'group'"),
    ({"stream": "S", "member": "m"}, r"option 'member' \('m'\) needs option 'group'"),
    ({"stream": "S", "queue": "true"}, r"option 'queue' is true and needs option 'group'"),
    ({"stream": "S", "group": "g", "queue": "yes"}, r"option 'queue' is 'yes': give true or false"),
    ({"stream": "S", "group": "g", "member": "m", "partitions": "1"}, r"'member' \('m'\) and 'partitions' \('1'\)"),
    ({"stream": "S", "partitions": "a"}, r"option 'partitions' is 'a': give numbers and ranges"),
    ({"stream": "S", "partitions": "1,,2"}, r"option 'partitions' is '1,,2'"),
    ({"stream": "S", "partitions": "3-1"}, r"the range '3-1' holds no partition"),
    ({"stream": "S", "partitions": "1-3,2"}, r"partition 2 is named twice"),
    ({"stream": "S", "partitions": "0-2000000"}, r"more than 100,000"),
    ({"stream": "S", "partitions": "-1"}, r"option 'partitions' is '-1'"),
    ({"stream": "S", "filter": "a..b"}, r"option 'filter' is 'a\.\.b'"),
    ({"stream": "S", "filter": "a.*,a.b"}, r"'a\.\*' and 'a\.b' overlap"),
    ({"stream": "S", "keyWildcards": "1"}, r"option 'keyWildcards' \(value '1'\) needs option 'keyFilter'"),
    ({"stream": "S", "keyPartitions": "1"}, r"option 'keyPartitions' \(value '1'\) needs option 'keyFilter'"),
    ({"stream": "S", "keyFilter": "a.*"}, r"needs option 'keyPartitions'"),
    ({"stream": "S", "keyFilter": "a.*", "keyPartitions": "0"}, r"option 'keyPartitions' is '0'"),
    ({"stream": "S", "keyFilter": "a.*", "keyPartitions": "3", "keyWildcards": "2"}, r"wildcard 2 is out of range"),
    ({"stream": "S", "keyFilter": "a.*", "keyPartitions": "3", "keyWildcards": "x"}, r"'keyWildcards' is 'x'"),
    ({"stream": "S", "keyFilter": "a.*", "keyPartitions": "3", "group": "g"}, r"'keyFilter' .* and 'group' \('g'\)"),
    ({"stream": "S", "keyFilter": "a.*", "keyPartitions": "3", "partitions": "1"}, r"and 'partitions' \('1'\)"),
    ({"stream": "S", "keyFilter": "a.*", "keyPartitions": "3", "splitBy": "partition"}, r"use splitBy=sequence"),
    ({"stream": "S", "splitBy": "key"}, r"option 'splitBy' is 'key': give partition or sequence"),
    ({"stream": "S", "minPartitions": "0"}, r"option 'minPartitions' is '0': give a whole number from 1 on"),
    ({"stream": "S", "startingOffsets": "0"}, r"option 'startingOffsets' is '0': give earliest, latest, or a seq"),
    ({"stream": "S", "startingOffsets": "soon"}, r"option 'startingOffsets' is 'soon'"),
    ({"stream": "S", "startingOffsets": '{"S": 1}'}, r"option 'startingOffsets' is '\{"),
    ({"stream": "S", "startingOffsets": "1", "startingTimestamp": "1"}, r"'startingOffsets' \('1'\) and 'starting"),
    ({"stream": "S", "startingTimestamp": "yesterday"}, r"'startingTimestamp' is 'yesterday': give a time such as"),
    ({"stream": "S", "startingTimestamp": "2025-03-31T12:00:00"}, r"without a time zone"),
    ({"stream": "S", "startingTimestamp": "99999999999999999999"}, r"are not a date"),
    ({"stream": "S", "failOnDataLoss": "yes"}, r"option 'failOnDataLoss' is 'yes': give true or false"),
    ({"stream": "S", "includeHeaders": "1"}, r"option 'includeHeaders' is '1'"),
    ({"stream": "S", "includeData": "no"}, r"option 'includeData' is 'no'"),
]

STREAMING: list[tuple[dict[str, str], str]] = [
    ({"stream": "S", "endingOffsets": "latest"}, r"option 'endingOffsets' \(value 'latest'\) is for batch reads"),
    ({"stream": "S", "endingTimestamp": "1"}, r"option 'endingTimestamp' \(value '1'\) is for batch reads"),
    ({"stream": "S", "maxOffsetsPerTrigger": "-5"}, r"option 'maxOffsetsPerTrigger' is '-5'"),
    ({"stream": "S", "maxBytesPerTrigger": "10m"}, r"option 'maxBytesPerTrigger' is '10m'"),
    ({"stream": "S", "startingOffsets": "latest"}, r"'startingOffsets' is 'latest' and needs 'queryName'"),
    ({"stream": "S", "acknowledge": "true"}, r"option 'acknowledge' is true and needs 'queryName'"),
    ({"stream": "S", "leaseSeconds": "5"}, r"option 'leaseSeconds' \('5'\) needs option 'queryName'"),
    ({"stream": "S", "queryName": "q", "leaseSeconds": "0"}, r"option 'leaseSeconds' is '0': give 1 to"),
    ({"stream": "S", "queryName": "q", "leaseSeconds": "nan"}, r"option 'leaseSeconds' is 'nan'"),
    ({"stream": "S", "queryName": "a b"}, r"option 'queryName'.*'a b'"),
]

BATCH: list[tuple[dict[str, str], str]] = [
    ({"stream": "S", "maxOffsetsPerTrigger": "5"}, r"option 'maxOffsetsPerTrigger' \(value '5'\) is for streaming"),
    ({"stream": "S", "maxBytesPerTrigger": "5"}, r"option 'maxBytesPerTrigger' \(value '5'\) is for streaming"),
    ({"stream": "S", "queryName": "q"}, r"option 'queryName' \(value 'q'\) is for streaming"),
    ({"stream": "S", "acknowledge": "false"}, r"option 'acknowledge' \(value 'false'\) is for streaming"),
    ({"stream": "S", "startingOffsets": "latest"}, r"'startingOffsets' is 'latest': a batch read would be empty"),
    ({"stream": "S", "endingOffsets": "earliest"}, r"'endingOffsets' is 'earliest': a batch read would be empty"),
    ({"stream": "S", "endingOffsets": "1", "endingTimestamp": "1"}, r"'endingOffsets' \('1'\) and 'endingTimestamp'"),
    (
        {"stream": "S", "startingOffsets": "9", "endingOffsets": "7"},
        r"'endingOffsets' is 7, before 'startingOffsets' 9",
    ),
    ({"stream": "S", "startingTimestamp": "9", "endingTimestamp": "7"}, r"before 'startingTimestamp'"),
]


@pytest.mark.parametrize(
    ("mode", "options", "told"),
    [
        *(("batch", *one) for one in BOTH),
        *(("streaming", *one) for one in BOTH),
        *(("streaming", *one) for one in STREAMING),
        *(("batch", *one) for one in BATCH),
    ],
)
def test_each_mistake_is_told(mode: Mode, options: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidInput, match=told) as caught:
        read_options(options, mode)
    told_in_full = "".join(traceback.format_exception(caught.value, chain=True))
    raised = told_in_full[told_in_full.rindex("InvalidInput") :]
    assert "hunter2" not in raised.lower()
    assert caught.value.__cause__ is None or "hunter2" not in str(caught.value.__cause__).lower()


@pytest.mark.parametrize(("options", "told"), BOTH)
def test_mistakes_are_told_before_the_mode_is_known(options: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        read_options(options)


@given(st.dictionaries(st.sampled_from((*READER_NAMES, *ADDRESS_NAMES)), st.text(max_size=12), max_size=5))
def test_any_text_is_read_or_refused(options: dict[str, str]) -> None:
    for mode in MODES:
        with suppress(InvalidInput):
            assert read_options({"stream": "S", **options}, mode).stream == options.get("stream", "S").strip()
