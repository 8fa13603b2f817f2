"""The words of a range, the address as options, and Spark's errors in one line. No Spark in it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from keylane.errors import InvalidInput, KeylaneError, LakeBroken, ReadIncomplete
from keylane.spark.address import Address
from keylane.spark.options import read_options
from keylane.spark.pipelines.spark_jobs import _is_scan, plain_error
from keylane.spark.pipelines.stream_range import StreamRange, address_options, bounds

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("start", "end", "options"),
    [
        ("earliest", "latest", {"startingOffsets": "earliest", "endingOffsets": "latest"}),
        ("17", None, {"startingOffsets": "17"}),
        (None, "2026-05-01T10:00:00Z", {"endingTimestamp": "2026-05-01T10:00:00Z"}),
        ("-15m", "-30s", {"startingTimestamp": "2026-05-01T11:45:00+00:00",
                          "endingTimestamp": "2026-05-01T11:59:30+00:00"}),
        ("-1d2h", None, {"startingTimestamp": "2026-04-30T10:00:00+00:00"}),
        (None, None, {}),
    ],
)  # fmt: skip
def test_words_of_a_range(start: str | None, end: str | None, options: dict[str, str]) -> None:
    assert bounds(start, end, NOW) == options


@pytest.mark.parametrize("word", ["", "soon", "-", "-5", "-5y", "+5m", "1.5", "LATEST", "12:00"])
def test_what_is_no_place_in_a_stream(word: str) -> None:
    with pytest.raises(InvalidInput, match=r"from is .*give earliest, latest, a sequence"):
        bounds(word, None)
    with pytest.raises(InvalidInput, match="to is "):
        bounds(None, word)


def test_an_address_comes_back_out_of_its_options() -> None:
    address = Address(url="nats://a,nats://b", creds_file="x.creds", tls_first=True, domain="d", api_prefix="p")
    assert read_options(address_options(address) | {"stream": "S"}).address == address
    assert address_options(Address()) == {}


def test_a_range_in_words() -> None:
    assert str(StreamRange("S", "", 0, 1234)) == "S 1 to 1,234"
    assert str(StreamRange("S", "", 7, 7)) == "S, nothing"


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("x\n  File a\nkeylane.errors.ReadIncomplete: a replica lags\n\tat org.x", ReadIncomplete, "a replica lags"),
        ("keylane.errors.NotFound: there is no stream", KeylaneError, "there is no stream"),
        ("java.io.IOException: No space left on device\n\tat x", LakeBroken, "no space is left on the disk"),
        (
            "[PYTHON_ERROR]\nTraceback (most recent call last):\n  File x\nImportError: no name 'y'\n SQLSTATE: 38000",
            KeylaneError,
            "Spark ended the run: ImportError: no name 'y'",
        ),
        ("[STREAM_FAILED] it failed\n\tat org.x", KeylaneError, "Spark ended the run: [STREAM_FAILED] it failed"),
        ("", KeylaneError, "Spark gave no reason"),
    ],
)
def test_errors_of_spark_become_one_line(text: str, kind: type[KeylaneError], said: str) -> None:
    error = plain_error(text)
    assert type(error) is kind
    assert said in str(error)
    assert "\n" not in str(error)


def test_progress_counts_what_is_read_from_the_server() -> None:
    assert _is_scan("BatchScan keylane", "BatchScan keylane[subject#1, data#2] class PythonScan")
    assert not _is_scan("Scan parquet ", "FileScan parquet [offset#1] file:/tmp/keylane-claims-x/records")
    assert not _is_scan("Exchange", "keylane")
