"""A writer's options and columns: each mistake is told with its name, its value and what is allowed."""

from __future__ import annotations

import pytest

from keylane.errors import InvalidInput
from keylane.spark.options import WriteOptions, check_columns, write_options


def test_defaults() -> None:
    options = write_options({"stream": "ORDERS"}, streaming=False)
    assert (options.max_in_flight, options.max_in_flight_bytes) == (4000, 16 * 1024 * 1024)
    assert (options.publish_timeout_s, options.atomic, options.dead_letters) == (60.0, "auto", False)
    assert options.subject is options.query_name is options.id_prefix is None


def test_all_given_in_any_case() -> None:
    options = write_options(
        {
            "STREAM": "ORDERS",
            "Subject": "orders.new",
            "queryname": "copy",
            "IDPREFIX": "job-7",
            "maxinflight": "10",
            "maxInFlightBytes": "1000",
            "publishTimeoutSeconds": "2.5",
            "atomic": "TRUE",
            "deadLetters": "true",
            "checkpointLocation": "/data/checkpoint",
            "url": "nats://127.0.0.1:4222",
        },
        streaming=True,
    )
    assert options == WriteOptions(
        address=options.address,
        stream="ORDERS",
        subject="orders.new",
        query_name="copy",
        id_prefix="job-7",
        max_in_flight=10,
        max_in_flight_bytes=1000,
        publish_timeout_s=2.5,
        atomic="true",
        dead_letters=True,
    )
    assert options.address.url == "nats://127.0.0.1:4222"


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("stream", "OR.DERS", r"option 'stream': .*'OR\.DERS'.*dot"),
        ("stream", " ", "option 'stream' is empty"),
        ("subject", "orders.*", r"option 'subject': .*wildcard"),
        ("subject", "a b", r"option 'subject': .*whitespace"),
        ("queryName", "my query", "queryName is 'my query': .*A-Z"),
        ("idPrefix", "a b", "option 'idPrefix' is 'a b'"),
        ("maxInFlight", "0", "option 'maxInFlight' is '0': give a whole number from 1"),
        ("maxInFlight", "many", "option 'maxInFlight' is 'many'"),
        ("maxInFlightBytes", "-1", "option 'maxInFlightBytes' is '-1'"),
        ("publishTimeoutSeconds", "0", "option 'publishTimeoutSeconds' is '0'"),
        ("publishTimeoutSeconds", "nan", "option 'publishTimeoutSeconds' is 'nan'"),
        ("publishTimeoutSeconds", "soon", "option 'publishTimeoutSeconds' is 'soon'"),
        ("atomic", "yes", "option 'atomic' is 'yes': give true, false or auto"),
        ("deadLetters", "1", "option 'deadLetters' is '1': give true or false"),
        ("subjects", "a", "option 'subjects' is not .* did you mean 'subject'"),
        ("startingOffsets", "earliest", "option 'startingOffsets' is not one of the writer's.*maxInFlight"),
        ("path", "/data", r"a path was given"),
        ("password", "hunter2", "option 'password' would put a secret"),
        ("natsPasswd", "hunter2", "option 'natsPasswd' would put a secret"),
        ("servers", "nats://me:hunter2@host", "option 'servers' is not one of the writer's"),
        ("path", "nats://me:hunter2@host", "a path was given"),
        ("stream", "nats://me:hunter2@host", "option 'stream' would put a secret"),
        ("url", "nats://me:hunter2@host", "option 'url' has a user or a password"),
        ("url", "me:hunter2@host", "option 'url' has a user or a password"),
    ],
)
def test_bad_options(option: str, value: str, told: str) -> None:
    given = {"stream": "ORDERS", option: value}
    with pytest.raises(InvalidInput, match=told) as raised:
        write_options(given, streaming=True)
    assert "hunter2" not in str(raised.value)


def test_a_stream_is_needed() -> None:
    with pytest.raises(InvalidInput, match="option 'stream' is missing"):
        write_options({}, streaming=False)


def test_a_batch_write_has_no_query_name() -> None:
    with pytest.raises(InvalidInput, match=r"'queryName' .* is for streaming writes: give 'idPrefix'"):
        write_options({"stream": "ORDERS", "queryName": "copy"}, streaming=False)


ALL = [
    ("subject", "string"),
    ("data", "binary"),
    ("headers", "map<string,string>"),
    ("message_id", "string"),
    ("sequence", "bigint"),
    ("source_stream", "string"),
]


@pytest.mark.parametrize(
    ("columns", "subject"),
    [
        (ALL, None),
        ([("data", "string")], "orders.new"),
        ([("SUBJECT", "string"), ("Data", "binary"), ("sequence", "int")], None),
    ],
)
def test_good_columns(columns: list[tuple[str, str]], subject: str | None) -> None:
    check_columns(columns, subject)


@pytest.mark.parametrize(
    ("columns", "subject", "told"),
    [
        ([*ALL, ("price", "double")], None, r"column 'price' cannot be written: select only subject \(string\), data"),
        ([("subject", "string"), ("data", "struct<a:int>")], None, "'data' has type struct<a:int>: cast it to binary"),
        ([("subject", "int"), ("data", "binary")], None, "'subject' has type int: cast it to string"),
        ([("subject", "string")], None, "no column 'data'"),
        ([("data", "binary")], None, "no column 'subject' and no option 'subject'"),
        ([("subject", "string"), ("data", "binary")], "a.b", "both say where rows go"),
        ([("data", "binary"), ("DATA", "binary")], "a.b", "column 'DATA' is there twice"),
    ],
)
def test_bad_columns(columns: list[tuple[str, str]], subject: str | None, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        check_columns(columns, subject)
