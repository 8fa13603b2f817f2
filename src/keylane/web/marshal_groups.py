"""Marshal's world: the groups of every coordination log of an account, as overviews like those of other groups.

Each log is read once and then followed, so that a look costs only what was written since the last one.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import datetime

from keylane.core.claim_facts import Claim, Freshness
from keylane.core.group_summary import known_max, known_sum
from keylane.core.world import World
from keylane.errors import KeylaneError, LogReplaced
from keylane.jetstream import Connection, streams
from keylane.marshal import JetStreamLog, StreamSource, catch_up, open_jetstream_log
from keylane.overview import GroupOverview, MemberOverview, PartitionOverview

_INTERVAL = "keylane_marshal_interval_s"
"""In the metadata of the stream of a log."""
_MOST_LAGS = 64
"""With more partitions than these their lag is not asked for, and is unknown."""


class MarshalGroups:
    """The coordination logs of an account, open for as long as the block lasts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._source = StreamSource(connection)
        self._open = AsyncExitStack()
        self._seen: frozenset[str] | None = None
        self._logs: dict[str, tuple[JetStreamLog, World]] = {}

    async def __aenter__(self) -> MarshalGroups:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def read(self, stream_names: frozenset[str], at: datetime) -> list[GroupOverview]:
        """The groups of all logs, as the logs say now. `stream_names`: the streams that the account has."""
        if stream_names != self._seen:
            await self._look_for_logs()
            self._seen = stream_names
        found = await asyncio.gather(*(self._read(name, at) for name in sorted(self._logs)))
        return [one for of_log in found for one in of_log]

    async def _look_for_logs(self) -> None:
        names = {
            wire["config"]["name"]
            async for wire in streams.list_json(self._connection)
            if _INTERVAL in (wire["config"].get("metadata") or {})
        }
        self._logs = {name: known for name, known in self._logs.items() if name in names}
        for name in names - self._logs.keys():
            log = await self._open.enter_async_context(open_jetstream_log(self._connection, name))
            self._logs[name] = log, _new_world(log)

    async def _read(self, name: str, at: datetime) -> list[GroupOverview]:
        log, world = self._logs[name]
        try:
            await catch_up(log, world)
        except LogReplaced:  # opened anew by the next look
            del self._logs[name]
            self._seen = None
            return []
        except KeylaneError as error:
            return [GroupOverview(kind="marshal", stream=name, name="log", problem=str(error))]
        return [await self._group(name, one, world, at) for one in world.groups()]

    async def _group(self, log: str, group: str, world: World, at: datetime) -> GroupOverview:
        claims = sorted((one for one in world.claims() if one.key.group == group), key=lambda one: one.key)
        is_counted = len(claims) <= _MOST_LAGS
        lags = await asyncio.gather(*(self._lag(one) for one in claims)) if is_counted else [None] * len(claims)
        partitions = [
            _partition(one, world, lag, at, topics=len({each.key.topic for each in claims}))
            for one, lag in zip(claims, lags, strict=True)
        ]
        owners = sorted({one.owner for one in partitions if one.owner is not None})
        return GroupOverview(
            kind="marshal",
            stream=log,
            name=group,
            members=tuple(_consumer(one, partitions) for one in owners),
            partitions=tuple(partitions),
            lag=known_sum(one.lag for one in partitions),
            lag_s=known_max(one.lag_s for one in partitions),
            is_paused=bool(world.pauses(group)),
        )

    async def _lag(self, claim: Claim) -> int | None:
        """None: unknown, also where nobody has said up to where the partition is handled."""
        if claim.offset is None:
            return None
        try:
            return await self._source.backlog(claim.key.topic, claim.key.partition, claim.offset)
        except KeylaneError:
            return None


def _new_world(log: JetStreamLog) -> World:
    return World(log.interval_s, log.partitions, first_offset=log.first_offset)


def _partition(claim: Claim, world: World, lag: int | None, at: datetime, *, topics: int) -> PartitionOverview:
    key = claim.key
    # The log's time stands still while nobody writes: what the wall clock says is over is over.
    holds = claim.holds(int(at.timestamp() * 1000)) and world.freshness(*key) is not Freshness.STALE
    return PartitionOverview(
        id=str(key.partition) if topics == 1 else f"{key.topic}/{key.partition}",
        assigned=claim.owner.client if claim.owner is not None else None,
        owner=claim.owner.client if claim.owner is not None and holds else None,
        lag=lag,
        lag_s=0.0 if lag == 0 else None,
        token=claim.token,
    )


def _consumer(name: str, partitions: list[PartitionOverview]) -> MemberOverview:
    owned = [one for one in partitions if one.owner == name]
    return MemberOverview(
        name=name,
        state="live",
        is_active=True,
        partitions=tuple(one.id for one in owned),
        lag=known_sum(one.lag for one in owned),
        lag_s=known_max(one.lag_s for one in owned),
    )
