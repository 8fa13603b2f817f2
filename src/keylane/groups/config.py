"""The stored configuration of a group: what it says, its rules, its limits, and its JSON.

The JSON is a contract with members in other languages. Two dialects exist: the present one, and the older one of the
Go library 0.1 (one filter, and the member's name as its priority group). A record is read in either, and a change
keeps the dialect that it was written in. It also keeps the form of every value that it does not change (`-1`, `[]`,
`null`, unknown fields): members in Go compare the whole record, and end if more than its members changed.
"""

from __future__ import annotations

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

from keylane.core.names import check_member_name
from keylane.core.partitions import Partitioning, check_partition_count, partition_filters
from keylane.core.plans import Plan, balanced, check_plan
from keylane.core.subjects import check_filter, overlaps, shown
from keylane.errors import BrokenGroupRecord, InvalidInput

# ---- limits: they keep one wrong number from taking a server or a member down ---------------------------

MAX_PARTITIONS = 16_384
"""Of a group, unless `partition_limit` says otherwise."""
MAX_GROUP_FILTERS = 8
"""That a new group may be given. Every member asks for each of its partitions once per filter."""
MAX_CONSUMER_FILTERS = 2_000
"""Of one member's consumer. nats-server 2.15 makes one with 2,000 in 0.2 to 2.7 s, depending on how many partitions
others have; one with 10,000 takes 12 s, which is longer than a request waits."""
ENVIRONMENT = "KEYLANE_MAX_PARTITIONS"

_chosen: int | None = None


def partition_limit(new: int | None = None) -> int:
    """Return how many partitions a group may have in this process; with an argument, set that limit first.

    The default is the environment variable KEYLANE_MAX_PARTITIONS, else 16,384.

    >>> partition_limit(20_000)
    20000
    """
    global _chosen  # noqa: PLW0603 - one bound for the process, as csv.field_size_limit has
    if new is not None:
        _chosen = check_partition_count(new)
    if _chosen is not None:
        return _chosen
    given = os.environ.get(ENVIRONMENT)
    if given is None:
        return MAX_PARTITIONS
    try:
        return check_partition_count(int(given))
    except ValueError:
        raise InvalidInput(f"{ENVIRONMENT} is {shown(given)}: give a whole number of partitions") from None


def check_partitions(partitions: int) -> None:
    """Raise `InvalidInput` if a group has more partitions than this process allows."""
    check_partition_count(partitions)
    if partitions > (limit := partition_limit()):
        raise InvalidInput(
            f"{partitions:,} partitions are more than the {limit:,} that are allowed here, as every member holds and "
            f"compares all of them; to go above, set {ENVIRONMENT}={partitions}, or call "
            f"groups.partition_limit({partitions})"
        )


def check_group_filters(filters: int) -> None:
    """Raise `InvalidInput` if a new group has more filters than it may be given."""
    if filters > MAX_GROUP_FILTERS:
        raise InvalidInput(
            f"{filters} filters: a group takes {MAX_GROUP_FILTERS}, as every member asks for each of its partitions "
            "once per filter; use a wider filter, or several groups"
        )


