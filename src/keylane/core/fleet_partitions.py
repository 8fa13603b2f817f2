"""The partitions of a fleet: four sources that they come from, as values.

Owns: `Partition`, the sources, what they yield, and their checks. Never reads a stream or a bucket: what a source needs
to know from a server is passed in.

- `hashed`: partition numbers in front of the subjects, as static and elastic groups have them.
- `listed`: a fixed list of subjects or filters, one partition each.
- `discovered`: one partition for each subject that the stream holds, or for each value of chosen wildcards.
- `from_kv`: a list in a KV value, which may change.

No message may belong to two partitions, so filters that overlap are refused. A subject that is listed twice counts
once; how often that happened is counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keylane.core.fleet_names import check_label, subject_id
from keylane.core.partitions import PartitionBy, Partitioning, check_partition_count, partition_filters
from keylane.core.subjects import check_filter, matches, shown, wildcard_positions
from keylane.errors import InvalidInput

MAX_WEIGHT = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Partition:
    """A share of a stream that one worker handles at a time."""

    id: str
    """A number, or a readable form of the subject with a digest. Part of KV keys and consumer names."""
    filter: str
    """The filter subject of its consumer."""
    weight: float = 1.0
    """What it costs to handle, in any unit."""
    label: str | None = None
    """Only workers with this label handle it."""
    first: int = 0
    """The first sequence that belongs to it; 0: all of them."""


@dataclass(frozen=True, slots=True)
class PartitionSet:
    """What a source yields."""

    partitions: tuple[Partition, ...]
    """By id; numbers in their order."""
    duplicates: int = 0
    """How many entries repeated another one."""
    left_out: tuple[str, ...] = ()
    """Subjects of the stream that are no partition, because a wildcard is one of their tokens."""


# ---- hashed -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamCopy:
    """How much the fleet's own copy of a stream may hold; 0: no limit. A full copy waits until messages are handled."""

    max_messages: int = 0
    max_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HashedPartitions:
    """Partition numbers in front of the subjects. Made by `hashed`."""

    partitioning: Partitioning
    weights: Mapping[int, float] = field(default_factory=dict)
    labels: Mapping[int, str] = field(default_factory=dict)
    copy: StreamCopy | None = None

    def resolve(self) -> PartitionSet:
        return PartitionSet(
            tuple(
                Partition(
                    str(number),
                    partition_filters([number], [self.partitioning.filter])[0],
                    self.weights.get(number, 1.0),
                    self.labels.get(number),
                )
                for number in range(self.partitioning.partitions)
            )
        )

    def to_wire(self) -> dict[str, Any]:
        partitioning = self.partitioning
        wire: dict[str, Any] = {
            "kind": "hashed",
            "partitions": partitioning.partitions,
            "filter": partitioning.filter,
            "key": list(partitioning.wildcards),
        }
        if self.weights:
            wire["weights"] = {str(number): weight for number, weight in sorted(self.weights.items())}
        if self.labels:
            wire["labels"] = {str(number): label for number, label in sorted(self.labels.items())}
        if self.copy is not None:
            wire["copy"] = {"max_messages": self.copy.max_messages, "max_bytes": self.copy.max_bytes}
        return wire


def hashed(
    partitions: int,
    partition_by: PartitionBy | str,
    *,
    weights: Mapping[int, float] | None = None,
    labels: Mapping[int, str] | None = None,
    copy: StreamCopy | None = None,
) -> HashedPartitions:
    """Partitions by the server's hash of the key: all `*` of a filter, or those that `PartitionBy` names.

    The stream puts the number in front of its subjects; with `copy` a copy of the stream does, which the fleet makes
    and reads.

    >>> hashed(32, "orders.*").resolve().partitions[3]
    Partition(id='3', filter='3.orders.*', weight=1.0, label=None, first=0)
    """
    partitioning = PartitionBy.of(partition_by).over(check_partition_count(partitions))
    for what, given in (("weights", weights or {}), ("labels", labels or {})):
        for number in given:
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < partitions:
                raise InvalidInput(f"{what} name partition {shown(number)}: give 0 to {partitions - 1}")
    return HashedPartitions(
        partitioning,
        {number: check_weight(weight, f"partition {number}") for number, weight in (weights or {}).items()},
        {number: check_label(label) for number, label in (labels or {}).items()},
        _check_copy(copy),
    )


