"""The metrics of every group of an account, from an overview of it. No member takes part, nor has to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from time import monotonic

from keylane.errors import KeylaneError
from keylane.jetstream import Connection
from keylane.metrics.catalogue import Reading
from keylane.metrics.http_server import HealthReport
from keylane.overview import AccountOverview, GroupOverview, overview

_log = logging.getLogger("keylane.metrics")

KEPT_S = 5.0


class AccountExporter:
    """Reads the account when it is asked, and not again within `kept_s`: several scrapers cost as much as one.

    >>> exporter = AccountExporter(connection)
    >>> async with serve_metrics(exporter.readings, port=9465, health=exporter.health):
    ...     await asyncio.Event().wait()
    """

    def __init__(self, connection: Connection, *, kept_s: float = KEPT_S) -> None:
        self._connection = connection
        self._kept_s = kept_s
        self._reading = asyncio.Lock()
        self._account: AccountOverview | None = None
        self._read_at = float("-inf")
        self._took_s = 0.0
        self._failure: str | None = "the account was not read yet"

    async def readings(self) -> list[Reading]:
        """What is known now. What is not known is left out."""
        async with self._reading:
            if monotonic() >= self._read_at + self._kept_s:
                await self._read()
        found = [Reading("exporter_up", {}, int(self._account is not None))]
        if self._account is not None:
            found.append(Reading("exporter_read_seconds", {}, self._took_s))
            found += [reading for group in self._account.groups for reading in group_readings(group)]
        return found

    def health(self) -> HealthReport:
        """Ready if the last reading succeeded; a failure is a degraded state, as the next one may succeed."""
        failure = self._failure
        return HealthReport(ready=failure is None, degraded=(failure,) if failure is not None else ())

    async def _read(self) -> None:
        began = monotonic()
        try:
            self._account = await overview(self._connection)
        except KeylaneError as error:
            self._account, self._failure = None, str(error)
            _log.warning("the account cannot be read: %s", error)
        else:
            self._failure = None
        self._read_at = monotonic()
        self._took_s = self._read_at - began


def group_readings(group: GroupOverview) -> Iterator[Reading]:
    """The metrics of one group. What is unknown is left out."""
    labels = {"stream": group.stream, "group": group.name, "kind": group.kind}
    yield Reading("group_readable", labels, int(group.problem is None))
    if group.problem is not None:
        return
    values: dict[str, float | None] = {
        "group_members": len(group.members),
        "group_active_members": len(group.active),
        "group_partitions": len(group.partitions),
        "group_unowned_partitions": len(group.unowned),
        "group_lag_messages": group.lag,
        "group_lag_seconds": group.lag_s,
        "group_in_flight": group.in_flight,
        "group_redelivered": group.redelivered,
        "group_dead_letters": group.dead_letters,
        "group_parked_keys": group.parked_keys,
        "group_parked_messages": group.parked_messages,
        "group_paused": int(group.is_paused),
    }
    if group.queue is not None:
        values["group_queue_messages"] = group.queue.messages
        values["group_queue_bytes"] = group.queue.bytes
        values["group_queue_fill_ratio"] = group.queue.fill
        values["group_source_lag_messages"] = group.queue.source_lag
    yield from _known(labels, values)
    for member in group.members:
        yield from _known(
            labels | {"member": member.name},
            {
                "group_member_active": int(member.is_active),
                "group_member_partitions": len(member.partitions),
                "group_member_lag_messages": member.lag,
                "group_member_lag_seconds": member.lag_s,
                "group_member_in_flight": member.in_flight,
                "group_member_max_in_flight": member.max_in_flight,
            },
        )
    for partition in group.partitions:
        named = labels | {"partition": partition.id}
        yield from _known(
            named,
            {"group_partition_lag_messages": partition.lag, "group_partition_lag_seconds": partition.lag_s},
        )
        if partition.owner is not None:
            yield Reading("group_partition_owner", named | {"member": partition.owner}, 1)


def _known(labels: dict[str, str], values: dict[str, float | None]) -> Iterator[Reading]:
    for name, value in values.items():
        if value is not None:
            yield Reading(name, labels, value)
