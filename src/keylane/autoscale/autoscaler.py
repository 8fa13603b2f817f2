"""Looks at a group, decides, and acts: changes the members of an elastic group, or runs a command for a fleet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic

from keylane.autoscale.load import load_of
from keylane.core.member_pool import chosen_members
from keylane.core.name_suggestions import name_missing
from keylane.core.names import check_member_name
from keylane.core.scaling import LoadObservation, ScalingDecision, ScalingRule, ScalingState, step
from keylane.errors import GroupError, InvalidInput, KeylaneError, NoSuchGroup
from keylane.groups import ElasticConfig
from keylane.groups.presence import all_instances
from keylane.groups.store import change_elastic
from keylane.jetstream import Connection
from keylane.overview import GroupOverview, overview

ScaleCommand = Callable[[int], Awaitable[None]]
"""Makes so many workers run. Raises a `KeylaneError` if it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleReport:
    """One look: what was seen, what was decided and why, what was done."""

    time: datetime
    stream: str
    group: str
    wanted: int | None
    """The number of workers that there should be; None: unknown."""
    change: int
    workers: int | None
    active: int | None
    lag: int | None
    lag_s: float | None
    reason: str
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    done: bool = False
    """Whether the change was made."""

    @property
    def is_known(self) -> bool:
        """Whether the wanted number rests on a lag that is known."""
        return self.wanted is not None and self.lag is not None and self.lag_s is not None