def _check_copy(copy: StreamCopy | None) -> StreamCopy | None:
    if copy is None:
        return None
    if not isinstance(copy, StreamCopy):
        raise InvalidInput(f"copy is {shown(copy)}: give StreamCopy(max_messages=…, max_bytes=…)")
    for name in ("max_messages", "max_bytes"):
        given = getattr(copy, name)
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise InvalidInput(f"{name} of the copy is {shown(given)}: give a whole number, or 0 for no limit")
    return copy


# ---- listed -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListedPartitions:
    """A fixed list of subjects or filters. Made by `listed`."""

    subjects: tuple[str, ...]
    """Sorted, each once."""
    weights: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    duplicates: int = field(default=0, compare=False)

    def resolve(self) -> PartitionSet:
        found = (
            Partition(subject_id(subject), subject, self.weights.get(subject, 1.0), self.labels.get(subject))
            for subject in self.subjects
        )
        return PartitionSet(tuple(sorted(found, key=lambda partition: partition.id)), self.duplicates)

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {"kind": "listed", "subjects": list(self.subjects)}
        if self.weights:
            wire["weights"] = dict(sorted(self.weights.items()))
        if self.labels:
            wire["labels"] = dict(sorted(self.labels.items()))
        return wire


def listed(
    subjects: Iterable[str],
    *,
    weights: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
) -> ListedPartitions:
    """One partition for each subject or filter. Weights and labels are by subject.

    >>> [partition.id for partition in listed(["dc.etch1.*", "dc.litho.*"]).resolve().partitions]
    ['dc-etch1-c71355c302', 'dc-litho-642964c2cb']
    """
    if isinstance(subjects, str):
        raise InvalidInput(f"subjects {shown(subjects)} is one text: give a list of subjects")
    given = [check_filter(subject) for subject in subjects]
    if not given:
        raise InvalidInput("the list of subjects is empty: a fleet needs at least one partition")
    distinct = sorted(set(given))
    if crossed := overlapping_filters(distinct):
        raise InvalidInput(
            f"filters {shown(crossed[0])} and {shown(crossed[1])} overlap: a message that matches both would belong to "
            "two partitions; make them disjoint"
        )
    for what, named in (("weights", weights or {}), ("labels", labels or {})):
        if unknown := sorted(set(named) - set(distinct)):
            raise InvalidInput(f"{what} name {shown(unknown[0])}, which is not in the list of subjects: add or drop it")
    return ListedPartitions(
        tuple(distinct),
        {subject: check_weight(weight, shown(subject)) for subject, weight in (weights or {}).items()},
        {subject: check_label(label) for subject, label in (labels or {}).items()},
        len(given) - len(distinct),
    )


