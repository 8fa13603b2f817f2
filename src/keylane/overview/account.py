"""Reads the state of every group of an account from what the server knows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

from keylane.core.fleet_records import ASSIGNMENT, DRAINS, LEADER, SPEC, TABLE
from keylane.errors import KeylaneError
from keylane.fleet.admin import by_fleet
from keylane.fleet.store import FLEET_BUCKET
from keylane.groups import ElasticConfig, StaticConfig
from keylane.groups.config import Kind
from keylane.groups.store import bucket_of, record_name
from keylane.jetstream import Bucket, Connection, KvEntry, streams
from keylane.overview.account_reader import AccountReader
from keylane.overview.fleets import read_fleet
from keylane.overview.member_groups import read_member_group
from keylane.overview.model import AccountOverview, GroupOverview, OverviewKind, StreamOverview

_FLEET_RECORDS = (SPEC, LEADER, ASSIGNMENT, TABLE, DRAINS, "worker.*", "claim.>", "position.*")
"""All but the history, which may be long."""


async def overview(connection: Connection, *, ask_members: bool = False) -> AccountOverview:
    """Every group of the account: who handles what, how far behind it is, what it gave up.

    Nothing is changed, and no member is disturbed: members in other languages are shown as well. `ask_members` asks
    running instances where they run, which adds host, process and standbys of keylane's members, and 0.3 s.

    Costs a few requests for each stream, and one for each partition in which messages wait. A group that cannot be
    read has a `problem`, and does not hide the others. Raises a `KeylaneError` if the account cannot be read at all.

    >>> for group in (await overview(connection)).groups:
    ...     print(group.summary)
    billing keeps up: 3 members, lag 12, 0.4 s
    """
    kinds: tuple[Kind, ...] = ("static", "elastic")
    found, stored, fleet_entries = await asyncio.gather(
        _streams(connection),
        asyncio.gather(*(bucket_of(connection, kind).get_matching(">") for kind in kinds)),
        _fleet_entries(connection),
    )
    reader = AccountReader(connection, found)
    reading = [
        *(
            one
            for kind, entries in zip(kinds, stored, strict=True)
            for one in _groups(reader, kind, entries, ask_members)
        ),
        *(
            _or_problem(read_fleet(reader, stream, fleet, records), "fleet", stream, fleet)
            for (stream, fleet), records in by_fleet(fleet_entries).items()
            if SPEC in records
        ),
    ]
    groups = await asyncio.gather(*reading)
    return AccountOverview(
        read_at=reader.read_at,
        groups=tuple(sorted(groups, key=lambda one: (one.stream, one.name, one.kind != "static"))),
        streams=tuple(
            StreamOverview(
                name=name,
                messages=wire["state"]["messages"],
                bytes=wire["state"]["bytes"],
                first_sequence=wire["state"]["first_seq"],
                last_sequence=wire["state"]["last_seq"],
                consumers=wire["state"]["consumer_count"],
            )
            for name, wire in sorted(found.items())
        ),
    )


async def _streams(connection: Connection) -> dict[str, dict[str, Any]]:
    return {wire["config"]["name"]: wire async for wire in streams.list_json(connection)}


async def _fleet_entries(connection: Connection) -> list[KvEntry]:
    bucket = Bucket(connection, FLEET_BUCKET)
    found = await asyncio.gather(*(bucket.get_matching(f"*.*.{one}") for one in _FLEET_RECORDS))
    return [entry for entries in found for entry in entries]


def _groups(
    reader: AccountReader, kind: Kind, entries: list[KvEntry], ask_members: bool
) -> Iterator[Awaitable[GroupOverview]]:
    for entry in entries:
        stream, _, group = entry.key.partition(".")
        if entry.value is not None and group:
            reading = _read_group(reader, kind, stream, group, entry.value, ask_members=ask_members)
            yield _or_problem(reading, kind, stream, group)


async def _read_group(
    reader: AccountReader, kind: Kind, stream: str, group: str, value: bytes, *, ask_members: bool
) -> GroupOverview:
    from_json = StaticConfig.from_json if kind == "static" else ElasticConfig.from_json
    config = from_json(value, record_name(kind, stream, group))
    return await read_member_group(reader, stream, group, config, ask_members=ask_members)


async def _or_problem(reading: Awaitable[GroupOverview], kind: OverviewKind, stream: str, name: str) -> GroupOverview:
    try:
        return await reading
    except KeylaneError as error:
        return GroupOverview(kind=kind, stream=stream, name=name, problem=str(error))
