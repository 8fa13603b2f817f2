"""Autoscaling on a real server: the load goes up, members follow, the lag stays below its target."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from keylane import groups
from keylane.autoscale import Autoscaler, AutoscaleReport
from keylane.core.scaling import ScalingRule
from keylane.errors import InvalidInput, NoSuchGroup
from keylane.groups import GroupMessage
from keylane.jetstream import ConsumerConfig
from tests.integration.fleet.rig import FleetGround
from tests.integration.groups.rig import Ground, flawless
from tests.waiter import until

POOL = ["a", "b", "c", "d"]


class Watched:
    """Looks again and again, and keeps what it saw."""

    def __init__(self, scaler: Autoscaler, interval_s: float = 0.25) -> None:
        self._scaler = scaler
        self._interval_s = interval_s
        self.reports: list[AutoscaleReport] = []
        self.changed_at_s: list[float] = []

    async def run(self) -> None:
        while True:
            self.reports.append(await self._scaler.look())
            if self.reports[-1].done:
                self.changed_at_s.append(time.monotonic())
            await asyncio.sleep(self._interval_s)

    def check(self, rule: ScalingRule) -> None:
        ages = [one.lag_s for one in self.reports if one.lag_s is not None]
        assert max(ages) < rule.target_s
        gaps = [late - soon for soon, late in zip(self.changed_at_s, self.changed_at_s[1:], strict=False)]
        # A change takes a moment after the look that decided it, one time more than another.
        assert all(gap >= 0.8 * rule.window_s for gap in gaps), gaps


def slow(ground: Ground, name: str, takes_s: float) -> Callable[[GroupMessage], Awaitable[None]]:
    async def handle(message: GroupMessage) -> None:
        await asyncio.sleep(takes_s)
        ground.evidence.add(name, message)

    return handle


async def elastic_with_standbys(ground: Ground, *, takes_s: float, partitions: int = 8) -> None:
    """One member at work, and three processes that wait to be listed."""
    await ground.elastic(members=["a"], partitions=partitions)
    for name in POOL:
        await ground.join(
            name, slow(ground, name, takes_s), concurrency=1, settings=ConsumerConfig(ack_wait_s=2, max_ack_pending=20)
        )


async def loaded(ground: Ground, *, rate: float, for_s: float) -> list[int]:
    sent: list[int] = []
    end = time.monotonic() + for_s
    begun, number = time.monotonic(), 0
    while time.monotonic() < end:
        due = int((time.monotonic() - begun) * rate) - number
        sent += await ground.publish([f"k{one % 40}" for one in range(number, number + due)])
        number += due
        await asyncio.sleep(0.1)
    return sent


async def scaled_through_a_load(
    ground: Ground, rule: ScalingRule, *, rate: float, takes_s: float, for_s: float
) -> None:
    await elastic_with_standbys(ground, takes_s=takes_s)
    watched = Watched(Autoscaler(ground.connection, ground.stream, "g", rule, pool=POOL))
    watching = asyncio.create_task(watched.run())
    try:
        sent = await loaded(ground, rate=rate, for_s=for_s)
        most = max(one.workers or 0 for one in watched.reports)
        assert most > 1, watched.reports[-1]
        await ground.evidence.all_of(sent)
        await until(lambda: (watched.reports[-1].workers or most) < most, deadline_s=60)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    watched.check(rule)
    assert flawless(ground.evidence.verdict(sent))
    assert len({line.by for line in ground.evidence.lines}) > 1


async def test_members_follow_the_load_and_the_lag_stays_below_its_target(ground: Ground) -> None:
    rule = ScalingRule(target_s=6, max_workers=4, window_s=1.5)
    await scaled_through_a_load(ground, rule, rate=60, takes_s=0.03, for_s=6)


@pytest.mark.long("two minutes of load")
@pytest.mark.timeout(300)
async def test_two_minutes_of_load(ground: Ground) -> None:
    rule = ScalingRule(target_s=20, max_workers=4, window_s=8)
    await scaled_through_a_load(ground, rule, rate=60, takes_s=0.03, for_s=120)


async def test_a_dead_member_is_replaced_by_one_that_runs(ground: Ground) -> None:
    await ground.elastic(members=["a", "b"])
    await ground.join("a")
    await ground.join("c")
    await ground.publish([f"k{one}" for one in range(40)])
    rule = ScalingRule(target_s=60, min_workers=2, max_workers=3, window_s=0.5)
    scaler = Autoscaler(ground.connection, ground.stream, "g", rule, pool=POOL)
    report = await until(scaler.look, lambda one: one.done)
    assert (report.added, report.dropped) == (("c",), ("b",))
    assert report.reason.endswith("b has no instance for a window")
    config = await groups.get_config(ground.connection, ground.stream, "g")
    assert config.plan.members == ("a", "c")


async def test_a_dry_run_says_what_it_would_do(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    await ground.join("b")
    rule = ScalingRule(target_s=1, min_workers=2, max_workers=4, window_s=0.3)
    scaler = Autoscaler(ground.connection, ground.stream, "g", rule, pool=POOL, dry_run=True)
    report = await until(scaler.look, lambda one: bool(one.change))
    assert (report.added, report.done, report.wanted) == (("b",), False, 2)
    assert (await groups.get_config(ground.connection, ground.stream, "g")).plan.members == ("a",)


async def test_nobody_is_added_who_does_not_run(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    await ground.join("a")
    rule = ScalingRule(target_s=1, min_workers=2, max_workers=4, window_s=0.3)
    scaler = Autoscaler(ground.connection, ground.stream, "g", rule, pool=POOL)
    report = await until(scaler.look, lambda one: bool(one.change))
    assert not report.done
    assert report.reason.endswith("the pool has no other member that runs")


async def test_what_cannot_be_scaled(ground: Ground, partitioned: Ground) -> None:
    rule = ScalingRule(target_s=1, max_workers=4)
    await partitioned.static(members=["a"])
    with pytest.raises(InvalidInput, match="is static: its members never change"):
        await Autoscaler(partitioned.connection, partitioned.stream, "g", rule).look()
    await ground.elastic(group="billing", members=["a"])
    with pytest.raises(NoSuchGroup, match="did you mean 'billing'"):
        await Autoscaler(ground.connection, ground.stream, "biling", rule).look()
    with pytest.raises(InvalidInput, match="the maximum is 1 workers and the minimum 2"):
        Autoscaler(ground.connection, ground.stream, "g", ScalingRule(target_s=1, min_workers=2, max_workers=1))


async def test_a_fleet_has_a_wanted_number(limits: FleetGround) -> None:
    ended = asyncio.Event()

    async def wait(message: object) -> None:
        await ended.wait()

    await limits.shared(await limits.join("a", wait))
    await limits.publish([f"k{one}" for one in range(40)])
    asked: list[int] = []

    async def command(wanted: int) -> None:
        asked.append(wanted)

    rule = ScalingRule(target_s=2, max_workers=4, window_s=1)
    scaler = Autoscaler(limits.connection, limits.stream, "f", rule, command=command)
    try:
        report = await until(scaler.look, lambda one: one.done)
        assert asked == [report.wanted]
        assert report.wanted is not None
        assert report.wanted > 1
        again = await scaler.look()
        assert (again.wanted, again.workers) == (report.wanted, 1)
        assert asked == [report.wanted], "the number is remembered while the workers start"
    finally:
        ended.set()
