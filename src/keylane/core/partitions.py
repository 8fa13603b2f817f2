"""Partition numbers: the server's hash, its transform text, and the number in front of a subject.

Owns: the partition of a subject, which of its tokens are the key, and the two texts that make the server insert the
number. Never publishes, and never decides who owns a partition.

The server hashes the key with 32-bit FNV-1a and takes the remainder. The key is either the tokens at chosen `*`
wildcards, joined *without* a separator in the chosen order, or the whole subject with its dots. So tokens ("a", "bc")
and ("ab", "c") always share a partition. They are still two keys: `Partitioning.key` joins with dots, which no token
can contain.

The hash works on bytes. "é" as one character and as "e" with an accent are two keys, here as on the server. Subjects
whose bytes are not UTF-8 work if they were decoded with `surrogateescape`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from keylane.core.subjects import check_filter, matches, nested_filters, shown, wildcard_positions
from keylane.errors import InvalidInput

MAX_PARTITIONS = 2**31 - 1
"""The maximum that the server accepts: it reads the number as a signed 32-bit integer."""


def key_hash(key: bytes) -> int:
    """32-bit FNV-1a, as the server computes it. Costs about 0.1 µs a byte."""
    value = 2166136261
    for byte in key:
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value


def partition_number(hashed: str, partitions: int) -> int:
    """The partition of a hashed text: the key tokens without separator, or the whole subject.

    >>> partition_number("customer-42", 10)
    6
    """
    return key_hash(hashed.encode("utf-8", "surrogateescape")) % partitions


def partition_of(subject: str, subject_filter: str, wildcards: Sequence[int], partitions: int) -> int:
    """The partition of one subject. For many subjects create one `Partitioning` and keep it.

    >>> partition_of("orders.eu.customer-42", "orders.*.*", [2], 10)
    6
    """
    return Partitioning(subject_filter, tuple(wildcards), partitions).partition(subject)


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How the subjects that a filter selects are distributed over partitions.

    `wildcards` counts the filter's `*` tokens from 1; their order matters to the hash. Without wildcards, the whole
    subject is the key. Several partitionings of one group share their keys: `42` under `orders.*` and under `refunds.*`
    is one key, in one partition, so one customer's orders and refunds stay in order.

    If the same subjects repeat often, cache the result: `functools.lru_cache(maxsize=10_000)(partitioning.partition)`.

    >>> Partitioning("orders.*.*", (2,), 10).destination
    '{{Partition(10,2)}}.orders.{{Wildcard(1)}}.{{Wildcard(2)}}'
    """

    filter: str
    wildcards: tuple[int, ...]
    partitions: int
    _positions: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _literals: tuple[tuple[int, str], ...] = field(init=False, repr=False, compare=False)
    _length: int = field(init=False, repr=False, compare=False)
    _open_ended: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_filter(self.filter)
        check_partition_count(self.partitions)
        stars = wildcard_positions(self.filter)
        check_wildcards(self.wildcards, self.filter, len(stars))
        parts = self.filter.split(".")
        literals = tuple((index, token) for index, token in enumerate(parts) if token not in ("*", ">"))
        for _, token in literals:
            _check_literal(token, self.filter)
        object.__setattr__(self, "wildcards", tuple(self.wildcards))
        object.__setattr__(self, "_positions", tuple(stars[wildcard - 1] for wildcard in self.wildcards))
        object.__setattr__(self, "_literals", literals)
        object.__setattr__(self, "_length", len(parts))
        object.__setattr__(self, "_open_ended", parts[-1] == ">")

    @property
    def by(self) -> PartitionBy:
        """The filter and its key, without the number of partitions."""
        return PartitionBy(self.filter, self.wildcards)

    @property
    def destination(self) -> str:
        """The subject transform that puts the partition number in front; its source is `filter`.

        It is identical to the text that members in other languages write.
        """
        numbers = ",".join(str(number) for number in (self.partitions, *self.wildcards))
        return f"{{{{Partition({numbers})}}}}.{_carry_over(self.filter)}"

    def key(self, subject: str) -> str:
        """The key of a subject without its partition number: the key tokens joined with dots.

        >>> Partitioning("orders.*.*", (2, 1), 10).key("orders.eu.42")
        '42.eu'
        """
        found = self._split(subject)
        if not self._positions:
            return subject
        return ".".join([found[position] for position in self._positions])

    def partition(self, subject: str) -> int:
        """The partition of a subject without its partition number."""
        found = self._split(subject)
        hashed = "".join([found[position] for position in self._positions]) if self._positions else subject
        return partition_number(hashed, self.partitions)

    def subjects_of(self, key: str) -> str | None:
        """A filter that selects the subjects with this key, without their number; None if there are none.

        >>> Partitioning("orders.*.*", (2,), 10).subjects_of("42")
        'orders.*.42'
        """
        found = key.split(".")
        if not self._positions:
            return key if matches(self.filter, key) else None
        if len(found) != len(self._positions):
            return None
        wanted = self.filter.split(".")
        for position, token in zip(self._positions, found, strict=True):
            wanted[position] = token
        return ".".join(wanted)

    def _split(self, subject: str) -> list[str]:
        found = subject.split(".")
        long_enough = len(found) >= self._length if self._open_ended else len(found) == self._length
        if long_enough:
            for index, token in self._literals:
                if found[index] != token:
                    break
            else:
                return found
        raise InvalidInput(
            f"subject {shown(subject)} does not match filter {shown(self.filter)}: "
            "only subjects that match have a key and a partition"
        )


