"""Parses the arguments of group commands: mappings, filters with wildcards.

Checks the form only. Whether a plan fits a group is checked by `keylane.groups`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from keylane.core.partitions import PartitionBy
from keylane.core.plans import Plan
from keylane.core.subjects import shown, wildcard_positions
from keylane.errors import InvalidInput

_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_WILDCARDS = re.compile(r"\d{1,10}(?:,\d{1,10})*")
_MOST_IN_A_RANGE = 1_000_000


def parse_mappings(arguments: Iterable[str]) -> Plan:
    """`a:0-3,8 b:4-7,9` as a plan. The `cg` tool takes single numbers only; ranges are an extension."""
    return Plan.from_mappings(_parse_mapping(argument) for argument in arguments)


def parse_key(text: str | None) -> list[int] | None:
    """`2,1`, the value of `--key`, as the `*` that make up a key; None: it is not given."""
    words = text.replace(",", " ").split() if text is not None else []
    if not all(_WILDCARDS.fullmatch(word) for word in words):
        raise InvalidInput(f"--key is {text!r}: give the numbers of the '*' that make up the key, such as 1,2")
    return [int(word) for word in words] if text is not None else None


def parse_partition_by(words: Sequence[str]) -> list[PartitionBy]:
    """`orders.*.* 2 refunds.* 1` as filters, each with the wildcards that make up its key.

    An argument of numbers is never a filter, because a filter without a `*` has nothing to hash. A filter that has a
    `*` needs at least one number.
    """
    found: list[tuple[str, list[int]]] = []
    for word in words:
        if not _WILDCARDS.fullmatch(word):
            found.append((word, []))
        elif found:
            found[-1][1].extend(int(number) for number in word.split(","))
        else:
            raise InvalidInput(
                f"wildcard {word} comes before any filter: write a filter and then its wildcards, "
                "such as 'orders.*.*' 2"
            )
    for subject_filter, wildcards in found:
        if not wildcards and wildcard_positions(subject_filter):
            raise InvalidInput(
                f"filter {subject_filter!r} names no wildcards to hash: write the numbers of the '*' that make up the "
                "key after it, or give no filters at all to hash whole subjects"
            )
    return [PartitionBy(subject_filter, wildcards) for subject_filter, wildcards in found]


def ask_for_partition_by(filters: Iterable[str], answer: Callable[[str], str | None]) -> list[PartitionBy]:
    """The same for filters alone: `answer` returns the wildcards of each, or None if nobody answers."""
    found: list[PartitionBy] = []
    for one in filters:
        given = answer(one) if wildcard_positions(one) else ""
        if given is None:
            raise InvalidInput(
                f"nobody said which '*' of filter {one!r} make up the key: answer the question, or write the filter "
                f"without --filter and then its wildcards, such as {one!r} 1"
            )
        words = given.replace(",", " ").split()
        if not all(_WILDCARDS.fullmatch(word) for word in words):
            raise InvalidInput(f"wildcards {shown(given.strip())} of filter {one!r}: give numbers, such as 1 2")
        found.append(PartitionBy(one, [int(word) for word in words]))
    return found


def is_filter(word: str) -> bool:
    """Whether this is a filter: a member's name contains none of these characters."""
    return any(character in word for character in ".*>")


def _parse_mapping(word: str) -> tuple[str, list[int]]:
    member, colon, written = word.rpartition(":")
    parts = [_RANGE.fullmatch(part) for part in written.split(",")]
    if not colon or not member or not all(parts):
        raise InvalidInput(
            f"mapping {shown(word)} is not a member and its partitions: write for example worker-1:0-3,8"
        )
    numbers: list[int] = []
    for part in parts:
        assert part is not None
        first, last = int(part[1]), int(part[2] or part[1])
        if last < first:
            raise InvalidInput(f"mapping {shown(word)} has the range {part[0]}: write the lower number first")
        if last - first >= _MOST_IN_A_RANGE:
            raise InvalidInput(
                f"mapping {shown(word)} has the range {part[0]}: write at most {_MOST_IN_A_RANGE:,} partitions"
            )
        numbers.extend(range(first, last + 1))
    return member, numbers