# ---- discovered -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiscoveredPartitions:
    """Subjects that a stream holds. Made by `discovered`."""

    filter: str
    key: tuple[int, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    """By the filter of the partition, as labels are."""
    labels: Mapping[str, str] = field(default_factory=dict)

    def filter_of(self, subject: str) -> str:
        """The filter of the partition that a subject belongs to."""
        if not self.key:
            return subject
        stars = wildcard_positions(self.filter)
        kept = {stars[position - 1] for position in self.key}
        found, wanted = subject.split("."), self.filter.split(".")
        return ".".join(found[place] if place in kept else token for place, token in enumerate(wanted))

    def resolve(self, subjects: Iterable[str], known: Iterable[str] = ()) -> PartitionSet:
        """The partitions of the subjects that match.

        `known`: filters of partitions that were found before. They stay: a subject whose messages are all
        acknowledged is gone from a work queue, and its next message needs an owner. A subject with a token that is
        a wildcard is left out: no consumer can ask for it alone.
        """
        matching = {one for one in subjects if matches(self.filter, one)}
        left_out = {one for one in matching if not {"*", ">"}.isdisjoint(one.split("."))}
        found = {self.filter_of(one) for one in matching - left_out}.union(known)
        partitions = (
            Partition(subject_id(one), one, self.weights.get(one, 1.0), self.labels.get(one)) for one in found
        )
        return PartitionSet(
            tuple(sorted(partitions, key=lambda partition: partition.id)), left_out=tuple(sorted(left_out))
        )

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {"kind": "discovered", "filter": self.filter, "key": list(self.key)}
        if self.weights:
            wire["weights"] = dict(sorted(self.weights.items()))
        if self.labels:
            wire["labels"] = dict(sorted(self.labels.items()))
        return wire


def discovered(
    partition_by: PartitionBy | str,
    *,
    weights: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
) -> DiscoveredPartitions:
    """One partition for each key that the stream holds: all `*` of a filter, or those that `PartitionBy` names.

    Without a `*` each subject that matches is a partition. Weights and labels are by the filter of a partition, which
    need not exist yet.

    >>> discovered(PartitionBy("dc.*.*.completion", key=[1])).filter_of("dc.etch1.c2.completion")
    'dc.etch1.*.completion'
    """
    by = PartitionBy.of(partition_by)
    # What makes the same partitions is equal: (2, 1) and (1, 2), and all tokens and the whole subject.
    whole = not by.filter.endswith(">") and len(by.key) == len(wildcard_positions(by.filter))
    return DiscoveredPartitions(
        by.filter,
        () if whole else tuple(sorted(by.key)),
        {one: check_weight(weight, shown(one)) for one, weight in (weights or {}).items()},
        {one: check_label(label) for one, label in (labels or {}).items()},
    )


# ---- a KV value -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvPartitions:
    """A list in a KV value. Made by `from_kv`."""

    bucket: str
    key: str

    def resolve(self, value: bytes) -> PartitionSet:
        """The partitions of the value: a JSON list of subjects, or of objects with `subject`, `weight` and `label`.

        Raises `InvalidInput`. Whoever watches the key goes on with the list before.

        >>> value = b'["a.*", {"subject": "b.*", "weight": 2, "label": "gpu"}]'
        >>> from_kv("plants", "tools").resolve(value).partitions[1].weight
        2
        """
        where = f"key {shown(self.key)} of bucket {shown(self.bucket)}"
        try:
            entries = json.loads(value)
        except ValueError as error:
            raise InvalidInput(f"{where} is not JSON ({error}): write a list of subjects") from None
        if not isinstance(entries, list):
            raise InvalidInput(f"{where} holds {shown(entries)}: write a list of subjects")
        try:
            return _from_entries(entries).resolve()
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None

    def to_wire(self) -> dict[str, Any]:
        return {"kind": "kv", "bucket": self.bucket, "key": self.key}


def from_kv(bucket: str, key: str) -> KvPartitions:
    """Partitions listed in a KV value."""
    for what, name in (("bucket", bucket), ("key", key)):
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"{what} {shown(name)} is not a name: give the {what} that holds the list of subjects")
    return KvPartitions(bucket, key)


def partitions_from_entries(entries: Iterable[Any]) -> tuple[Partition, ...]:
    """What `entries_of` described, or a list in a KV value."""
    return _from_entries(entries).resolve().partitions


def entries_of(partitions: Iterable[Partition]) -> tuple[dict[str, Any], ...]:
    """Partitions as JSON: subjects, and weights and labels where they say something."""
    return tuple(
        {"subject": one.filter}
        | ({"weight": one.weight} if one.weight != 1.0 else {})
        | ({"label": one.label} if one.label is not None else {})
        for one in partitions
    )


