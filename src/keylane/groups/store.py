"""Where groups are written down: two KV buckets, shared with members in other languages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keylane.errors import GroupError, NoSuchGroup
from keylane.groups.config import ElasticConfig, StaticConfig
from keylane.groups.shape import ELASTIC_BUCKET, STATIC_BUCKET, key_of_group
from keylane.jetstream.connection import Connection
from keylane.jetstream.kv import Bucket, KvEntry, change


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group's configuration and the revision it was read at."""

    config: StaticConfig | ElasticConfig
    revision: int


def static_bucket(connection: Connection) -> Bucket:
    return Bucket(connection, STATIC_BUCKET)


def elastic_bucket(connection: Connection) -> Bucket:
    return Bucket(connection, ELASTIC_BUCKET)


async def read_static(connection: Connection, stream: str, group: str) -> StoredGroup | None:
    entry = await static_bucket(connection).get(key_of_group(stream, group))
    if entry is None or entry.value is None:
        return None
    return StoredGroup(StaticConfig.from_json(entry.value, _where(STATIC_BUCKET, stream, group)), entry.revision)


async def read_elastic(connection: Connection, stream: str, group: str) -> StoredGroup | None:
    entry = await elastic_bucket(connection).get(key_of_group(stream, group))
    if entry is None or entry.value is None:
        return None
    return StoredGroup(ElasticConfig.from_json(entry.value, _where(ELASTIC_BUCKET, stream, group)), entry.revision)


async def read_any(connection: Connection, stream: str, group: str) -> StoredGroup:
    """The group of this name, static or elastic."""
    static = await read_static(connection, stream, group)
    elastic = await read_elastic(connection, stream, group)
    if static is not None and elastic is not None:
        raise GroupError(f"stream {stream!r} has a static and an elastic group named {group!r}: delete one of them")
    found = static or elastic
    if found is None:
        raise NoSuchGroup(f"stream {stream!r} has no group {group!r}: create it first")
    return found


async def change_elastic(
    connection: Connection, stream: str, group: str, decide: Callable[[ElasticConfig], ElasticConfig]
) -> ElasticConfig:
    """Change an elastic group's members by compare-and-set; two admins never overwrite each other."""
    bucket = elastic_bucket(connection)
    key = key_of_group(stream, group)
    decided: list[ElasticConfig] = []

    async def write(entry: KvEntry | None) -> None:
        if entry is None or entry.value is None:
            raise NoSuchGroup(f"stream {stream!r} has no elastic group {group!r}: create it first")
        before = ElasticConfig.from_json(entry.value, _where(ELASTIC_BUCKET, stream, group))
        after = decide(before)
        decided.append(after)
        if after != before:
            await bucket.put(key, after.to_json(), revision=entry.revision)

    await change(lambda: bucket.get(key), write)
    return decided[-1]


def _where(bucket: str, stream: str, group: str) -> str:
    return f"record {key_of_group(stream, group)!r} in bucket {bucket!r}"
