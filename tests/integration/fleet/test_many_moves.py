"""Both layouts: many moves, one after the other, under load. `KEYLANE_MOVES=1000` makes it a thousand."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import AsyncExitStack

import pytest

from tests.integration.fleet.owners import Layout, Owner, paced
from tests.integration.fleet.rig import KEYS, FleetGround
from tests.integration.groups.rig import flawless

MANY = int(os.environ.get("KEYLANE_MOVES", "60"))
PER_SECOND = 2000


async def moved(ground: FleetGround, layout: Layout, moves: int, per_second: int, seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - to repeat a run
    partitions = ground.partitions.resolve().partitions
    sent: list[int] = []
    over = asyncio.Event()

    async def publish() -> None:
        sent.extend(await ground.publish(KEYS))

    async with AsyncExitStack() as stack:
        owners = [await Owner.start(ground, number, stack, layout) for number in range(3)]
        owned = {partition: dice.choice(owners) for partition in partitions}
        for partition, owner in owned.items():
            await owner.gain(partition)
        load = asyncio.create_task(paced(publish, over, len(KEYS) / per_second))
        for _ in range(moves):
            partition = dice.choice(partitions)
            before, after = owned[partition], dice.choice([one for one in owners if one is not owned[partition]])
            await after.open(partition)
            await before.lose(partition)
            await after.gain(partition)
            owned[partition] = after
        over.set()
        await load
        await ground.evidence.all_of(sent)
    verdict = ground.evidence.verdict(sent)
    assert flawless(verdict), f"seed {seed}: {verdict}"
    assert len({line.by for line in ground.evidence.lines}) == 3


@pytest.mark.parametrize("layout", ["partition", "worker"])
async def test_partitions_move_without_loss_or_repeats(ground: FleetGround, layout: Layout) -> None:
    await moved(ground, layout, moves=8, per_second=500, seed=1)


@pytest.mark.long("many moves under a steady load")
@pytest.mark.timeout(60 + 2 * MANY)
@pytest.mark.parametrize("layout", ["partition", "worker"])
async def test_many_moves_at_a_steady_load(ground: FleetGround, layout: Layout) -> None:
    await moved(ground, layout, MANY, PER_SECOND, seed=2)


@pytest.mark.long("a cluster of three servers, and a stream with three replicas")
@pytest.mark.timeout(60 + 2 * MANY)
@pytest.mark.parametrize("layout", ["partition", "worker"])
async def test_many_moves_on_a_cluster(cluster_ground_of_both: FleetGround, layout: Layout) -> None:
    await moved(cluster_ground_of_both, layout, max(8, MANY // 4), PER_SECOND // 4, seed=3)
