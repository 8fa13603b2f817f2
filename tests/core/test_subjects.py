"""Rules for subjects, filters and names: what is refused and in which words, what matches what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keylane.core.names import (
    MAX_NAME_BYTES,
    check_consumer_name,
    check_group_name,
    check_member_name,
    check_stream_name,
)
from keylane.core.subjects import (
    MAX_SUBJECT_BYTES,
    check_filter,
    check_subject,
    is_subset,
    matches,
    nested_filters,
    overlaps,
    tokens,
    wildcard_positions,
)
from keylane.errors import InvalidInput

ANY_TEXT = (check_subject, check_filter)
ANY_NAME = (check_stream_name, check_consumer_name, check_group_name, check_member_name)


def refusal(check: Callable[[str], str], value: str) -> str:
    with pytest.raises(InvalidInput) as raised:
        check(value)
    return str(raised.value)


@pytest.mark.parametrize(
    "subject", ["a", "orders.eu.42", "é.ß.日本", "$JS.x", "a-b_c:d/e\\f", "{{x}}", "😀", "a." * 999 + "a"]
)
def test_good_subjects_come_back_unchanged(subject: str) -> None:
    assert check_subject(subject) == subject
    assert check_filter(subject) == subject


@pytest.mark.parametrize("subject_filter", [">", "*", "*.*", "orders.>", "orders.*.>", "*.a.*"])
def test_good_filters_come_back_unchanged(subject_filter: str) -> None:
    assert check_filter(subject_filter) == subject_filter


@pytest.mark.parametrize("check", ANY_TEXT)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "is empty"),
        ("a b", "' ' at position 2: a {what} holds no whitespace"),
        ("a\tb", r"'\t' at position 2: a {what} holds no whitespace"),
        ("a\r\nPUB x", r"'\r' at position 2: a {what} holds no whitespace"),
        ("a\u00a0b", r"'\xa0' at position 2: a {what} holds no whitespace"),
        ("a.\u2028", r"'\u2028' at position 3: a {what} holds no whitespace"),
        ("a\x00b", r"'\x00' at position 2: a {what} holds no control characters"),
        ("a\x7f", r"'\x7f' at position 2: a {what} holds no control characters"),
        ("a\x9bb", r"'\x9b' at position 2: a {what} holds no control characters"),
        ("a\udcff", r"'\udcff' at position 2: it stands for a byte that is not UTF-8"),
        (".a", "starts with a dot"),
        (".", "starts with a dot"),
        ("a.", "ends with a dot"),
        ("a..b", "an empty token at position 3"),
    ],
)
def test_each_broken_rule_is_named(check: Callable[[str], str], value: str, said: str) -> None:
    what = "subject" if check is check_subject else "filter"
    message = refusal(check, value)
    assert message.startswith(f"{what} {value!a} ")
    assert said.format(what=what) in message


@pytest.mark.parametrize("check", ANY_TEXT)
def test_length_is_counted_in_bytes(check: Callable[[str], str]) -> None:
    fits = "é" * (MAX_SUBJECT_BYTES // 2)
    assert check(fits) == fits
    message = refusal(check, fits + "x")
    assert f"is {MAX_SUBJECT_BYTES + 1} bytes long: at most {MAX_SUBJECT_BYTES} fit" in message
    assert len(message) < 400, "a long value is cut in the message"


@pytest.mark.parametrize("check", ANY_TEXT)
@pytest.mark.parametrize("value", [None, b"orders", 3])
def test_only_text_is_taken(check: Callable[[str], str], value: object) -> None:
    assert f"is {type(value).__name__}, not text" in refusal(check, value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "char", "position"), [("a.*", "*", 3), ("a.>", ">", 3), ("foo*", "*", 4), (">", ">", 1)]
)
def test_nothing_is_published_to_a_wildcard(value: str, char: str, position: int) -> None:
    assert f"holds the wildcard '{char}' at position {position}" in refusal(check_subject, value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("a.foo*", "'*' inside token 2 ('foo*')"),
        ("*foo.a", "'*' inside token 1 ('*foo')"),
        ("a.**", "'*' inside token 2 ('**')"),
        ("a.foo>", "'>' inside token 2 ('foo>')"),
        ("a.>>", "'>' inside token 2 ('>>')"),
        ("a.>.b", "'>' as token 2 of 3"),
        (">.>", "'>' as token 1 of 2"),
    ],
)
def test_wildcards_are_whole_tokens(value: str, said: str) -> None:
    message = refusal(check_filter, value)
    assert message.startswith(f"filter '{value}' ")
    assert said in message


@pytest.mark.parametrize("check", ANY_NAME)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "is empty"),
        ("A b", "' ' at position 2: a {what} holds no whitespace"),
        ("A\u2003", r"'\u2003' at position 2: a {what} holds no whitespace"),
        ("A\x01", r"'\x01' at position 2: a {what} holds no control characters"),
        ("A\ud800", r"'\ud800' at position 2: it stands for a byte that is not UTF-8"),
        ("A.b", "'.' at position 2: a dot separates"),
        ("A*", "'*' at position 2: '*' is a wildcard"),
        ("A>", "'>' at position 2: '>' is a wildcard"),
        ("../A", "'.' at position 1"),
        ("A/b", "'/' at position 2: names become file names"),
        ("A\\b", r"'\\' at position 2: names become file names"),
        (
            "A" * (MAX_NAME_BYTES + 1),
            f"is {MAX_NAME_BYTES + 1} bytes long: the server allows {MAX_NAME_BYTES}",
        ),
    ],
)
def test_each_broken_rule_of_names_is_named(check: Callable[[str], str], value: str, said: str) -> None:
    what = check.__name__.removeprefix("check_").replace("_", " ")
    message = refusal(check, value)
    assert message.startswith(f"{what} ")
    assert said.format(what=what) in message


@pytest.mark.parametrize("check", ANY_NAME)
@pytest.mark.parametrize("name", ["A", "orders-eu_1=", "A" * MAX_NAME_BYTES])
def test_good_names_come_back_unchanged(check: Callable[[str], str], name: str) -> None:
    assert check(name) == name


@pytest.mark.parametrize("check", ANY_NAME)
def test_names_must_be_text(check: Callable[[str], str]) -> None:
    assert "is NoneType, not text" in refusal(check, None)  # type: ignore[arg-type]


def test_only_group_names_must_fit_a_kv_key() -> None:
    for check in (check_stream_name, check_consumer_name, check_member_name):
        assert check("é:1") == "é:1"
    assert "'é' at position 2: a group name is part of a KV key" in refusal(check_group_name, "xé")
    assert "':' at position 1" in refusal(check_group_name, ":x")


@pytest.mark.parametrize(
    ("subject_filter", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.b", "a", False),
        ("a", "a.b", False),
        ("*", "a", True),
        ("*", "a.b", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        (">", "a", True),
        (">", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "a.b", True),
        ("a.>", "b.a", False),
        ("*.>", "a", False),
        ("*.>", "a.b.c", True),
        ("a.*", "a.>", True),
        ("a.*.c", "a.>.c", True),
        ("a.b", "a.*", False),
    ],
)
def test_matches(subject_filter: str, subject: str, expected: bool) -> None:
    assert matches(subject_filter, subject) is expected


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a.*", "a.b", True),
        ("a.*", "*.b", True),
        ("a.*.x", "a.*.y", False),
        ("a.*.x", "a.b.*", True),
        ("a.>", "a", False),
        ("a.>", "*", False),
        ("a.>", "*.*", True),
        ("a.*", "a.*.>", False),
        (">", "*.*.c", True),
        ("a.b.>", "a.>", True),
        ("a.b.>", "a.c.>", False),
    ],
)
def test_overlaps_both_ways(left: str, right: str, expected: bool) -> None:
    assert overlaps(left, right) is expected
    assert overlaps(right, left) is expected


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("a", "a", True),
        ("a.b", "a.*", True),
        ("a.*", "a.b", False),
        ("a.*", "a.>", True),
        ("a.>", "a.*", False),
        ("a.>", "a.>", True),
        ("a.b.>", "a.>", True),
        ("a.>", "a.*.>", False),
        ("a.*.>", "a.>", True),
        ("a.*.x", "a.b.*", False),
        (">", "*", False),
        ("*", ">", True),
        ("a", "a.>", False),
        ("a.b", "a", False),
    ],
)
def test_is_subset(inner: str, outer: str, expected: bool) -> None:
    assert is_subset(inner, outer) is expected


def test_nested_filters_names_the_narrower_first() -> None:
    assert nested_filters(["a.*", "b.*", "a.x"]) == ("a.x", "a.*")
    assert nested_filters(["a.x", "b.*", "a.*"]) == ("a.x", "a.*")
    assert nested_filters(["a", "a"]) == ("a", "a")
    assert nested_filters(["a.*.x", "a.b.*"]) is None
    assert nested_filters([]) is None


def test_tokens_and_wildcard_positions() -> None:
    assert tokens("orders.eu.42") == ["orders", "eu", "42"]
    assert wildcard_positions("*.a.*.>") == (0, 2)
    assert wildcard_positions("a.>") == ()
