"""Subjects and filters: their syntax, and which filter matches which subject.

Owns: tokens, wildcards, validation, matching, overlap. Never changes a subject and never asks a server.

A subject is a sequence of tokens joined by dots (`orders.eu.42`). A filter may contain `*` (exactly one token) and,
as its last token, `>` (one token or more).

Checks are for input from callers. Subjects that arrive from a stream are not checked again: they may be older than our
rules, and matching works on them as well.

keylane refuses these, although the server (2.15.1) does not:

- Wildcards in a subject to publish. The server stores a message published to `orders.*` under exactly that name, but no
  subject transform applies to it, so it gets no partition number and no group ever sees it.
- A `*` or `>` inside a longer token (`foo*`, `*foo`, `a>`). The server treats these as plain characters when it
  matches, but a leading `*` counts as a wildcard when it checks a consumer's filters for overlap (`w.*foo` with
  `w.bar`: 10138).
- Control characters, and whitespace of any alphabet. The server ends the connection on a blank, tab or line feed in a
  published subject. It stores everything else, which then breaks programs that read line by line.
- Empty tokens in a subject to publish. The server finds no stream for it and answers only "no responders".
- More than 3,400 bytes. The server's limit is a control line of 4,096 bytes that also carries the verb, the reply
  subject and the sizes; beyond it the connection ends. 3,400 leaves space for those, for a partition number, and for a
  request that names a stream and a consumer of 255 bytes each beside a filter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keylane.errors import InvalidInput

MAX_SUBJECT_BYTES = 3_400

_SHOWN_CHARS = 120
_UNSENDABLE = re.compile("[\\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def shown(value: object) -> str:
    """The value for an error message: quoted, truncated if it is very long; escaped is only what no screen can show."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


def describe_char(text: str, index: int) -> str:
    """One character of a text and its position, for an error message."""
    return f"{text[index]!r} at position {index + 1}"


def check_characters(text: str, what: str) -> None:
    """Raise `InvalidInput` if the text contains whitespace, a control character or a lone surrogate."""
    found = _UNSENDABLE.search(text)
    if not found:
        return
    if "\ud800" <= found.group() <= "\udfff":
        rule = "it stands for a byte that is not UTF-8 and cannot be sent; decode the text with its own encoding"
    elif found.group().isspace():
        rule = f"a {what} holds no whitespace; replace it, for example by '-'"
    else:
        rule = f"a {what} holds no control characters; drop it"
    raise InvalidInput(f"{what} {shown(text)} holds {describe_char(text, found.start())}: {rule}")


def check_subject(subject: str) -> str:
    """Return a subject to publish to unchanged, or raise `InvalidInput`.

    >>> check_subject("orders.eu.42")
    'orders.eu.42'
    """
    _check_text(subject, "subject")
    if found := re.search("[*>]", subject):
        raise InvalidInput(
            f"subject {shown(subject)} holds the wildcard {describe_char(subject, found.start())}: "
            "a message goes to one exact subject; wildcards are for filters"
        )
    return subject


def check_filter(subject_filter: str) -> str:
    """Return a filter unchanged, or raise `InvalidInput`.

    >>> check_filter("orders.*.>")
    'orders.*.>'
    """
    _check_text(subject_filter, "filter")
    parts = subject_filter.split(".")
    for number, part in enumerate(parts, start=1):
        if len(part) > 1 and "*" in part:
            raise InvalidInput(
                f"filter {shown(subject_filter)} has '*' inside token {number} ({shown(part)}): "
                "'*' stands for a whole token; write it alone between dots"
            )
        if len(part) > 1 and ">" in part:
            raise InvalidInput(
                f"filter {shown(subject_filter)} has '>' inside token {number} ({shown(part)}): "
                "'>' stands for all remaining tokens; write it alone after the last dot"
            )
        if part == ">" and number < len(parts):
            raise InvalidInput(
                f"filter {shown(subject_filter)} has '>' as token {number} of {len(parts)}: "
                "'>' may only be the last token; use '*' for one token in the middle"
            )
    return subject_filter


def tokens(subject: str) -> list[str]:
    """The tokens of a subject or filter, in order."""
    return subject.split(".")


def wildcard_positions(subject_filter: str) -> tuple[int, ...]:
    """The positions of the `*` tokens of a filter, counting tokens from 0.

    >>> wildcard_positions("orders.*.eu.*.>")
    (1, 3)
    """
    return tuple(index for index, part in enumerate(subject_filter.split(".")) if part == "*")