class Autoscaler:
    """Call `look` again and again, every few seconds.

    `pool`: names of members of an elastic group that may be added and dropped; the others stay. `command`: makes so
    many workers of a fleet run. With neither, or with `dry_run`, it only says what it would do.

    >>> rule = ScalingRule(target_s=60, min_workers=2, max_workers=8)
    >>> scaler = Autoscaler(connection, "ORDERS", "billing", rule, pool=["worker-1", "worker-2", "worker-3"])
    >>> while True:
    ...     print((await scaler.look()).reason)
    ...     await asyncio.sleep(5)
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        group: str,
        rule: ScalingRule,
        *,
        pool: Sequence[str] = (),
        command: ScaleCommand | None = None,
        dry_run: bool = False,
    ) -> None:
        rule.check()
        for name in pool:
            check_member_name(name)
        if pool and command is not None:
            raise InvalidInput("a pool is for elastic groups and a command for fleets: give one of them")
        self._connection = connection
        self.stream = stream
        self.group = group
        self.rule = rule
        self._pool = list(dict.fromkeys(pool))
        self._command = command
        self._dry_run = dry_run
        self._state = ScalingState()
        self._absent_since: dict[str, float] = {}
        self._is_command_due = False
        self.last: AutoscaleReport | None = None
        """Of the last look."""
        self.looked_at_s = float("-inf")

    async def look(self) -> AutoscaleReport:
        """Look once, decide, and act. Raises `InvalidInput` or `NoSuchGroup` for a group that cannot be scaled at all.

        A group that cannot be read now gives a report with `wanted=None`, and nothing is changed.
        """
        try:
            account = await overview(self._connection)
            group = account.group(self.stream, self.group)
            if group is None:
                names = [one.name for one in account.groups if one.stream == self.stream]
                raise NoSuchGroup(
                    name_missing(f"stream {self.stream!r} has no group {self.group!r}", self.group, names)
                )
            self._check_kind(group)
            now = load_of(account, group, monotonic())
            report = await self._act(group, now)
        except KeylaneError as error:
            if isinstance(error, InvalidInput | NoSuchGroup):
                raise
            report = self._unknown(str(error))
        self.last, self.looked_at_s = report, monotonic()
        return report

    def _check_kind(self, group: GroupOverview) -> None:
        if group.kind == "static":
            raise InvalidInput(f"group {self.group!r} is static: its members never change; scale an elastic group")
        if group.kind == "elastic" and self._command is not None:
            raise InvalidInput(f"group {self.group!r} is elastic: name the members that may be added as its pool")
        if group.kind != "elastic" and self._pool:
            raise InvalidInput(f"{self.group!r} is a {group.kind}: only elastic groups have a pool of members")

    async def _act(self, group: GroupOverview, now: LoadObservation) -> AutoscaleReport:
        self._state, decision = step(self.rule, self._state, now)
        if group.problem is not None:
            return self._unknown(group.problem)
        if self._pool:
            return await self._change_members(group, now, decision)
        if decision.change:
            self._state = self._state.changed(None if self._dry_run else decision.wanted, now.at_s)
            self._is_command_due = self._command is not None and not self._dry_run
        if not self._is_command_due:
            return self._report(now, decision, decision.reason)
        assert self._command is not None
        try:
            await self._command(decision.wanted)
        except KeylaneError as error:
            return self._report(now, decision, f"{decision.reason}; {error}; it is tried again")
        self._is_command_due = False
        return self._report(now, decision, decision.reason, done=True)

    # ---- elastic groups ---------------------------------------------------------------------------------------

    async def _change_members(
        self, group: GroupOverview, now: LoadObservation, decision: ScalingDecision
    ) -> AutoscaleReport:
        listed = [one.name for one in group.members if one.state != "leaving"]
        dead = self._dead(group, now)
        if not self._state.may_change(self.rule, now.at_s):
            dead = []
        if not decision.change and not dead:
            return self._report(now, decision, decision.reason)
        running = await self._running(group)
        chosen = chosen_members(listed, self._pool, decision.wanted, running=running, dead=dead)
        added = tuple(one for one in chosen if one not in listed)
        dropped = tuple(one for one in listed if one not in chosen)
        reason = decision.reason
        if dead:
            reason += f"; {', '.join(dead)} {'has' if len(dead) == 1 else 'have'} no instance for a window"
        if not added and not dropped:
            return self._report(now, decision, f"{reason}; the pool has no other member that runs")
        if not self._dry_run:
            await change_elastic(self._connection, self.stream, self.group, lambda old: _with(old, listed, chosen))
        self._state = self._state.changed(None, now.at_s)
        return self._report(now, decision, reason, added=added, dropped=dropped, done=not self._dry_run)

    def _dead(self, group: GroupOverview, now: LoadObservation) -> list[str]:
        """Members of the pool that had no instance for a window while messages wait for them."""
        absent = [one.name for one in group.members if one.state == "absent" and one.name in self._pool and one.lag]
        self._absent_since = {one: self._absent_since.get(one, now.at_s) for one in absent}
        return [one for one, since_s in self._absent_since.items() if now.at_s - since_s >= self.rule.window_s]

    async def _running(self, group: GroupOverview) -> set[str] | None:
        """The members that have an instance, listed or not; None: members in Go, which do not answer."""
        answered = {one.member for one in await all_instances(self._connection, self.stream, self.group)}
        at_work = {one.name for one in group.active}
        return None if at_work and not at_work & answered else answered

    # ---- reports ----------------------------------------------------------------------------------------------

    def _report(
        self,
        now: LoadObservation,
        decision: ScalingDecision,
        reason: str,
        *,
        added: tuple[str, ...] = (),
        dropped: tuple[str, ...] = (),
        done: bool = False,
    ) -> AutoscaleReport:
        return AutoscaleReport(
            time=datetime.now(UTC),
            stream=self.stream,
            group=self.group,
            wanted=decision.wanted,
            change=decision.change,
            workers=now.workers,
            active=now.active,
            lag=now.lag,
            lag_s=now.lag_s,
            reason=reason,
            added=added,
            dropped=dropped,
            done=done,
        )

    def _unknown(self, reason: str) -> AutoscaleReport:
        return AutoscaleReport(
            time=datetime.now(UTC),
            stream=self.stream,
            group=self.group,
            wanted=None,
            change=0,
            workers=None,
            active=None,
            lag=None,
            lag_s=None,
            reason=" ".join(reason.split()),
        )


def _with(config: ElasticConfig, seen: list[str], chosen: list[str]) -> ElasticConfig:
    """The group with these members, if it still has those that were seen."""
    if config.mappings is not None:
        raise GroupError("the group has a mapping, which names its members: `keylane elastic delete-mapping` first")
    if set(config.members) != set(seen):
        raise GroupError("the members were changed by somebody else meanwhile: looking again")
    return config.with_owners(members=chosen)
