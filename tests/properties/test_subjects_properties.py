"""Matching, overlap and subset against versions too simple to be wrong; checks against arbitrary text."""

from __future__ import annotations

import functools
import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from keylane.core.names import check_consumer_name, check_group_name, check_member_name, check_stream_name
from keylane.core.subjects import check_filter, check_subject, is_subset, matches, nested_filters, overlaps
from keylane.errors import InvalidInput

LONGEST_FILTER = 4
# "z" is in no filter, so only wildcards select it. One token more than the longest filter tells `>`
# from a row of `*`.
UNIVERSE = [
    ".".join(parts) for length in range(1, LONGEST_FILTER + 2) for parts in itertools.product("abz", repeat=length)
]


@st.composite
def filters(draw: st.DrawFn) -> str:
    parts = draw(st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=LONGEST_FILTER))
    if draw(st.booleans()):
        parts[-1] = ">"
    return ".".join(parts)


@st.composite
def pairs_with_subject(draw: st.DrawFn) -> tuple[str, str]:
    """A filter and a subject that often match: the subject is the filter with its wildcards filled in."""
    subject_filter = draw(filters())
    parts = subject_filter.split(".")
    letters = st.sampled_from("abz")
    if parts[-1] == ">":
        parts[-1:] = draw(st.lists(letters, max_size=2))
    parts = [draw(letters) if part == "*" else part for part in parts]
    changed: bool = draw(st.booleans())
    if parts and changed:
        parts[draw(st.integers(0, len(parts) - 1))] = draw(letters)
    return subject_filter, ".".join(parts) or "a"


def dumb_match(wanted: list[str], given_tokens: list[str]) -> bool:
    if not wanted or not given_tokens:
        return not wanted and not given_tokens
    if wanted == [">"]:
        return True
    return wanted[0] in ("*", given_tokens[0]) and dumb_match(wanted[1:], given_tokens[1:])


@functools.cache
def selected(subject_filter: str) -> frozenset[str]:
    return frozenset(subject for subject in UNIVERSE if dumb_match(subject_filter.split("."), subject.split(".")))


@given(pairs_with_subject())
def test_matches_like_the_dumb_matcher(pair: tuple[str, str]) -> None:
    subject_filter, subject = pair
    assert matches(subject_filter, subject) == dumb_match(subject_filter.split("."), subject.split("."))


@given(filters(), filters())
def test_overlaps_if_some_subject_matches_both(left: str, right: str) -> None:
    assert overlaps(left, right) == bool(selected(left) & selected(right))


@given(filters(), filters())
def test_is_subset_if_every_subject_matches(inner: str, outer: str) -> None:
    assert is_subset(inner, outer) == (selected(inner) <= selected(outer))


@given(st.lists(filters(), max_size=4))
def test_nested_filters_finds_a_pair_if_there_is_one(listed: list[str]) -> None:
    sets = [selected(subject_filter) for subject_filter in listed]
    exists = any(a <= b or b <= a for a, b in itertools.combinations(sets, 2))
    found = nested_filters(listed)
    assert (found is not None) == exists
    if found:
        assert selected(found[0]) <= selected(found[1])


@given(filters())
def test_every_wellformed_filter_is_taken(subject_filter: str) -> None:
    assert check_filter(subject_filter) == subject_filter


TEXT = st.one_of(
    st.text(max_size=12),
    st.text("ab.*> \t\n\x00\x7fé\u2028\ud800/\\", max_size=8),
    st.text("ab.*>", max_size=6),
)


@given(TEXT)
@example("orders.new")
def test_a_checked_subject_is_safe_to_send(text: str) -> None:
    try:
        subject = check_subject(text)
    except InvalidInput:
        return
    assert subject == text
    assert all(subject.encode().split(b"."))
    assert not any(char.isspace() or char in "*>" or (not char.isprintable() and ord(char) < 0xA0) for char in subject)


@given(TEXT)
def test_a_checked_filter_is_a_subject_but_for_whole_wildcards(text: str) -> None:
    try:
        check_filter(text)
    except InvalidInput:
        is_filter = False
    else:
        is_filter = True
    parts = text.split(".")
    plain = ["x" if part == "*" or (part == ">" and at == len(parts)) else part for at, part in enumerate(parts, 1)]
    try:
        check_subject(".".join(plain))
    except InvalidInput:
        assert not is_filter
    else:
        assert is_filter


@given(TEXT)
def test_names_are_single_plain_tokens(text: str) -> None:
    for check in (check_stream_name, check_consumer_name, check_member_name, check_group_name):
        try:
            check(text)
        except InvalidInput:
            continue
        assert check_subject(text) == text
        assert not set(text) & set("./\\")
