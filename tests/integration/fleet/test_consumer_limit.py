"""A stream that takes too few consumers for a fleet, and a worker that has many to make."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from keylane.errors import ApiError, FleetError
from keylane.fleet.consumer_limit import DEFAULT_MAX_CONSUMERS, CreationPace
from keylane.jetstream import streams
from tests.integration.fleet.rig import KEYS, PARTITIONS, FleetGround
from tests.integration.groups.conftest import MakeGround
from tests.integration.groups.rig import flawless


async def test_the_limit_of_a_live_stream_is_raised(make: MakeGround) -> None:
    ground = FleetGround(await make(partitions=PARTITIONS, max_consumers=3))
    await ground.join("a")
    sent = await ground.publish(KEYS)
    await ground.evidence.all_of(sent)
    assert flawless(ground.evidence.verdict(sent))
    after = await streams.info_json(ground.connection, ground.stream)
    assert after["config"]["max_consumers"] == PARTITIONS + DEFAULT_MAX_CONSUMERS
    assert after["config"]["subject_transform"], "nothing else has changed"


async def test_a_limit_that_cannot_be_raised_is_one_error(make: MakeGround, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> None:
        raise ApiError(400, 10052, "stream configuration update can not change this")

    monkeypatch.setattr(streams, "update_json", refuse)
    ground = FleetGround(await make(partitions=PARTITIONS, max_consumers=3))
    with pytest.raises(FleetError, match=r"takes 3 consumers, and the fleet makes it 8.*`nats stream edit"):
        await ground.join("a")


async def test_creations_are_spread_and_told() -> None:
    told: list[int] = []
    at_once = most = 0
    pace = CreationPace(told.append, per_s=1000)

    async def create() -> None:
        nonlocal at_once, most
        async with pace.turn():
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(250):
            tasks.create_task(create())
    assert time.monotonic() - began >= 0.249
    assert most <= 4
    assert told == [100, 200, 200, 100, 0]
