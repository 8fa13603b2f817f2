"""The stored configuration of a group: what it says, its rules, and its JSON.

The JSON is a contract with members in other languages. Two dialects exist: the present one, and the older one of the
Go library 0.1 (one filter, and the member's name as its priority group). A record is read in either, and a change
keeps the dialect that it was written in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from keylane.core.names import check_member_name
from keylane.core.partitions import Partitioning, check_partition_count, partition_filters
from keylane.core.plans import Plan, balanced, check_plan
from keylane.core.subjects import check_filter, overlaps
from keylane.errors import BrokenGroupRecord, InvalidInput

Config = TypeVar("Config", bound="GroupConfig")
Dialect = Literal["present", "go-0.1"]
PRIORITY_GROUP = "PCG"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """What static and elastic groups share: the number of partitions, and who owns them.

    Give `members`, and every member computes the same balanced plan; or give `mappings`, a plan of your own.
    """

    max_members: int
    members: tuple[str, ...] = ()
    mappings: Plan | None = None
    dialect: Dialect = "present"

    @property
    def plan(self) -> Plan:
        return self.mappings if self.mappings is not None else balanced(self.members, self.max_members)

    def has_member(self, member: str) -> bool:
        return member in (self.mappings.members if self.mappings is not None else self.members)

    def priority_group(self, member: str) -> str:
        return member if self.dialect == "go-0.1" else PRIORITY_GROUP

    def check(self) -> None:
        check_partition_count(self.max_members)
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

    def _owners_to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {}
        if self.members:
            wire["members"] = list(self.members)
        if self.mappings is not None:
            wire["member_mappings"] = [
                {"member": member, "partitions": list(partitions)}
                for member, partitions in self.mappings.mappings()
            ]
        return wire


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig(GroupConfig):
    """A group on a stream whose subjects already begin with a partition number. It never changes."""

    filters: tuple[str, ...] = ()

    def filters_of(self, member: str) -> tuple[str, ...]:
        # The old Go library delivers what the group did not ask for; members of one group must agree, so in its
        # dialect we do as it does.
        filters = () if self.dialect == "go-0.1" and self.mappings is not None else self.filters
        return tuple(partition_filters(self.plan.partitions_of(member), filters))

    def check(self) -> None:
        super(StaticConfig, self).check()
        _check_filters(self.filters)

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
        with_filter = "filter" in wire and "filters" not in wire
        filters = [wire["filter"]] if with_filter and wire["filter"] else wire.get("filters") or []
        return _checked(
            where,
            lambda: cls(
                filters=tuple(filters),
                dialect="go-0.1" if with_filter else "present",
                **_owners_from_wire(wire),
            ),
        )


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
        filters = () if mapped else [one.filter for one in self.partitioning]
        return tuple(partition_filters(self.plan.partitions_of(member), filters))

    def check(self) -> None:
        super(ElasticConfig, self).check()
        _check_filters([one.filter for one in self.partitioning])
        for one in self.partitioning:
            if not one.wildcards:
                raise InvalidInput(
                    f"filter {one.filter!r} names no wildcards to hash: list at least one of its `*`, or give no "
                    "filters at all to hash whole subjects"
                )
        for name, limit in (("messages", self.max_buffered_messages), ("bytes", self.max_buffered_bytes)):
            if limit < 0:
                raise InvalidInput(f"a buffer of {limit} {name}: give a positive limit, or 0 for none")

    def with_owners(self, *, members: Sequence[str] = (), mappings: Plan | None = None) -> ElasticConfig:
        changed = replace(self, members=tuple(members), mappings=mappings)
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
                {"filter": one.filter, "partitioning_wildcards": list(one.wildcards)}
                for one in self.partitioning
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
        listed = wire.get("partitioning_filters") or []
        if old:
            wildcards = wire.get("partitioning_wildcards", wire.get("partitioning-wildcards")) or []
            listed = [{"filter": wire["filter"], "partitioning_wildcards": wildcards}]
        return _checked(
            where,
            lambda: cls(
                partitioning=tuple(
                    Partitioning(one["filter"], tuple(one["partitioning_wildcards"]), wire["max_members"])
                    for one in listed
                ),
                max_buffered_messages=wire.get("max_buffered_msg", wire.get("msg-buffer-size", 0)) or 0,
                max_buffered_bytes=wire.get("max_buffered_bytes", 0) or 0,
                dialect="go-0.1" if old else "present",
                **_owners_from_wire(wire),
            ),
        )


def _check_filters(filters: Sequence[str]) -> None:
    for index, one in enumerate(filters):
        check_filter(one)
        for other in filters[:index]:
            if overlaps(one, other):
                raise InvalidInput(
                    f"filters {other!r} and {one!r} overlap: a message that matches both would have two keys"
                )


def _read(data: bytes, where: str) -> dict[str, Any]:
    try:
        wire = json.loads(data)
    except ValueError as error:
        raise BrokenGroupRecord(f"{where} is not JSON ({error}): repair or delete this key") from error
    if not isinstance(wire, dict) or not isinstance(wire.get("max_members"), int):
        raise BrokenGroupRecord(f"{where} is no group configuration: it has no number max_members")
    return wire


def _owners_from_wire(wire: Mapping[str, Any]) -> dict[str, Any]:
    mappings = wire.get("member_mappings", wire.get("member-mappings"))
    return {
        "max_members": wire["max_members"],
        "members": tuple(wire.get("members") or ()),
        "mappings": Plan.from_mappings((one["member"], one["partitions"]) for one in mappings)
        if mappings
        else None,
    }


def _checked(where: str, make: Callable[[], Config]) -> Config:
    try:
        config = make()
        config.check()
    except (InvalidInput, KeyError, TypeError, AttributeError) as error:
        raise BrokenGroupRecord(f"{where} is not a valid group configuration: {error}") from error
    return config