def matches(subject_filter: str, subject: str) -> bool:
    """Whether the filter selects the subject.

    >>> matches("orders.*.>", "orders.eu.42"), matches("orders.*.>", "orders.eu")
    (True, False)
    """
    wanted_tokens = subject_filter.split(".")
    subject_tokens = subject.split(".")
    for index, wanted in enumerate(wanted_tokens):
        if wanted == ">":
            return len(subject_tokens) > index
        if index == len(subject_tokens) or wanted not in ("*", subject_tokens[index]):
            return False
    return len(subject_tokens) == len(wanted_tokens)


def is_subset(inner: str, outer: str) -> bool:
    """Whether `outer` selects every subject that `inner` selects.

    >>> is_subset("orders.*.42", "orders.>"), is_subset("orders.>", "orders.*")
    (True, False)
    """
    inner_tokens = inner.split(".")
    outer_tokens = outer.split(".")
    for index, wanted in enumerate(outer_tokens):
        if wanted == ">":
            return len(inner_tokens) > index
        if index == len(inner_tokens):
            return False
        given = inner_tokens[index]
        if given != wanted and (wanted != "*" or given == ">"):
            return False
    return len(inner_tokens) == len(outer_tokens)


def overlaps(filter_a: str, filter_b: str) -> bool:
    """Whether both filters select some common subject.

    A work queue refuses two consumers whose filters overlap (error 10100). Within the filters of one consumer, and
    within the transforms of one source, the server is more lenient: it refuses only if one is a subset of the other
    (10138, 10147).

    >>> overlaps("orders.*.new", "orders.eu.*"), overlaps("orders.*", "orders.*.>")
    (True, False)
    """
    tokens_a = filter_a.split(".")
    tokens_b = filter_b.split(".")
    for token_a, token_b in zip(tokens_a, tokens_b, strict=False):
        if ">" in (token_a, token_b):
            return True
        if token_a != token_b and "*" not in (token_a, token_b):
            return False
    return len(tokens_a) == len(tokens_b)


def intersection(filter_a: str, filter_b: str) -> str | None:
    """The filter that selects what both select; None if that is nothing.

    >>> intersection("*.orders.>", "3.*.eu"), intersection("orders.*", "orders.*.>")
    ('3.orders.eu', None)
    """
    left, right = filter_a.split("."), filter_b.split(".")
    common: list[str] = []
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one == ">":
            return ".".join([*common, *right[index:]])
        if other == ">":
            return ".".join([*common, *left[index:]])
        if one != other and "*" not in (one, other):
            return None
        common.append(other if one == "*" else one)
    return ".".join(common) if len(left) == len(right) else None


def nested_filters(filters: Sequence[str]) -> tuple[str, str] | None:
    """The first pair of filters where one contains the other, as (inner, outer); equal filters count.

    >>> nested_filters(["orders.>", "refunds.*", "orders.eu"])
    ('orders.eu', 'orders.>')
    """
    # Only filters with the same first token, or with a wildcard there, can match: a thousand partition filters need a
    # thousand comparisons, not half a million.
    by_first: dict[str, list[str]] = {}
    for later in filters:
        first = later.split(".", 1)[0]
        if first in ("*", ">"):
            candidates = [one for group in by_first.values() for one in group]
        else:
            candidates = [*by_first.get(first, ()), *by_first.get("*", ()), *by_first.get(">", ())]
        for earlier in candidates:
            if is_subset(later, earlier):
                return later, earlier
            if is_subset(earlier, later):
                return earlier, later
        by_first.setdefault(first, []).append(later)
    return None


def _check_text(text: str, what: str) -> None:
    if not isinstance(text, str):
        raise InvalidInput(f"{what} {shown(text)} is {type(text).__name__}, not text: give a str such as 'orders.eu'")
    if not text:
        raise InvalidInput(f"{what} '' is empty: give at least one token, such as 'orders'")
    check_characters(text, what)
    if (size := len(text.encode())) > MAX_SUBJECT_BYTES:
        raise InvalidInput(
            f"{what} {shown(text)} is {size} bytes long: at most {MAX_SUBJECT_BYTES} fit on the wire "
            "beside a reply subject and names; shorten it"
        )
    if text.startswith("."):
        raise InvalidInput(f"{what} {shown(text)} starts with a dot: no token may be empty; drop the dot")
    if text.endswith("."):
        raise InvalidInput(f"{what} {shown(text)} ends with a dot: no token may be empty; drop the dot")
    if ".." in text:
        raise InvalidInput(
            f"{what} {shown(text)} has an empty token at position {text.index('..') + 2}: "
            "no token may be empty; drop one of the dots"
        )
