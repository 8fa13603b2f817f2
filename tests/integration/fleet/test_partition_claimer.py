"""Claims by name under the leases of workers: one wins, tokens grow, and who has lost one changes nothing."""

from __future__ import annotations

import asyncio

import pytest

from keylane.core.fleet_records import FleetClaim, from_json, to_json
from keylane.errors import Fenced, FleetError, InvalidInput
from keylane.fleet.store import FLEET_BUCKET
from keylane.groups import GroupMessage
from keylane.jetstream import Bucket
from tests.integration.fleet.rig import FleetGround
from tests.waiter import until

NAME = "nightly-report"


async def test_of_many_that_race_one_wins_and_tokens_grow(limits: FleetGround) -> None:
    first, second = await limits.join("a"), await limits.join("b")
    await limits.shared(first, second)
    claimers = [first.claimer, second.claimer]
    tokens: list[int] = []
    for _ in range(20):
        answers = await asyncio.gather(*(one.claim(NAME) for one in claimers))
        won = [number for number, token in enumerate(answers) if token is not None]
        assert len(won) == 1, answers
        owner, other = claimers[won[0]], claimers[1 - won[0]]
        tokens.append(answers[won[0]] or 0)
        assert await owner.claim(NAME) == tokens[-1]
        assert [await owner.is_owner(NAME), await other.is_owner(NAME)] == [True, False]
        assert not await other.release(NAME)
        assert await owner.release(NAME)
        assert not await owner.is_owner(NAME)
    assert tokens == sorted(set(tokens))


async def test_the_release_of_a_claim_that_was_lost_changes_nothing(limits: FleetGround) -> None:
    first, second = await limits.join("a"), await limits.join("b")
    await limits.shared(first, second)
    token = await first.claimer.claim(NAME)
    assert token is not None
    assert second.id is not None
    bucket, key = Bucket(limits.connection, FLEET_BUCKET), f"{limits.stream}.f.claim.{NAME}"
    entry = await bucket.get(key)
    assert entry is not None
    assert entry.value is not None
    theirs = FleetClaim(
        partition=NAME, worker=int(second.id.rpartition("-")[2]), instance="later", token=token + 5, held=True
    )
    await bucket.put(key, to_json(theirs), revision=entry.revision)
    assert not await first.claimer.is_owner(NAME)
    assert not await first.claimer.release(NAME)
    kept = await bucket.get(key)
    assert kept is not None
    assert kept.value is not None
    assert from_json(f"claim.{NAME}", kept.value) == theirs


async def test_what_a_worker_that_stopped_has_claimed_is_free(limits: FleetGround) -> None:
    first, second = await limits.join("a"), await limits.join("b")
    await limits.shared(first, second)
    token = await first.claimer.claim(NAME)
    assert token is not None
    assert await second.claimer.claim(NAME) is None
    await first.stop()
    later = await until(lambda: second.claimer.claim(NAME), lambda found: found is not None)
    assert later is not None
    assert later > token
    with pytest.raises(FleetError, match="has no lease that is sure now"):
        await first.claimer.claim(NAME)


async def test_a_partition_of_the_fleet_has_an_owner_and_is_not_claimed_by_name(limits: FleetGround) -> None:
    fenced: list[bool] = []

    async def handle(message: GroupMessage) -> None:
        await message.origin.fence(anew=True)
        bucket, key = Bucket(limits.connection, FLEET_BUCKET), f"{limits.stream}.f.claim.{message.partition}"
        entry = await bucket.get(key)
        assert entry is not None
        assert entry.value is not None
        claim = from_json(f"claim.{message.partition}", entry.value)
        assert isinstance(claim, FleetClaim)
        theirs = FleetClaim(partition=claim.partition, worker=claim.worker, instance="zz", token=claim.token, held=True)
        await bucket.put(key, to_json(theirs), revision=entry.revision)
        try:
            await message.origin.fence(anew=True)
        except Fenced:
            fenced.append(True)

    worker = await limits.join("a", handle)
    await limits.shared(worker)
    assert await worker.claimer.is_owner("3")
    assert not await worker.claimer.is_owner("99")
    with pytest.raises(InvalidInput, match="partition 3 of the fleet goes to whom its leader gives it"):
        await worker.claimer.claim("3")
    await limits.publish(["k1"])
    await until(lambda: fenced, bool)
