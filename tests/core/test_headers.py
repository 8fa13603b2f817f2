"""Header blocks: every mapping comes back as it was, and what cannot be sent is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.errors import InvalidInput
from keylane.jetstream import encode_headers, parse_headers, status_of
from keylane.jetstream.headers import header_items

names = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"), min_size=1, max_size=20)
values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=40).map(str.strip)
# What Python calls whitespace and NATS does not: `strip` on bytes takes the ASCII kinds only.
values = values.filter(lambda value: value.encode().strip().decode() == value)


@given(st.dictionaries(names, values, max_size=8))
def test_encoded_headers_come_back(headers: dict[str, str]) -> None:
    raw = encode_headers(headers)
    assert raw.startswith(b"NATS/1.0\r\n")
    assert raw.endswith(b"\r\n\r\n")
    assert parse_headers(raw) == headers
    assert list(header_items(raw)) == list(headers.items())
    assert status_of(raw) == (0, "")


@given(st.lists(st.tuples(names, values), max_size=8))
def test_repeated_names_are_all_there_and_the_first_counts(items: list[tuple[str, str]]) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in items)
    raw = f"NATS/1.0\r\n{lines}\r\n".encode()
    assert list(header_items(raw)) == items
    assert parse_headers(raw) == dict(reversed(items))


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read(raw: bytes) -> None:
    assert len(parse_headers(raw)) <= len(list(header_items(raw)))
    code, text = status_of(raw)
    assert code >= 0
    assert isinstance(text, str)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"NATS/1.0 503\r\n\r\n", (503, "")),
        (b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 1\r\n\r\n", (408, "Request Timeout")),
        (b"NATS/1.0 409 Exceeded MaxRequestBatch of 2\r\n\r\n", (409, "Exceeded MaxRequestBatch of 2")),
        (b"NATS/1.0 100", (100, "")),
        (b"NATS/1.0\r\nA: 1\r\n\r\n", (0, "")),
        (b"", (0, "")),
    ],
)
def test_statuses(raw: bytes, status: tuple[int, str]) -> None:
    assert status_of(raw) == status


def test_whitespace_around_a_value_is_not_kept() -> None:
    assert parse_headers(encode_headers({"A": "  two words\t"})) == {"A": "two words"}
    assert parse_headers(b"NATS/1.0\r\nA:no gap\r\nB:\r\n\r\n") == {"A": "no gap", "B": ""}


@given(st.text(min_size=1).filter(lambda name: not all("!" <= char <= "~" and char != ":" for char in name)))
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not valid: use printable ASCII"):
        encode_headers({name: "x"})


@given(st.text(), st.sampled_from("\r\n\ud800\udfff"), st.text())
def test_bad_values_are_refused(before: str, bad: str, after: str) -> None:
    with pytest.raises(InvalidInput, match="value of header 'A'"):
        encode_headers({"A": before + bad + after})


@pytest.mark.parametrize("headers", [{1: "x"}, {"A": None}, {"A": b"x"}, {"A": ["x"]}])
def test_other_types_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="header"):
        encode_headers(headers)