def _from_entries(entries: Iterable[Any]) -> ListedPartitions:
    subjects: list[str] = []
    weights: dict[str, float] = {}
    labels: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, str):
            entry = {"subject": entry}  # noqa: PLW2901 - the short form of the same
        if not isinstance(entry, dict) or not isinstance(entry.get("subject"), str):
            raise InvalidInput(f"entry {shown(entry)} has no subject: write a text, or an object with 'subject'")
        if unknown := sorted(set(entry) - {"subject", "weight", "label"}):
            raise InvalidInput(f"entry {shown(entry)} has {shown(unknown[0])}: use subject, weight and label")
        subject = entry["subject"]
        for name, into in (("weight", weights), ("label", labels)):
            value = entry.get(name)
            if value is None:
                continue
            if into.setdefault(subject, value) != value:
                raise InvalidInput(f"subject {shown(subject)} is listed twice, with two {name}s: list it once")
        subjects.append(subject)
    return listed(subjects, weights=weights, labels=labels)


# ---- all sources ------------------------------------------------------------------------------------

PartitionSource = HashedPartitions | ListedPartitions | DiscoveredPartitions | KvPartitions


def source_from_wire(wire: Mapping[str, Any]) -> PartitionSource:
    """The source that `to_wire` described; raises `InvalidInput` if it describes none."""
    try:
        match wire.get("kind"):
            case "hashed":
                return hashed(
                    wire["partitions"],
                    PartitionBy(wire["filter"], key=tuple(wire["key"])),
                    weights={int(number): weight for number, weight in wire.get("weights", {}).items()},
                    labels={int(number): label for number, label in wire.get("labels", {}).items()},
                    copy=StreamCopy(**wire["copy"]) if "copy" in wire else None,
                )
            case "listed":
                return listed(wire["subjects"], weights=wire.get("weights"), labels=wire.get("labels"))
            case "discovered":
                return discovered(
                    PartitionBy(wire["filter"], key=tuple(wire["key"])),
                    weights=wire.get("weights"),
                    labels=wire.get("labels"),
                )
            case "kv":
                return from_kv(wire["bucket"], wire["key"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"partition source {shown(wire)} is not complete: {error!r}") from None
    raise InvalidInput(
        f"partition source {shown(wire)} is of no kind that this version knows: "
        "hashed, listed, discovered or kv; update keylane"
    )


def check_weight(weight: float, what: str) -> float:
    """Return a weight unchanged, or raise `InvalidInput`. `what` says of what it is."""
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or not 0 <= weight <= MAX_WEIGHT:
        raise InvalidInput(f"weight {shown(weight)} of {what} is not a weight: give a number from 0 to {MAX_WEIGHT:,}")
    return weight


class _Node:
    """A token of filters that were seen: what follows it, and the filter that ends here."""

    __slots__ = ("end", "following")

    def __init__(self) -> None:
        self.following: dict[str, _Node] = {}
        self.end: str | None = None


def overlapping_filters(filters: Iterable[str]) -> tuple[str, str] | None:
    """The first pair of filters that some subject matches both of; equal filters count.

    A tree of tokens, so that ten thousand filters are not compared in pairs.

    >>> overlapping_filters(["dc.a.x", "dc.b.*", "dc.*.y"])
    ('dc.b.*', 'dc.*.y')
    """
    root = _Node()
    for later in filters:
        parts = later.split(".")
        if earlier := _crossing(root, parts):
            return earlier, later
        node = root
        for part in parts:
            node = node.following.setdefault(part, _Node())
        node.end = later
    return None


def _crossing(root: _Node, parts: list[str]) -> str | None:
    """A filter of the tree that overlaps with these tokens."""
    open_nodes = [root]
    for part in parts:
        if part == ">":
            return next((end for node in open_nodes if (end := _first_below(node))), None)
        reached: list[_Node] = []
        for node in open_nodes:
            if rest := node.following.get(">"):
                return rest.end
            if part == "*":
                reached += node.following.values()
            else:
                reached += [one for token in (part, "*") if (one := node.following.get(token))]
        open_nodes = reached
    return next((node.end for node in open_nodes if node.end), None)


def _first_below(node: _Node) -> str | None:
    """A filter that is longer than the tokens up to this one."""
    waiting = list(node.following.values())
    while waiting:
        one = waiting.pop()
        if one.end:
            return one.end
        waiting += one.following.values()
    return None
