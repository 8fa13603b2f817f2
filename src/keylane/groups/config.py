"""The stored configuration of a group: what it says, its rules, and its JSON.

The JSON is a contract with members in other languages. Two dialects exist: the present one, and the older one of the
Go library 0.1 (one filter, and the member's name as its priority group). A record is read in either, and a change
keeps the dialect that it was written in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

from keylane.core.names import check_member_name
from keylane.core.partitions import Partitioning, check_partition_count, partition_filters
from keylane.core.plans import Plan, balanced, check_plan
from keylane.core.subjects import check_filter, overlaps, shown
from keylane.errors import BrokenGroupRecord, InvalidInput

Config = TypeVar("Config", bound="GroupConfig")
T = TypeVar("T")
Dialect = Literal["present", "go-0.1"]
PRIORITY_GROUP = "PCG"

_PRIORITY_GROUP_NAME = re.compile(r"[A-Za-z0-9\-_/=]{1,16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """What static and elastic groups share: the number of partitions, and who owns them.

    Give `members`, and every member computes the same balanced plan; or give `mappings`, a plan of your own.
    """

    max_members: int
    members: tuple[str, ...] = ()
    mappings: Plan | None = None
    dialect: Dialect = "present"
    listed: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), compare=False, repr=False)
    """The mappings in the order of the record: members in other languages ask for their filters in that order."""

    @property
    def plan(self) -> Plan:
        return self.mappings if self.mappings is not None else _balanced(self.members, self.max_members)

    def has_member(self, member: str) -> bool:
        return member in (self.mappings.members if self.mappings is not None else self.members)

    def priority_group(self, member: str) -> str:
        return member if self.dialect == "go-0.1" else PRIORITY_GROUP

    def check(self) -> None:
        check_partition_count(self.max_members)
        if self.dialect not in ("present", "go-0.1"):
            raise InvalidInput(f"dialect is {self.dialect!r}: use present or go-0.1")
        if self.members and self.mappings is not None:
            raise InvalidInput("give members or mappings, not both: a group is balanced or mapped")
        for member in self.members:
            check_member_name(member)
        if self.mappings is not None:
            if len(self.mappings.mappings()) > self.max_members:
                raise InvalidInput(
                    f"{len(self.mappings.mappings())} members are mapped, but the group has {self.max_members} "
                    "partitions: a member without a partition has nothing to do"
                )
            check_plan(self.mappings, self.max_members)
        if self.dialect == "go-0.1":
            for member in self.mappings.members if self.mappings is not None else self.members:
                _check_go_member(member)

    def _filters_of(self, member: str, filters: Sequence[str]) -> tuple[str, ...]:
        owned = self.plan.partitions_of(member)
        ascending = partition_filters(owned, filters)
        listed = dict(self.listed).get(member, owned)
        places = [owned.index(partition) for partition in listed]
        blocks = range(0, len(ascending), len(owned))
        return tuple(ascending[block + place] for block in blocks for place in places)

    def _owners_to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {}
        if self.members:
            wire["members"] = list(self.members)
        if self.mappings is not None:
            wire["member_mappings"] = [
                {"member": member, "partitions": list(partitions)} for member, partitions in self.mappings.mappings()
            ]
        return wire


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig(GroupConfig):
    """A group on a stream whose subjects already begin with a partition number. It never changes."""

    filters: tuple[str, ...] = ()

    def filters_of(self, member: str) -> tuple[str, ...]:
        # The old Go library delivers what the group did not ask for; members of one group must agree, so in its
        # dialect we do as it does.
        return self._filters_of(member, () if self.dialect == "go-0.1" else self.filters)

    def check(self) -> None:
        super(StaticConfig, self).check()
        _check_filters(self.filters)
        if self.dialect == "go-0.1" and len(self.filters) > 1:
            raise InvalidInput(
                f"{len(self.filters)} filters: the dialect go-0.1 has one at most; use the present dialect"
            )

    def same_group(self, other: StaticConfig) -> bool:
        """Whether both say the same; the order of the members means nothing."""
        return replace(self, members=tuple(sorted(set(self.members)))) == replace(
            other, members=tuple(sorted(set(other.members)))
        )

    def to_json(self) -> bytes:
        wire: dict[str, Any] = {"max_members": self.max_members}
        if self.dialect == "go-0.1":
            wire["filter"] = self.filters[0] if self.filters else ""
        elif self.filters:
            wire["filters"] = list(self.filters)
        return json.dumps(wire | self._owners_to_wire()).encode()

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

    partitioning: tuple[Partitioning, ...] = ()
    """None: every subject, hashed whole."""
    max_buffered_messages: int = 0
    max_buffered_bytes: int = 0

    def filters_of(self, member: str) -> tuple[str, ...]:
        # Mapped members of every language ask for whole partitions: the queue holds nothing else.
        mapped = self.mappings is not None or self.dialect == "go-0.1"
        return self._filters_of(member, () if mapped else [one.filter for one in self.partitioning])

    def check(self) -> None:
        super(ElasticConfig, self).check()
        _check_filters([one.filter for one in self.partitioning])
        for one in self.partitioning:
            if not one.wildcards:
                raise InvalidInput(
                    f"filter {one.filter!r} names no wildcards to hash: list at least one of its `*`, or give no "
                    "filters at all to hash whole subjects"
                )
        if self.dialect == "go-0.1" and len(self.partitioning) != 1:
            raise InvalidInput(
                f"{len(self.partitioning)} filters: the dialect go-0.1 has exactly one; use the present dialect"
            )
        for name, limit in (("messages", self.max_buffered_messages), ("bytes", self.max_buffered_bytes)):
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
                raise InvalidInput(f"a buffer of {shown(limit)} {name}: give a positive limit, or 0 for none")

    def with_owners(self, *, members: Sequence[str] = (), mappings: Plan | None = None) -> ElasticConfig:
        changed = replace(self, members=tuple(members), mappings=mappings, listed=())
        changed.check()
        return changed

    def same_but_owners(self, other: ElasticConfig) -> bool:
        return replace(self, members=(), mappings=None) == replace(other, members=(), mappings=None)

    def to_json(self) -> bytes:
        wire: dict[str, Any] = {"max_members": self.max_members}
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
        return json.dumps(wire | self._owners_to_wire()).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> ElasticConfig:
        wire = _read(data, where)
        old = "filter" in wire and "partitioning_filters" not in wire

        def make() -> ElasticConfig:
            listed = [wire] if old else _values(wire, dict, "partitioning_filters")
            return cls(
                partitioning=tuple(
                    Partitioning(_value(one, "filter", str, ""), _wildcards(one), wire["max_members"]) for one in listed
                ),
                max_buffered_messages=_value(wire, "max_buffered_msg", int, _value(wire, "msg-buffer-size", int, 0)),
                max_buffered_bytes=_value(wire, "max_buffered_bytes", int, 0),
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


def _read(data: bytes, where: str) -> dict[str, Any]:
    try:
        wire = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenGroupRecord(f"{where} is not JSON ({error}): repair or delete this key") from error
    if not isinstance(wire, dict) or not _is_a(wire.get("max_members"), int):
        raise BrokenGroupRecord(
            f"{where} is no group configuration: it has no whole number max_members; repair or delete this key"
        )
    return wire


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


def _values(wire: Mapping[str, Any], kind: type[T], *names: str) -> list[T]:
    """The list in the first of these fields that is there; nothing where they are missing or null."""
    name = next((one for one in names if wire.get(one) is not None), names[0])
    value = wire.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(_is_a(one, kind) for one in value):
        raise InvalidInput(f"{name} is {shown(value)}, not a list of {_KINDS[kind]}s")
    return value


def _wildcards(wire: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(_values(wire, int, "partitioning_wildcards", "partitioning-wildcards"))


def _owners_from_wire(wire: Mapping[str, Any]) -> dict[str, Any]:
    mappings = tuple(
        (_value(one, "member", str, ""), tuple(_values(one, int, "partitions")))
        for one in _values(wire, dict, "member_mappings", "member-mappings")
    )
    return {
        "max_members": wire["max_members"],
        "members": tuple(_values(wire, str, "members")),
        "mappings": Plan.from_mappings(mappings) if mappings else None,
        "listed": mappings,
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