@dataclass(frozen=True, slots=True, init=False)
class PartitionBy:
    """What is partitioned, and by which part of its subjects: a `Partitioning` that may have any number of partitions.

    `key` counts the `*` of the filter from 1; left out, all of them together are the key. Without a `*`, and with
    `key=()`, the whole subject is.

    >>> PartitionBy("orders.*.*", key=[2]).over(10)
    Partitioning(filter='orders.*.*', wildcards=(2,), partitions=10)
    >>> PartitionBy("orders.*").key
    (1,)
    """

    filter: str
    key: tuple[int, ...]

    def __init__(self, filter: str, key: Sequence[int] | None = None) -> None:  # noqa: A002 - as `Partitioning`
        stars = len(wildcard_positions(check_filter(filter)))
        chosen = range(1, stars + 1) if key is None else key
        if not isinstance(chosen, Iterable) or not all(_is_whole(one) for one in chosen):
            raise InvalidInput(f"key of {shown(filter)} is {shown(chosen)}: give a list of numbers, such as [1]")
        object.__setattr__(self, "filter", filter)
        object.__setattr__(self, "key", tuple(chosen))
        self.over(1)

    @classmethod
    def of(cls, given: PartitionBy | str) -> PartitionBy:
        """A filter stands for one with all its `*` as the key."""
        if not isinstance(given, PartitionBy | str):
            raise InvalidInput(f"partition_by is {shown(given)}: give a filter, or PartitionBy('orders.*', key=[1])")
        return given if isinstance(given, PartitionBy) else cls(given)

    def over(self, partitions: int) -> Partitioning:
        return Partitioning(self.filter, self.key, partitions)


def check_partition_count(partitions: int) -> int:
    """Return a number of partitions unchanged, or raise `InvalidInput`."""
    if not _is_whole(partitions):
        raise InvalidInput(f"number of partitions {shown(partitions)} is not a whole number: give 1 or more")
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidInput(f"number of partitions {partitions} is out of range: give 1 to {MAX_PARTITIONS}")
    return partitions


