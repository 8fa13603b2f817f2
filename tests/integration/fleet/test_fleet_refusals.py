"""What a fleet refuses, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from nats.js.api import RetentionPolicy

from keylane import fleet, groups
from keylane.errors import FleetError, InvalidInput, KeylaneError
from keylane.fleet import hashed
from keylane.jetstream import ConsumerConfig, consumers
from tests.integration.fleet.rig import PARTITIONS, FleetGround
from tests.integration.groups.conftest import MakeGround


async def nothing(message: object) -> None:
    """A handler."""


async def refused(ground: FleetGround, error: type[KeylaneError], text: str, **options: Any) -> None:
    given = {"fleet": "f", "partitions": ground.partitions, **options}
    with pytest.raises(error, match=text):
        await fleet.join(ground.connection, ground.stream, given.pop("fleet"), nothing, **given)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fleet": "a.b"}, "fleet name 'a.b' is part of KV keys"),
        ({"partitions": 8}, "partitions is 8: use hashed"),
        ({"strategy": "magic"}, "strategy is 'magic': use one of consistent"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"lease_s": 0}, "lease_s"),
        ({"labels": ["a b"]}, "label 'a b'"),
    ],
)
async def test_bad_options(limits: FleetGround, options: dict[str, Any], text: str) -> None:
    await refused(limits, InvalidInput, text, **options)


async def test_another_number_of_partitions(limits: FleetGround) -> None:
    wrong = hashed(PARTITIONS + 1, f"{limits.stream}.*")
    await refused(limits, FleetError, f"numbers {PARTITIONS} partitions, and the fleet asks for 9", partitions=wrong)


async def test_a_stream_without_numbers(make: MakeGround) -> None:
    ground = FleetGround(await make())
    await refused(ground, FleetError, r"puts no partition number in front of its subjects: give it a subject transform")


async def test_interest_retention(make: MakeGround) -> None:
    ground = FleetGround(await make(partitions=PARTITIONS, retention=RetentionPolicy.INTEREST))
    await refused(ground, FleetError, "has interest retention")


async def test_another_spec(limits: FleetGround) -> None:
    await limits.shared(await limits.join("a"))
    other = await limits.join("b", lease_s=5.0)
    with pytest.raises(FleetError, match=r"exists with other settings: lease_s is 3\.0 in the fleet and 5\.0 here"):
        await other.wait()


async def test_a_consumer_that_is_not_the_fleets(limits: FleetGround) -> None:
    await consumers.create(limits.connection, limits.stream, ConsumerConfig(durable_name="f-p3"))
    worker = await limits.join("a")
    with pytest.raises(FleetError, match=r"consumer 'f-p3' of stream .* is not this fleet's"):
        await worker.wait()


async def test_a_group_of_the_same_name(limits: FleetGround) -> None:
    await groups.create_static(limits.connection, limits.stream, "f", partitions=PARTITIONS, members=["a"])
    await refused(limits, InvalidInput, "fleet 'f' has the name of a static group on stream")


async def test_a_consumer_of_a_static_group(limits: FleetGround) -> None:
    await groups.create_static(limits.connection, limits.stream, "g", partitions=PARTITIONS, members=["h-p3"])
    await refused(limits, InvalidInput, "consumer 'g-h-p3' belongs to member 'h-p3' of the static group", fleet="g-h")


async def test_the_queue_of_an_elastic_group(make: MakeGround) -> None:
    ground = FleetGround(await make())
    await groups.create_elastic(ground.connection, ground.stream, "e", partitions=4, partition_by=f"{ground.stream}.*")
    listed = fleet.listed([f"{ground.stream}.*"])
    await refused(ground, InvalidInput, "fleet 'e' has the name of an elastic group", fleet="e", partitions=listed)
    queue = groups.queue_stream(ground.stream, "e")
    with pytest.raises(InvalidInput, match="is the queue of the elastic group 'e'"):
        await fleet.join(ground.connection, queue, "f", nothing, partitions=fleet.listed(["*.>"]))


async def test_a_stream_whose_name_has_a_dash_is_nobodys_queue(make: MakeGround, unique: Callable[..., str]) -> None:
    """It could be the queue of a group of the stream before the dash, which does not exist."""
    ground = FleetGround(await make(stream=f"{unique('dashed')}-2026-10", partitions=PARTITIONS, allow_direct=True))
    await ground.shared(await ground.join("a"))
