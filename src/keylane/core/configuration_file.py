"""The configuration of `keylane plan` and `keylane apply`: from the tables of a TOML file to wanted resources.

Owns the fields, their checks and their normal form, in which the present state of a server is compared with them
(`configuration_difference`). A field that the file leaves out is left alone on the server. Never reads a file.

    [streams.ORDERS]
    partition_by = "orders.*"
    partitions = 8

    [streams.ORDERS.elastic.billing]
    members = ["a", "b"]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from keylane.core.fleet_names import check_fleet_name
from keylane.core.fleet_partitions import StreamCopy, discovered, from_kv, hashed, listed
from keylane.core.name_suggestions import name_missing
from keylane.core.names import check_group_name, check_member_name, check_stream_name
from keylane.core.partitions import PartitionBy, Partitioning, check_partition_count
from keylane.core.plans import Plan, check_plan
from keylane.core.quantities import parse_duration_s, parse_size
from keylane.core.subjects import check_filter, is_subset, shown
from keylane.errors import InvalidInput

ResourceKind = Literal["stream", "dead letters", "static", "elastic", "fleet"]
Read = Callable[[Any], Any]

SPEC_FIELDS = ("lease_s", "layout", "acks", "state")
"""Of a fleet, beside what describes its partitions."""


class ResourceKey(NamedTuple):
    """What a file names. `name` is that of the group or fleet."""

    kind: ResourceKind
    stream: str
    name: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "stream":
                return f"stream {self.stream}"
            case "dead letters":
                return f"dead letters of {self.stream}"
            case "fleet":
                return f"fleet {self.stream}/{self.name}"
        return f"{self.kind} group {self.stream}/{self.name}"


@dataclass(frozen=True, slots=True)
class WantedResource:
    """A resource as the file wants it."""

    key: ResourceKey
    fields: Mapping[str, Any] | None
    """None: it is to be absent."""
    stops_go_members: bool = False
    """The file says that a group has no members in Go, which a mapping beside two or more filters would stop."""


def read_configuration(tables: Mapping[str, Any]) -> dict[ResourceKey, WantedResource]:
    """What the tables of a file want. Raises `InvalidInput`, which names the field and what it must be.

    >>> list(read_configuration({"streams": {"ORDERS": {"subjects": ["orders.>"]}}}))
    [ResourceKey(kind='stream', stream='ORDERS', name='')]
    """
    _check_known(tables, ("streams",), "the file")
    wanted = [
        one
        for stream, table in _tables(tables.get("streams", {}), "streams")
        for one in _stream(check_stream_name(stream), table)
    ]
    return {one.key: one for one in wanted}


# ---- values ------------------------------------------------------------------------------------------------


class _Wrong(Exception):
    """What a field must be instead."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong("a text")
    return value


def _whole(least: int, most: int | None = None) -> Read:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least or (most and value > most):
            raise _Wrong(f"a whole number from {least}{f' to {most}' if most else ' on'}")
        return value

    return read


def _seconds(value: Any) -> float:
    if not isinstance(value, str):
        raise _Wrong('a duration in quotes, such as "90s", "12h" or "30d"; "0" is none')
    return parse_duration_s(value)


def _number_of_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _Wrong("seconds, more than 0")
    return float(value)