def check_wildcards(wildcards: Sequence[int], subject_filter: str, available: int) -> None:
    """Raise `InvalidInput` unless each index names a different one of the filter's `available` `*` tokens."""
    for index, wildcard in enumerate(wildcards):
        if not _is_whole(wildcard):
            raise InvalidInput(f"partitioning wildcard {shown(wildcard)} is not a whole number: count from 1")
        if not 1 <= wildcard <= available:
            raise InvalidInput(
                f"partitioning wildcard {wildcard} is out of range: filter {shown(subject_filter)} has "
                + (f"wildcards 1 to {available}" if available else "no '*'; leave the list empty")
            )
        if wildcard in wildcards[:index]:
            raise InvalidInput(f"partitioning wildcard {wildcard} is listed twice in {list(wildcards)}: list each once")


# ---- the number in front of a subject ---------------------------------------------------------------


def insert_partition(partition: int, subject: str) -> str:
    """The subject under which the server stores a message of this partition."""
    return f"{partition}.{subject}"


def strip_partition(subject: str) -> tuple[int, str]:
    """Partition number and original subject of a stored subject.

    >>> strip_partition("3.orders.eu.42")
    (3, 'orders.eu.42')
    """
    number, _, rest = subject.partition(".")
    # isdecimal alone would also accept digits of other alphabets; the server writes no leading zeros.
    if rest and number.isdecimal() and number.isascii() and (number[0] != "0" or number == "0"):
        return int(number), rest
    raise InvalidInput(
        f"subject {shown(subject)} does not start with a partition number: the message was stored before "
        "the stream had its partition transform, or its subject does not match the transform's source"
    )


def partition_filters(partitions: Iterable[int], filters: Sequence[str] = ()) -> list[str]:
    """The filter subjects of a consumer: for each filter in turn, one per partition, ascending.

    No filters means every subject. The order is part of the contract: members in other languages request the same
    consumer with the same text, and the server treats a reordered list as a different consumer.

    >>> partition_filters([10, 2], ["orders.*"])
    ['2.orders.*', '10.orders.*']
    """
    owned = list(partitions)
    for partition in owned:
        if not _is_whole(partition) or not 0 <= partition < MAX_PARTITIONS:
            raise InvalidInput(f"partition {shown(partition)} is not a partition number: give 0 or more")
    if not owned:
        raise InvalidInput("the list of partitions is empty: a consumer without filters would get every message")
    if len(set(owned)) < len(owned):
        raise InvalidInput(f"partitions {shown(sorted(owned))} name a partition twice: list each once")
    chosen = list(filters) or [">"]
    for subject_filter in chosen:
        check_filter(subject_filter)
    if nested := nested_filters(chosen):
        raise InvalidInput(
            f"filter {shown(nested[0])} is contained in filter {shown(nested[1])}: "
            "the server refuses a consumer with both; drop the narrower one"
        )
    return [f"{partition}.{subject_filter}" for subject_filter in chosen for partition in sorted(owned)]


# ---- the text of a transform ------------------------------------------------------------------------

_FUNCTION = re.compile(r"\{\{[\t\n\f\r ]*(\w+)[\t\n\f\r ]*\((.*)\)[\t\n\f\r ]*\}\}", re.ASCII)
_SEPARATOR = re.compile(r",[\t\n\f\r ]*")
_NUMBER = re.compile(r"[+-]?[0-9]+")
_SPELLINGS = {
    "Partition": "partition",
    "partition": "partition",
    "Wildcard": "wildcard",
    "wildcard": "wildcard",
}


