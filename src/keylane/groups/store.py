"""The records of groups: two KV buckets, shared with members in other languages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keylane.core.name_suggestions import name_missing
from keylane.errors import GroupError, InvalidInput, KeylaneError, NoSuchGroup, NotFound
from keylane.groups.config import ElasticConfig, Kind, StaticConfig
from keylane.groups.consumer_spec import ELASTIC_BUCKET, STATIC_BUCKET, key_of_group
from keylane.jetstream import Bucket, Connection, KvEntry, change, existing_stream


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group's configuration, the revision it was read at, and when that was written."""

    config: StaticConfig | ElasticConfig
    revision: int
    written: str

    @property
    def version(self) -> tuple[int, str]:
        """The version of the record. The revision alone is not enough: a bucket that is created again counts from 1."""
        return self.revision, self.written


def bucket_of(connection: Connection, kind: Kind) -> Bucket:
    """The bucket that the groups of a kind are in."""
    return Bucket(connection, STATIC_BUCKET if kind == "static" else ELASTIC_BUCKET)


def record_name(kind: Kind, stream: str, group: str) -> str:
    """The record's name in errors."""
    bucket = STATIC_BUCKET if kind == "static" else ELASTIC_BUCKET
    return f"record {key_of_group(stream, group)!r} in bucket {bucket!r}"


async def read_group(connection: Connection, kind: Kind, stream: str, group: str) -> StoredGroup | None:
    entry = await bucket_of(connection, kind).get(key_of_group(stream, group))
    if entry is None or entry.value is None:
        return None
    read = StaticConfig.from_json if kind == "static" else ElasticConfig.from_json
    return StoredGroup(read(entry.value, record_name(kind, stream, group)), entry.revision, entry.written)


async def read_any(connection: Connection, stream: str, group: str, kind: Kind | None = None) -> StoredGroup:
    """Read the group of this name. `kind` tells a static and an elastic group of the same name apart."""
    if kind not in (None, "static", "elastic"):
        raise InvalidInput(f"kind is {kind!r}: use static or elastic")
    static = await read_group(connection, "static", stream, group) if kind != "elastic" else None
    elastic = await read_group(connection, "elastic", stream, group) if kind != "static" else None
    if static is not None and elastic is not None:
        raise GroupError(f"stream {stream!r} has a static and an elastic group named {group!r}: say which with kind=")
    found = static or elastic
    if found is None:
        raise await no_such_group(connection, stream, group, kind)
    return found


async def group_names(connection: Connection, stream: str | None = None) -> list[tuple[Kind, str, str]]:
    """Kind, stream and name of the groups of a stream, or of all streams; static ones first."""
    kinds: tuple[Kind, ...] = ("static", "elastic")
    keys = [
        (kind, *key.partition(".")[::2])
        for kind in kinds
        for key in await bucket_of(connection, kind).keys("*" if stream is None else stream)
    ]
    return [(kind, one, group) for kind, one, group in keys if group]


async def no_such_group(connection: Connection, stream: str, group: str, kind: Kind | None = None) -> KeylaneError:
    """The error for a group that does not exist: it names those that do, and the streams if it is the stream."""
    problem = f"stream {stream!r} has no {kind + ' ' if kind else ''}group {group!r}"
    try:
        there = await group_names(connection, stream)
        if not there:
            await existing_stream(connection, stream)
    except NotFound as missing:
        return missing
    except KeylaneError as failure:
        return NoSuchGroup(f"{problem}, and the existing names cannot be listed: {failure}")
    for other, _, name in there:
        if name == group and other != kind:
            what = f"group {group!r} of stream {stream!r} is {other}, not {kind}"
            return NoSuchGroup(f"{what}: use `keylane {other} …`, or kind={other!r}")
    return NoSuchGroup(name_missing(problem, group, [name for one, _, name in there if kind in (None, one)]))


async def change_elastic(
    connection: Connection, stream: str, group: str, decide: Callable[[ElasticConfig], ElasticConfig]
) -> ElasticConfig:
    """Change an elastic group's members by compare-and-set; two admins never overwrite each other."""
    bucket = bucket_of(connection, "elastic")
    key = key_of_group(stream, group)
    decided: list[ElasticConfig] = []

    async def write(entry: KvEntry | None) -> None:
        if entry is None or entry.value is None:
            raise await no_such_group(connection, stream, group, "elastic")
        before = ElasticConfig.from_json(entry.value, record_name("elastic", stream, group))
        after = decide(before)
        decided.append(after)
        if after != before:
            await bucket.put(key, after.to_json(), revision=entry.revision)

    await change(lambda: bucket.get(key), write)
    return decided[-1]