def _bytes(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        raise _Wrong('a size in quotes, such as "500MB" or "10GiB", or a number of bytes; 0 is none')
    return parse_size(value, "it")


def _choice(*known: str) -> Read:
    def read(value: Any) -> str:
        if value not in known:
            raise _Wrong(f"one of {', '.join(known)}")
        return str(value)

    return read


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("true or false")
    return value


def _list(of: Read, *, ordered: bool = False) -> Read:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Wrong("a list")
        found = [of(one) for one in value]
        return tuple(found if ordered else sorted(set(found)))

    return read


def _mapping(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if not isinstance(value, dict) or not all(isinstance(one, list) for one in value.values()):
        raise _Wrong("a table of members and their partitions, such as { a = [0, 1], b = [2, 3] }")
    return normal_mapping(Plan.from_mappings(list(value.items())))


def normal_mapping(plan: Plan) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """A plan as a value that compares equal to the same plan."""
    return tuple((member, tuple(partitions)) for member, partitions in plan.mappings())


def _partition_by(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """`"orders.*"`, `{ filter = "orders.*.*", key = [2] }`, or a list of these."""
    found = []
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str):
            by = PartitionBy(one)
        elif isinstance(one, dict) and "filter" in one:
            _check_known(one, ("filter", "key"), "partition_by")
            by = PartitionBy(_text(one["filter"]), key=one.get("key"))
        else:
            raise _Wrong('a filter such as "orders.*", or { filter = "orders.*.*", key = [2] }, or a list of these')
        found.append((by.filter, tuple(by.key or ())))
    return tuple(found)


def _table_of(fields: Mapping[str, Read]) -> Read:
    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _Wrong("a table")
        return _fields(value, fields, "it")

    return read


# ---- sections ----------------------------------------------------------------------------------------------

_LIMITS: dict[str, Read] = {"max_age": _seconds, "max_bytes": _bytes, "max_messages": _whole(0)}
_STREAM: dict[str, Read] = {
    "subjects": _list(check_filter),
    "partition_by": check_filter,
    "key": _list(_whole(1), ordered=True),
    "partitions": check_partition_count,
    "storage": _choice("file", "memory"),
    "replicas": _whole(1, 5),
    "retention": _choice("limits", "interest", "work"),
    **_LIMITS,
    "max_messages_per_subject": _whole(0),
    "max_message_size": _bytes,
    "discard": _choice("old", "new"),
    "duplicate_window": _seconds,
    "max_consumers": _whole(0),
    "compression": _choice("none", "s2"),
    "description": _text,
}
_OWNERS: dict[str, Read] = {
    "members": _list(check_member_name),
    "mapping": _mapping,
    "stop_go_members": _boolean,
}
_STATIC: dict[str, Read] = {
    "partitions": check_partition_count,
    "filters": _list(check_filter, ordered=True),
    **_OWNERS,
}
_ELASTIC: dict[str, Read] = {
    "partitions": check_partition_count,
    "partition_by": _partition_by,
    "max_buffered_messages": _whole(0),
    "max_buffered_bytes": _bytes,
    **_OWNERS,
}
_FLEET: dict[str, Read] = {
    "partitions": check_partition_count,
    "partition_by": check_filter,
    "key": _list(_whole(1), ordered=True),
    "copy": _table_of({"max_messages": _whole(0), "max_bytes": _bytes}),
    "subjects": _list(check_filter),
    "discover": check_filter,
    "kv": _table_of({"bucket": _text, "key": _text}),
    "lease_s": _number_of_seconds,
    "layout": _choice("partition", "worker"),
    "acks": _choice("message", "prefix"),
    "state": _choice("replicated", "checkpointed"),
}
_SECTIONS = ("dead_letters", "static", "elastic", "fleets")


def _stream(stream: str, table: Mapping[str, Any]) -> Iterator[WantedResource]:
    where = f"streams.{stream}"
    _check_known(table, (*_STREAM, *_SECTIONS, "absent"), where)
    own = {name: value for name, value in table.items() if name not in _SECTIONS}
    fields = _present(own, _STREAM, where)
    if fields is not None:
        fields = _numbered(fields, where)
    yield WantedResource(ResourceKey("stream", stream), fields)
    if "dead_letters" in table:
        section = f"{where}.dead_letters"
        yield WantedResource(
            ResourceKey("dead letters", stream), _present(_table(table["dead_letters"], section), _LIMITS, section)
        )
    numbering = _only(fields or {}, "partition_by", "key", "partitions")
    for name, each in _tables(table.get("static", {}), f"{where}.static"):
        section = f"{where}.static.{name}"
        found = _present(each, _STATIC, section)
        if found is not None:
            found = _static({**_only(numbering, "partitions"), **found}, section)
        yield _group(ResourceKey("static", stream, check_group_name(name)), found)
    for name, each in _tables(table.get("elastic", {}), f"{where}.elastic"):
        section = f"{where}.elastic.{name}"
        found = _present(each, _ELASTIC, section)
        if found is not None:
            found = _owners(found, section)
        yield _group(ResourceKey("elastic", stream, check_group_name(name)), found)
    for name, each in _tables(table.get("fleets", {}), f"{where}.fleets"):
        section = f"{where}.fleets.{name}"
        found = _present(each, _FLEET, section)
        yield WantedResource(
            ResourceKey("fleet", stream, check_fleet_name(name)),
            None if found is None else _fleet(found, numbering, section),
        )


def _group(key: ResourceKey, fields: dict[str, Any] | None) -> WantedResource:
    stops = fields is not None and fields.pop("stop_go_members", False)
    return WantedResource(key, fields, stops)


def _numbered(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """A stream's fields, with all that `partition_by` stands for."""
    if "partition_by" not in fields:
        if "partitions" in fields or "key" in fields:
            raise InvalidInput(f'{where}: partitions and key need partition_by, such as partition_by = "orders.*"')
        return fields
    if "partitions" not in fields:
        raise InvalidInput(f"{where}: partition_by needs partitions: ten times as many as workers is a good start")
    by = PartitionBy(fields["partition_by"], key=fields.get("key"))
    subjects = fields.get("subjects", (by.filter,))
    for one in subjects:
        if not is_subset(one, by.filter):
            raise InvalidInput(
                f"{where}: subject {shown(one)} is more than partition_by {shown(by.filter)} selects: such messages "
                "would get no partition number, and no group would see them"
            )
    Partitioning(by.filter, tuple(by.key or ()), fields["partitions"])
    return {**fields, "key": tuple(by.key or ()), "subjects": subjects}


def _static(fields: dict[str, Any], where: str) -> dict[str, Any]:
    if "partitions" not in fields:
        raise InvalidInput(f"{where}: give its stream partitions, or the group")
    if "members" not in fields and "mapping" not in fields:
        raise InvalidInput(f"{where}: a static group never changes, so it needs its members, or a mapping")
    return _owners(fields, where)


def _owners(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Members or a mapping: whoever gives one takes the other away."""
    if "members" in fields and "mapping" in fields:
        raise InvalidInput(f"{where}: give members or a mapping, not both: a group is balanced or mapped")
    if "members" in fields:
        return {**fields, "mapping": None}
    if "mapping" in fields:
        if "partitions" in fields:
            check_plan(Plan.from_mappings(fields["mapping"]), fields["partitions"])
        return {**fields, "members": ()}
    return fields


def _fleet(fields: dict[str, Any], numbering: dict[str, Any], where: str) -> dict[str, Any]:
    """A fleet's fields: those of its spec, and its source as it describes itself on the wire."""
    kinds = [name for name in ("subjects", "discover", "kv", "partition_by") if name in fields]
    if len(kinds) > 1:
        raise InvalidInput(f"{where}: give one of {', '.join(kinds)}: each says where the partitions come from")
    spec = {name: value for name, value in fields.items() if name in SPEC_FIELDS}
    key = fields.get("key")
    match kinds:
        case ["subjects"]:
            wire = listed(fields["subjects"]).to_wire()
        case ["discover"]:
            wire = discovered(PartitionBy(fields["discover"], key=key)).to_wire()
        case ["kv"]:
            kv = fields["kv"]
            if kv.keys() != {"bucket", "key"}:
                raise InvalidInput(f"{where}: kv needs a bucket and a key")
            wire = from_kv(kv["bucket"], kv["key"]).to_wire()
        case _:
            given = {**numbering, **fields}
            if "partition_by" not in given or "partitions" not in given:
                raise InvalidInput(
                    f"{where}: give its stream partition_by and partitions, or give the fleet partition_by, subjects, "
                    "discover or kv"
                )
            copy = StreamCopy(**fields["copy"]) if "copy" in fields else None
            wire = hashed(
                given["partitions"], PartitionBy(given["partition_by"], key=given.get("key")), copy=copy
            ).to_wire()
    return normal_source(wire) | spec


def normal_source(wire: Mapping[str, Any]) -> dict[str, Any]:
    """A source of partitions as fields: `source` has its kind."""
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in wire.items() if name != "kind"
    }
    return {"source": wire["kind"], **fields}


def wire_of_source(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What `normal_source` took."""
    rest = {name: value for name, value in fields.items() if name not in ("source", *SPEC_FIELDS)}
    return {"kind": fields["source"]} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in rest.items()
    }


# ---- small things ------------------------------------------------------------------------------------------


def _present(table: Mapping[str, Any], known: Mapping[str, Read], where: str) -> dict[str, Any] | None:
    """The fields; None if it is to be absent."""
    absent = table.get("absent", False)
    if not isinstance(absent, bool):
        raise InvalidInput(f"{where}.absent is {shown(absent)}: it must be true or false")
    rest = {name: value for name, value in table.items() if name != "absent"}
    _check_known(rest, (*known, "absent"), where)
    if absent and rest:
        raise InvalidInput(f"{where} is to be absent and has {', '.join(sorted(rest))}: remove one of the two")
    return None if absent else _fields(rest, known, where)


def _fields(table: Mapping[str, Any], known: Mapping[str, Read], where: str) -> dict[str, Any]:
    _check_known(table, known, where)
    found = {}
    for name, value in table.items():
        try:
            found[name] = known[name](value)
        except _Wrong as wrong:
            raise InvalidInput(f"{where}.{name} is {shown(value)}: it must be {wrong}") from None
        except InvalidInput as problem:
            raise InvalidInput(f"{where}.{name}: {problem}") from None
    return found


def _check_known(table: Mapping[str, Any], known: Any, where: str) -> None:
    for name in table:
        if name not in known:
            raise InvalidInput(name_missing(f"{where} has the field {shown(name)}, which is not known", name, known))


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} is {shown(value)}: it must be a table")
    return value


def _tables(value: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, table in _table(value, where).items():
        yield name, _table(table, f"{where}.{name}")


def _only(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}