def parse_transform(source: str, destination: str) -> Partitioning | None:
    """The partitioning of a stream's subject transform; None if it inserts no partition number.

    The result refers to stored subjects without the number. If the transform also renames or reorders, filter and
    wildcards are those of the new subject; keys and partitions are the same.

    Reads what the server reads: `Partition` and `partition`, `Wildcard`, `wildcard` and `$1`, blanks around names and
    numbers, an empty source for `>`. Raises `InvalidInput` if there is a partition number that keylane cannot use.

    >>> parse_transform("orders.*.*", "{{ partition(10, 2) }}.o.$2.$1")
    Partitioning(filter='o.*.*', wildcards=(1,), partitions=10)
    """
    source = check_filter(source or ">")
    first, *rest = [_read_token(token) for token in destination.split(".")]
    if all(kind != "partition" for kind, _ in (first, *rest)):
        return None
    if first[0] != "partition":
        raise _unusable(destination, "the partition number is not the first token", "put {{Partition(...)}} first")
    if not rest:
        raise _unusable(destination, "nothing of the subject is left", f"append .{_carry_over(source)}")

    partitions, *wildcards = _numbers(first[1], destination)
    stars = len(wildcard_positions(source))
    if not stars and not source.endswith(">"):
        wildcards = []  # the server hashes the whole subject here, whatever is listed
    check_partition_count(partitions)
    check_wildcards(wildcards, source, stars)

    stored, carried = _stored_filter(rest, destination)
    if not wildcards and (stored != source or carried != list(range(1, stars + 1))):
        raise _unusable(
            destination,
            "the whole subject is hashed and then changed",
            f"append .{_carry_over(source)} instead",
        )
    for wildcard in wildcards:
        if wildcard not in carried:
            raise _unusable(destination, f"key wildcard {wildcard} is dropped", f"append {{{{Wildcard({wildcard})}}}}")
    return Partitioning(stored, tuple(carried.index(wildcard) + 1 for wildcard in wildcards), partitions)


def _carry_over(subject_filter: str) -> str:
    """The destination text that keeps subjects unchanged."""
    parts = subject_filter.split(".")
    for number, position in enumerate(wildcard_positions(subject_filter), start=1):
        parts[position] = f"{{{{Wildcard({number})}}}}"
    return ".".join(parts)


def _stored_filter(rest: list[tuple[str, str]], destination: str) -> tuple[str, list[int]]:
    """The filter that the stored subjects match, and for each of its `*` the number of the source wildcard."""
    parts: list[str] = []
    carried: list[int] = []
    for kind, text in rest:
        if kind == "wildcard":
            parts.append("*")
            carried.append(_only_number(text, destination))
        elif kind == "literal" and text != "*":
            parts.append(text)
        else:
            raise _unusable(
                destination,
                "keylane cannot tell what becomes of the subject",
                "use only {{Wildcard(n)}} and plain tokens after the partition number",
            )
    return ".".join(parts), carried


def _read_token(token: str) -> tuple[str, str]:
    """Kind of a destination token (literal, wildcard, partition, other) and its arguments or text."""
    if token.startswith("$") and _NUMBER.fullmatch(token[1:]):
        return "wildcard", token[1:]
    if found := _FUNCTION.fullmatch(token):
        kind = _SPELLINGS.get(found[1])
        return (kind, found[2]) if kind else ("other", token)
    return "literal", token


def _check_literal(token: str, subject_filter: str) -> None:
    if _read_token(token)[0] != "literal" or (token.startswith("{{") and token.endswith("}}")):
        raise InvalidInput(
            f"filter {shown(subject_filter)} has the token {shown(token)}: "
            "in a transform the server would take it for an instruction; "
            "partition by a filter with '*' in its place"
        )


def _numbers(arguments: str, destination: str) -> list[int]:
    numbers = [argument.strip(" ") for argument in _SEPARATOR.split(arguments)]
    for number in numbers:
        if not _NUMBER.fullmatch(number):
            raise _unusable(destination, f"{shown(number)} is not a whole number", "give numbers between the commas")
    return [int(number) for number in numbers]


def _only_number(arguments: str, destination: str) -> int:
    numbers = _numbers(arguments, destination)
    if len(numbers) > 1:
        raise _unusable(destination, f"a wildcard has {len(numbers)} numbers", "give each wildcard one")
    return numbers[0]


def _unusable(destination: str, problem: str, remedy: str) -> InvalidInput:
    return InvalidInput(f"a group cannot use transform destination {shown(destination)}: {problem}; {remedy}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
