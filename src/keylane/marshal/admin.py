"""The admin's view of a coordination log: who owns what, now or earlier, how far behind, and pausing a group.

Owns: `ReleaseGroup` records, and the figures that operators look at. It never claims a partition.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Claim, Freshness, Owner
from keylane.core.claim_records import Placing, check_id
from keylane.core.world import World
from keylane.errors import InvalidInput, TwoHashes
from keylane.marshal.log import CoordinationLog, catch_up
from keylane.marshal.log_view import ClientIdentity, new_instance
from keylane.marshal.options import interval_of
from keylane.marshal.source import Source
from keylane.retrying import Backoff

_log = logging.getLogger("keylane.marshal")

_LONGEST_RETRY_S = 30.0
_LONG_PAST_S = 0


@dataclass(frozen=True, slots=True)
class PartitionLoad:
    """One partition of a group: its offset, and how many messages wait. `offset` None: nobody has ever read it."""

    where: TopicPartition
    offset: int | None
    lag: int
    freshness: Freshness | None


@dataclass(frozen=True, slots=True)
class Load:
    """The partitions of one consumer; `owner` None: those that nobody owns."""

    owner: Owner | None
    partitions: tuple[PartitionLoad, ...]

    @property
    def lag(self) -> int:
        """How many messages wait in all its partitions."""
        return sum(one.lag for one in self.partitions)


class Admin:
    """Inspects a coordination log, and pauses groups. `heartbeat_interval_s`: for a log that does not know its own.

    >>> admin = Admin(log)
    >>> await admin.release_group("billing", until=datetime.now(UTC) + timedelta(minutes=5))
    """

    def __init__(
        self,
        log: CoordinationLog,
        *,
        heartbeat_interval_s: float | None = None,
        placing: Placing = "topic_partition",
        client_id: str = "admin",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._interval_s = interval_of(log, heartbeat_interval_s)
        self._placing: Placing = placing
        self._client_id = check_id(client_id, "client id")
        self._instance = new_instance()
        self._wall_clock = wall_clock
        self._new_world()  # raises for invalid arguments now

    def __repr__(self) -> str:
        return f"<Admin of {self._log!r}>"

    # ---- inspecting ---------------------------------------------------------------------------------

    async def world(self, *, keep_history: bool = False) -> World:
        """The world as the log has it now."""
        world = self._new_world(keep_history)
        await catch_up(self._log, world)
        return world

    async def world_at(self, when: datetime, *, keep_history: bool = False) -> World:
        """The world as it was at an earlier time of the log, as far back as its records go."""
        until_ms = _unix_ms(when, "when")
        world = self._new_world(keep_history)
        for number in range(self._log.partitions):
            first, end = await self._log.bounds(number)
            world.begins(number, first, end)
            async for record in self._log.read(number, first):
                if record.time_ms > until_ms:
                    break
                world.apply(record)
        return world

    async def loads(self, source: Source, group: str, topics: Sequence[str]) -> list[Load]:
        """What each consumer of a group owns, and its lag; partitions that nobody owns come last."""
        world = await self.world()
        by_owner: dict[Owner | None, list[PartitionLoad]] = {}
        for topic in topics:
            for number in range(await source.partitions(topic)):
                claim = world.claim_of(group, topic, number)
                held = claim is not None and world.holds(group, topic, number)
                one = await self._load(source, group, TopicPartition(topic, number), claim, world)
                by_owner.setdefault(claim.owner if held and claim is not None else None, []).append(one)
        unowned = by_owner.pop(None, [])
        found = [Load(owner, tuple(parts)) for owner, parts in sorted(by_owner.items(), key=lambda item: str(item[0]))]
        return found + ([Load(None, tuple(unowned))] if unowned else [])

    async def _load(
        self, source: Source, group: str, where: TopicPartition, claim: Claim | None, world: World
    ) -> PartitionLoad:
        offset = None if claim is None else claim.offset
        begin = offset if offset is not None else (await source.extent(*where)).earliest
        freshness = world.freshness(group, *where)
        return PartitionLoad(where, offset, await source.backlog(*where, begin), freshness)

    # ---- pausing ------------------------------------------------------------------------------------

    async def release_group(self, group: str, until: datetime) -> None:
        """Pause a group until then: its owners release, nobody claims. It ends by itself, or by `resume`.

        A group that is not in the log is paused as well, with a warning; `World.groups` lists those that are.
        """
        until_ms = _unix_ms(until, "until")
        if until_ms <= self._wall_clock() * 1000:
            raise InvalidInput(f"until is {until.isoformat()}, which is past: give a later time, or use resume")
        kept_s = await self._log.kept_for_s()
        if kept_s is not None and until_ms > (self._wall_clock() + kept_s) * 1000:
            raise InvalidInput(
                f"until is {until.isoformat()}, and the log keeps records for {timedelta(seconds=kept_s)} only: "
                "whoever starts later would not know of the pause; give an earlier time, and pause again before it ends"
            )
        await self._write_everywhere(group, -(-until_ms // 1000))

    async def resume(self, group: str) -> None:
        """End a pause now."""
        await self._write_everywhere(group, _LONG_PAST_S)

    async def _write_everywhere(self, group: str, expiry_s: int) -> None:
        """Write to every partition of the log: there is no order between them, and each has its own owners."""
        identity = ClientIdentity(self._client_id, group, self._instance, self._wall_clock)
        world = await self.world()
        if world.other_hash(lambda number: max(int(self._wall_clock() * 1000) - (world.now_ms(number) or 0), 0)):
            raise TwoHashes(
                f"{world.misplaced} records of the coordination log are where another hash puts them: look at "
                "`keylane marshal world`, and give everybody the same placing"
            )
        if group not in world.groups():
            _log.warning("the coordination log has no record of a group %r; it has of %s", group, world.groups())
        for number in range(self._log.partitions):
            # Writing the same record twice changes nothing.
            await Backoff("the coordination log", _LONGEST_RETRY_S, log=_log).call(
                partial(self._log.append, identity.release_group(expiry_s), number)
            )

    def _new_world(self, keep_history: bool = False) -> World:
        return World(
            self._interval_s,
            self._log.partitions,
            placing=self._placing,
            first_offset=self._log.first_offset,
            keep_history=keep_history,
        )


def _unix_ms(when: datetime, what: str) -> int:
    if not isinstance(when, datetime) or when.tzinfo is None:
        raise InvalidInput(f"{what} is {when!r}: give a datetime with a time zone")
    return int(when.timestamp() * 1000)
