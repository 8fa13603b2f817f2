"""The records of groups: two KV buckets, shared with members in other languages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keylane.errors import GroupError, InvalidInput, NoSuchGroup
from keylane.groups.config import ElasticConfig, Kind, StaticConfig
from keylane.groups.consumer_spec import ELASTIC_BUCKET, STATIC_BUCKET, key_of_group
from keylane.jetstream import Bucket, Connection, KvEntry, change


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
        raise NoSuchGroup(f"stream {stream!r} has no {kind + ' ' if kind else ''}group {group!r}: create it first")
    return found


async def change_elastic(
    connection: Connection, stream: str, group: str, decide: Callable[[ElasticConfig], ElasticConfig]
) -> ElasticConfig:
    """Change an elastic group's members by compare-and-set; two admins never overwrite each other."""
    bucket = bucket_of(connection, "elastic")
    key = key_of_group(stream, group)
    decided: list[ElasticConfig] = []

    async def write(entry: KvEntry | None) -> None:
        if entry is None or entry.value is None:
            raise NoSuchGroup(f"stream {stream!r} has no elastic group {group!r}: create it first")
        before = ElasticConfig.from_json(entry.value, record_name("elastic", stream, group))
        after = decide(before)
        decided.append(after)
        if after != before:
            await bucket.put(key, after.to_json(), revision=entry.revision)

    await change(lambda: bucket.get(key), write)
    return decided[-1]
