"""Mappings, filters, durations and plan files as people write them, made into values.

Reads words and JSON; checks only what the words must be. Whether a plan fits a group is checked by the group.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from keylane.core.plans import Plan
from keylane.core.subjects import shown, wildcard_positions
from keylane.errors import InvalidInput

_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_WILDCARDS = re.compile(r"\d{1,10}(?:,\d{1,10})*")
_DURATION = re.compile(r"(?:\d+(?:\.\d*)?(?:us|µs|ms|s|m|h))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?)(us|µs|ms|s|m|h)")
_UNIT_S = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_IN_A_RANGE = 1_000_000


def mapping_from_words(words: Iterable[str]) -> Plan:
    """`a:0-3,8 b:4-7,9` as a plan; ranges are ours, single numbers are those of the `cg` tool."""
    return Plan.from_mappings(_one_mapping(word) for word in words)


def partitioning_from_words(words: Sequence[str]) -> list[tuple[str, list[int]]]:
    """`orders.*.* 2 refunds.* 1` as pairs of a filter and the wildcards that make up its key.

    A word of numbers is never a filter: without a `*` there is nothing to hash. A filter that has a `*` needs one.
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
    return found


def partitioning_from_answers(
    filters: Iterable[str], answer: Callable[[str], str | None]
) -> list[tuple[str, list[int]]]:
    """The same for filters alone: `answer` is asked for the wildcards of each; None if nobody answers."""
    found: list[tuple[str, list[int]]] = []
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
        found.append((one, [int(word) for word in words]))
    return found


def looks_like_a_filter(word: str) -> bool:
    """No name of a member holds these characters."""
    return any(character in word for character in ".*>")


def seconds_from_word(word: str) -> float:
    """`20ms`, `1.5s`, `1m30s`, or `0`, in seconds."""
    if word == "0":
        return 0.0
    if not _DURATION.fullmatch(word):
        raise InvalidInput(f"duration {shown(word)} is not one: give for example 20ms, 1.5s or 1m30s")
    return sum(float(number) * _UNIT_S[unit] for number, unit in _DURATION_PART.findall(word))


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan in a file. It may say which group it was made for."""

    plan: Plan
    stream: str | None = None
    group: str | None = None


def write_plan_file(path: Path, stream: str, group: str, plan: Plan) -> None:
    """Write a plan so that `read_plan_file` finds everything in it."""
    mappings = [{"member": member, "partitions": partitions} for member, partitions in plan.mappings()]
    wire = {"stream": stream, "group": group, "member_mappings": mappings}
    try:
        path.write_text(json.dumps(wire, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"plan file {str(path)!r} cannot be written: {error.strerror}") from error


def read_plan_file(path: Path, stdin: TextIO) -> PlanFile:
    """`{"member_mappings": [{"member", "partitions"}]}`, or that list alone, or `{"a": [0, 1], "b": [2]}`.

    The first form, which is also how a group is stored, may name `stream` and `group`. `-` reads `stdin`.
    """
    where = "the plan on standard input" if str(path) == "-" else f"plan file {str(path)!r}"
    try:
        text = stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        wire = json.loads(text)
    except OSError as error:
        raise InvalidInput(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"{where} is not JSON: {error}") from error
    named = wire if isinstance(wire, dict) and "member_mappings" in wire else {}
    listed = named.get("member_mappings", wire)
    try:
        pairs = (
            list(listed.items()) if isinstance(listed, dict) else [(one["member"], one["partitions"]) for one in listed]
        )
        plan = Plan.from_mappings((member, _numbers(partitions)) for member, partitions in pairs)
    except (KeyError, TypeError) as error:
        raise InvalidInput(
            f'{where} has no mapping of members to partitions: give {{"member_mappings": '
            '[{"member": "a", "partitions": [0, 1]}]}'
        ) from error
    if not plan.members:
        raise InvalidInput(f"{where} names no member: `keylane elastic delete-mapping` takes a mapping away")
    return PlanFile(plan, _text(named, "stream", where), _text(named, "group", where))


def _one_mapping(word: str) -> tuple[str, list[int]]:
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


def _numbers(partitions: Any) -> list[int]:
    if not isinstance(partitions, list):
        raise TypeError(partitions)
    return partitions


def _text(named: dict[str, Any], key: str, where: str) -> str | None:
    value = named.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{where} has {key} {shown(value)}: it must be a name")
    return value
