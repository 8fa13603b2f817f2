"""Where groups are written down: two KV buckets, shared with members in other languages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from keylane.errors import GroupError, InvalidInput, NoSuchGroup
from keylane.groups.config import ElasticConfig, StaticConfig
from keylane.groups.consumer_spec import ELASTIC_BUCKET, STATIC_BUCKET, key_of_group
from keylane.jetstream import Bucket, Connection, KvEntry, change

Kind = Literal["static", "elastic"]


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group's configuration, the revision it was read at, and when that was written."""

    config: StaticConfig | ElasticConfig
    revision: int
    written: str

    @property
    def version(self) -> tuple[int, str]:
        """Of the record. The revision alone does not tell: a bucket that is made anew counts from 1 again."""
        return self.revision, self.written


def static_bucket(connection: Connection) -> Bucket:
    return Bucket(connection, STATIC_BUCKET)


def elastic_bucket(connection: Connection) -> Bucket:
    return Bucket(connection, ELASTIC_BUCKET)


def record_name(bucket: str, stream: str, group: str) -> str:
    """What errors call a record."""
    return f"record {key_of_group(stream, group)!r} in bucket {bucket!r}"


async def read_static(connection: Connection, stream: str, group: str) -> StoredGroup | None:
    entry = await static_bucket(connection).get(key_of_group(stream, group))
    if entry is None or entry.value is None:
        return None
    config = StaticConfig.from_json(entry.value, record_name(STATIC_BUCKET, stream, group))
    return StoredGroup(config, entry.revision, entry.written)


async def read_elastic(connection: Connection, stream: str, group: str) -> StoredGroup | None:
    entry = await elastic_bucket(connection).get(key_of_group(stream, group))
    if entry is None or entry.value is None:
        return None
    config = ElasticConfig.from_json(entry.value, record_name(ELASTIC_BUCKET, stream, group))
    return StoredGroup(config, entry.revision, entry.written)


async def read_any(connection: Connection, stream: str, group: str, kind: Kind | None = None) -> StoredGroup:
    """The group of this name. Other libraries let a static and an elastic one share it: then say which."""
    if kind not in (None, "static", "elastic"):
        raise InvalidInput(f"kind is {kind!r}: use static or elastic")
    static = await read_static(connection, stream, group) if kind != "elastic" else None
    elastic = await read_elastic(connection, stream, group) if kind != "static" else None
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
    bucket = elastic_bucket(connection)
    key = key_of_group(stream, group)
    decided: list[ElasticConfig] = []

    async def write(entry: KvEntry | None) -> None:
        if entry is None or entry.value is None:
            raise NoSuchGroup(f"stream {stream!r} has no elastic group {group!r}: create it first")
        before = ElasticConfig.from_json(entry.value, record_name(ELASTIC_BUCKET, stream, group))
        after = decide(before)
        decided.append(after)
        if after != before:
            await bucket.put(key, after.to_json(), revision=entry.revision)

    await change(lambda: bucket.get(key), write)
    return decided[-1]