def most_partitions(filters: int) -> int:
    """How many partitions one consumer can have if each of them takes this many filter subjects."""
    return max(1, MAX_CONSUMER_FILTERS // max(1, filters))


def members_needed(partitions: int, filters: int) -> int:
    """The fewest members that can read all partitions of a group."""
    return -(-partitions // most_partitions(filters))


# ---- configurations --------------------------------------------------------------------------------------

Config = TypeVar("Config", bound="GroupConfig")
T = TypeVar("T")
Dialect = Literal["present", "go-0.1"]
Kind = Literal["static", "elastic"]
PRIORITY_GROUP = "PCG"

_PRIORITY_GROUP_NAME = re.compile(r"[A-Za-z0-9\-_/=]{1,16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig(ABC):
    """What static and elastic groups share: the number of partitions, and who owns them.

    Give `members`, and every member computes the same balanced plan; or give `mappings`, a plan of your own.
    """

    kind: ClassVar[Kind]
    partitions: int
    """The record says `max_members`, as members in Go do."""
    members: tuple[str, ...] = ()
    mappings: Plan | None = None
    dialect: Dialect = "present"
    listed: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), compare=False, repr=False)
    """The mappings in the order of the record: members in other languages ask for their filters in that order."""
    stored: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The record that this was read from; None: it is new. Only owners may differ from it."""

    @property
    def plan(self) -> Plan:
        return self.mappings if self.mappings is not None else _balanced(self.members, self.partitions)

    def has_member(self, member: str) -> bool:
        return member in (self.mappings.members if self.mappings is not None else self.members)

    def priority_group(self, member: str) -> str:
        return member if self.dialect == "go-0.1" else PRIORITY_GROUP

    @property
    @abstractmethod
    def group_filters(self) -> tuple[str, ...]:
        """The filters that the group was given, without partition numbers."""

    @property
    def stops_go_members(self) -> bool:
        """Whether members in Go cannot join: with a mapping they repeat each partition's filter once per group filter,
        which the server refuses (10138)."""
        return self.mappings is not None and len(self.group_filters) > 1

    def filters_of(self, member: str) -> tuple[str, ...]:
        """The filter subjects of a member's consumer, in the order in which every language asks for them."""
        owned = self.plan.partitions_of(member)
        ascending = partition_filters(owned, self._asked_filters())
        listed = dict(self.listed).get(member, owned)
        if listed == owned:
            return tuple(ascending)
        places = {partition: place for place, partition in enumerate(owned)}
        blocks = range(0, len(ascending), len(owned))
        return tuple(ascending[block + places[partition]] for block in blocks for partition in listed)

    def too_many_filters(self, member: str) -> str | None:
        """Why this member's consumer would have too many filter subjects for the server; None if it has not."""
        owned, asked = self.plan.partitions_of(member), len(self._asked_filters())
        if not self._is_too_much(owned):
            return None
        times = f"{len(owned):,} partitions" + (f", each under {asked} filters" if asked > 1 else "")
        return (
            f"member {member!r} would read {times}, in one consumer: the server needs too long for one with more than "
            f"{MAX_CONSUMER_FILTERS:,} filter subjects; the group needs at least {self.members_needed:,} members"
        )

    @property
    def members_needed(self) -> int:
        """The fewest members that can read all its partitions."""
        return members_needed(self.partitions, len(self._asked_filters()))

    @property
    def overloaded(self) -> tuple[str, ...]:
        """The members whose consumers would have too many filter subjects for the server."""
        return tuple(member for member, owned in self.plan.shares if self._is_too_much(owned))

    def check_consumers(self) -> None:
        """Raise `InvalidInput` if a member's consumer would have too many filter subjects for the server."""
        if self.overloaded:
            raise InvalidInput(self.too_many_filters(self.overloaded[0]))

    def _is_too_much(self, owned: Sequence[int]) -> bool:
        return len(owned) * max(1, len(self._asked_filters())) > MAX_CONSUMER_FILTERS

    def check(self) -> None:
        check_partitions(self.partitions)
        if self.dialect not in ("present", "go-0.1"):
            raise InvalidInput(f"dialect is {self.dialect!r}: use present or go-0.1")
        if self.members and self.mappings is not None:
            raise InvalidInput("give members or mappings, not both: a group is balanced or mapped")
        for member in self.members:
            check_member_name(member)
        if self.mappings is not None:
            if len(self.mappings.mappings()) > self.partitions:
                raise InvalidInput(
                    f"{len(self.mappings.mappings())} members are mapped, but the group has {self.partitions} "
                    "partitions: a member without a partition has nothing to do"
                )
            check_plan(self.mappings, self.partitions)
        if self.dialect == "go-0.1":
            for member in self.mappings.members if self.mappings is not None else self.members:
                _check_go_member(member)

    def to_json(self) -> bytes:
        if self.stored is None:
            return json.dumps(self._new_record() | self._owners()).encode()
        wire = dict(self.stored)
        before = _owners_from_wire(wire)
        for name, is_same in (
            ("members", before["members"] == self.members),
            ("member_mappings", before["mappings"] == self.mappings),
        ):
            if is_same:
                continue
            wire.pop(name, None)
            wire |= {one: value for one, value in self._owners().items() if one == name}
        return json.dumps(wire).encode()

    def _owners(self) -> dict[str, Any]:
        wire: dict[str, Any] = {}
        if self.members:
            wire["members"] = list(self.members)
        if self.mappings is not None:
            wire["member_mappings"] = [
                {"member": member, "partitions": list(partitions)} for member, partitions in self.mappings.mappings()
            ]
        return wire

    @abstractmethod
    def _new_record(self) -> dict[str, Any]:
        """All but the owners."""

    @abstractmethod
    def _asked_filters(self) -> Sequence[str]:
        """The filters within each partition of a member's consumer; none means every subject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig(GroupConfig):
    """A group on a stream whose subjects already begin with a partition number. It never changes."""

    kind: ClassVar[Kind] = "static"
    filters: tuple[str, ...] = ()

    @property
    def group_filters(self) -> tuple[str, ...]:
        return self.filters

    def _asked_filters(self) -> Sequence[str]:
        # The old Go library delivers what the group did not ask for; members of one group must agree, so in its
        # dialect we do as it does.
        return () if self.dialect == "go-0.1" else self.filters

    def check(self) -> None:
        super(StaticConfig, self).check()
        _check_filters(self.filters)
        if self.dialect == "go-0.1" and len(self.filters) > 1:
            raise InvalidInput(
                f"{len(self.filters)} filters: the dialect go-0.1 has one at most; use the present dialect"
            )

    def same_group(self, other: StaticConfig) -> bool:
        """Whether both are the same group; the order of the members does not count."""
        return replace(self, members=tuple(sorted(set(self.members)))) == replace(
            other, members=tuple(sorted(set(other.members)))
        )

    def _new_record(self) -> dict[str, Any]:
        wire: dict[str, Any] = {"max_members": self.partitions}
        if self.dialect == "go-0.1":
            wire["filter"] = self.filters[0] if self.filters else ""
        elif self.filters:
            wire["filters"] = list(self.filters)
        return wire

    @classmethod
    def from_json(cls, data: bytes, where: str) -> StaticConfig:
        wire = _read(data, where)
        old = "filter" in wire and "filters" not in wire

        def make() -> StaticConfig:
            one = _value(wire, "filter", str, "")
            return cls(
                filters=((one,) if one else ()) if old else tuple(_values(wire, str, "filters")),
                dialect="go-0.1" if old else "present",
                **_owners_from_wire(wire),
            )

        return _checked(where, make)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig(GroupConfig):
    """A group on any stream: the server copies what matches into a work queue, with partition numbers.

    Only `members` or `mappings` may change while the group lives.
    """

    kind: ClassVar[Kind] = "elastic"
    partitioning: tuple[Partitioning, ...] = ()
    """None: every subject, hashed whole."""
    max_buffered_messages: int = 0
    max_buffered_bytes: int = 0

    @property
    def group_filters(self) -> tuple[str, ...]:
        return tuple(one.filter for one in self.partitioning)

    def _asked_filters(self) -> Sequence[str]:
        # Mapped members of every language ask for whole partitions: the queue holds nothing else.
        return () if self.mappings is not None or self.dialect == "go-0.1" else self.group_filters

    def check(self) -> None:
        super(ElasticConfig, self).check()
        _check_filters(self.group_filters)
        for one in self.partitioning:
            if "*" not in one.filter.split(".") and not one.filter.endswith(">"):
                raise InvalidInput(
                    f"filter {one.filter!r} has no wildcard: members in Go refuse it, as all of it is one key; use a "
                    "filter with '*', or one that ends with '>'"
                )
            if not one.wildcards and self.dialect == "go-0.1":
                raise InvalidInput(
                    f"filter {one.filter!r} names no wildcards to hash: list at least one of its `*`, or use the "
                    "present dialect, where the whole subject is the key then"
                )
        if self.dialect == "go-0.1" and len(self.partitioning) != 1:
            raise InvalidInput(
                f"{len(self.partitioning)} filters: the dialect go-0.1 has exactly one; use the present dialect"
            )
        for name, limit in (("messages", self.max_buffered_messages), ("bytes", self.max_buffered_bytes)):
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
                raise InvalidInput(f"a buffer of {shown(limit)} {name}: give a positive limit, or 0 for none")

    def with_owners(self, *, members: Sequence[str] = (), mappings: Plan | None = None) -> ElasticConfig:
        """The same group with other owners. Raises `InvalidInput` if the server could not carry their consumers."""
        changed = replace(self, members=tuple(members), mappings=mappings, listed=())
        changed.check()
        changed.check_consumers()
        return changed

    def same_but_owners(self, other: ElasticConfig) -> bool:
        return replace(self, members=(), mappings=None) == replace(other, members=(), mappings=None)

    def _new_record(self) -> dict[str, Any]:
        wire: dict[str, Any] = {"max_members": self.partitions}
        if self.dialect == "go-0.1":
            wire["filter"] = self.partitioning[0].filter
            wire["partitioning_wildcards"] = list(self.partitioning[0].wildcards)
        else:
            wire["partitioning_filters"] = [
                {"filter": one.filter, "partitioning_wildcards": list(one.wildcards)} for one in self.partitioning
            ] or None
        if self.max_buffered_messages:
            wire["max_buffered_msg"] = self.max_buffered_messages
        if self.max_buffered_bytes:
            wire["max_buffered_bytes"] = self.max_buffered_bytes
        return wire

    @classmethod
    def from_json(cls, data: bytes, where: str) -> ElasticConfig:
        wire = _read(data, where)
        old = "filter" in wire and "partitioning_filters" not in wire

        def make() -> ElasticConfig:
            listed = [wire] if old else _values(wire, dict, "partitioning_filters")
            return cls(
                partitioning=tuple(
                    Partitioning(
                        _value(one, "filter", str, ""),
                        tuple(_values(one, int, "partitioning_wildcards")),
                        wire["max_members"],
                    )
                    for one in listed
                ),
                max_buffered_messages=max(0, _value(wire, "max_buffered_msg", int, 0)),  # -1 is no limit too
                max_buffered_bytes=max(0, _value(wire, "max_buffered_bytes", int, 0)),
                dialect="go-0.1" if old else "present",
                **_owners_from_wire(wire),
            )

        return _checked(where, make)


@lru_cache(maxsize=64)
def _balanced(members: tuple[str, ...], partitions: int) -> Plan:
    return balanced(members, partitions)


def _check_go_member(member: str) -> None:
    if not _PRIORITY_GROUP_NAME.fullmatch(member):
        raise InvalidInput(
            f"member name {shown(member)}: in the dialect go-0.1 it is also the name of a priority group, for which "
            "the server takes 1 to 16 of A-Z, a-z, 0-9, '-', '_', '/' and '='; choose a shorter name"
        )


def _check_filters(filters: Sequence[str]) -> None:
    for index, one in enumerate(filters):
        check_filter(one)
        for other in filters[:index]:
            if overlaps(one, other):
                raise InvalidInput(
                    f"filters {other!r} and {one!r} overlap: a message that matches both would have two keys"
                )


# ---- reading: records may come from anybody -------------------------------------------------------------

_KINDS: dict[type, str] = {str: "text", int: "whole number", dict: "object"}


_OLDER_NAMES = {
    "member-mappings": "member_mappings",
    "msg-buffer-size": "max_buffered_msg",
    "partitioning-wildcards": "partitioning_wildcards",
}


def _read(data: bytes, where: str) -> dict[str, Any]:
    """The record with present field names; its values keep the form that they are stored in."""
    try:
        wire = json.loads(data, parse_constant=_not_json, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise BrokenGroupRecord(f"{where} is not JSON ({error}): repair or delete this key") from error
    if not isinstance(wire, dict) or not _is_a(wire.get("max_members"), int):
        raise BrokenGroupRecord(
            f"{where} is no group configuration: it has no whole number max_members; repair or delete this key"
        )
    filters = wire.get("partitioning_filters")
    for one in [wire, *(filters if isinstance(filters, list) else ())]:
        for older, name in _OLDER_NAMES.items():
            if isinstance(one, dict) and one.get(older) is not None and one.get(name) is None:
                one[name] = one.pop(older)
    return wire


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _not_json(number)


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{shown(word)} is no number that JSON can hold")


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _value(wire: Mapping[str, Any], name: str, kind: type[T], otherwise: T) -> T:
    """A field of this kind; `otherwise` where it is missing or null."""
    value = wire.get(name)
    if value is None:
        return otherwise
    if not _is_a(value, kind):
        raise InvalidInput(f"{name} is {shown(value)}, not a {_KINDS[kind]}")
    return value  # type: ignore[no-any-return]  # just checked


def _values(wire: Mapping[str, Any], kind: type[T], name: str) -> list[T]:
    """The list in this field; nothing where it is missing or null."""
    value = wire.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(_is_a(one, kind) for one in value):
        raise InvalidInput(f"{name} is {shown(value)}, not a list of {_KINDS[kind]}s")
    return value


def _owners_from_wire(wire: Mapping[str, Any]) -> dict[str, Any]:
    mappings = tuple(
        (_value(one, "member", str, ""), tuple(_values(one, int, "partitions")))
        for one in _values(wire, dict, "member_mappings")
    )
    return {
        "partitions": wire["max_members"],
        "members": tuple(_values(wire, str, "members")),
        "mappings": Plan.from_mappings(mappings) if mappings else None,
        "listed": mappings,
        "stored": wire,
    }


def _checked(where: str, make: Callable[[], Config]) -> Config:
    try:
        config = make()
        config.check()
    except InvalidInput as error:
        raise BrokenGroupRecord(
            f"{where} is not a valid group configuration: {error}. Nothing was changed; repair or delete this key"
        ) from error
    return config
