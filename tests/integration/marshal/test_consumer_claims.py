"""Who gets a partition: races, ghosts, skewed clocks, whole topics, restarts, lost links."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from keylane.core.claim_choice import TopicPartition
from keylane.core.claim_facts import Began, Key
from keylane.core.claim_records import ClaimingPartition, Heartbeat, Message, decode, encode
from keylane.errors import OutcomeUnknown
from keylane.marshal import Appetite, ConsumerHooks, MarshalMessage, MemorySource, Verdict
from tests.integration.marshal.rig import (
    GROUP,
    INTERVAL_S,
    TOPIC,
    LiveLog,
    Seen,
    View,
    check_log,
    consumer,
    fill,
    kill,
    may_start,
    world_of,
)
from tests.waiter import until

ONLY = TopicPartition(TOPIC, 0)


@pytest.mark.parametrize("compares", [True, False])
async def test_thirty_racers_for_one_partition(compares: bool) -> None:
    """One wins, twenty-nine know that they did not."""
    log, source = LiveLog(), MemorySource({TOPIC: 1})
    fill(source, 1, 10)
    seen = Seen()
    wins: Counter[str] = Counter()
    members = []
    for number in range(30):
        name = f"c{number}"
        hooks = ConsumerHooks(on_claimed=lambda *_, name=name: wins.update([name]))
        members.append(consumer(View(log, compares=compares), source, name, seen, hooks=hooks))
    await asyncio.gather(*(member.start() for member in members))
    try:
        await seen.until(lambda one: len(one.messages) == 10)
        owners = [member for member in members if member.partitions]
        assert len(owners) == 1
        assert sum(wins.values()) == 1
        claims = [record for record in log.records if isinstance(decode(record.value), ClaimingPartition)]
        if not compares:
            assert len(claims) > 1, "a race took place"
        [owner] = owners
        await owner.stop()
        await until(lambda: sum(bool(member.partitions) for member in members) == 1)
    finally:
        await asyncio.gather(*(member.stop() for member in members))
    assert set(seen.times.values()) == {1}
    await check_log(log)


async def test_a_loser_stays_a_loser_when_the_winner_releases() -> None:
    """Claim B, claim A (lost), release B: A owns it only by a claim of its own that comes after the release."""
    log, source = LiveLog(), MemorySource({TOPIC: 1})
    seen = Seen()
    bert = await consumer(View(log, compares=False), source, "bert", seen).start()
    await until(lambda: bert.partitions == (ONLY,))
    lost = await log.append(ClaimingPartition("ia", "anna", GROUP, TOPIC, 0, 1), 0)
    await bert.stop()
    world = await world_of(log)
    assert world.verdict_of(*lost) is Verdict.LOST
    claim = world.claim_of(GROUP, TOPIC, 0)
    assert claim is not None
    assert claim.owner is None
    async with consumer(View(log, compares=False), source, "anna", seen, instance_id="ia") as anna:
        await until(lambda: anna.partitions == (ONLY,))
        claim = (await world_of(log)).claim_of(GROUP, TOPIC, 0)
        assert claim is not None
        assert claim.token is not None
        assert claim.released is not None
        assert claim.token > claim.released.at > lost.offset


@pytest.mark.parametrize("compares", [True, False])
async def test_a_win_that_arrives_late_is_released_at_once(compares: bool) -> None:
    """The claim of partition 0 gets lost on its way and arrives when the consumer has something else."""
    log, source, seen = LiveLog(), MemorySource({TOPIC: 2}), Seen()
    view, late = View(log, compares=compares), list[Message]()

    def delay(message: Message) -> None:
        if isinstance(message, ClaimingPartition) and not late:
            late.append(message)
            raise OutcomeUnknown("no answer")

    view.before_append = delay
    async with consumer(view, source, "anna", seen, pick=Appetite("round_robin", max_claims=1)) as anna:
        await until(lambda: len(anna.partitions) == 1)
        [kept] = anna.partitions
        [message] = late
        assert isinstance(message, ClaimingPartition)
        assert message.partition != kept.partition
        position = (await log.append(message, 0)).offset
        await until(lambda: any(b"ReleasingPartition" in record.value for record in log.records))
        world = await world_of(log)
        assert world.verdict_of(0, position) is Verdict.WON, "it did win"
        claim = world.claim_of(GROUP, TOPIC, message.partition)
        assert claim is not None
        assert claim.owner is None
        assert anna.partitions == (kept,)
    await check_log(log)


async def test_a_claim_whose_outcome_is_unknown_is_read_before_it_is_written_again() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    view, sent = View(log), list[Message]()

    def unknown_but_written(message: Message) -> None:
        sent.append(message)
        if len(sent) in (1, 2):  # the claim, then the first heartbeat
            log.write(encode(message), 0, key=Key(GROUP, TOPIC, 0))
            raise OutcomeUnknown("no answer")

    view.before_append = unknown_but_written
    fill(source, 1, 5)
    async with consumer(view, source, "anna", seen):
        await seen.until(lambda one: len(one.messages) == 5)
        kinds = [type(message).__name__ for message in sent]
        assert kinds[:2] == ["ClaimingPartition", "Heartbeat"]
        assert kinds.count("ClaimingPartition") == 1, "it was there, so it was not sent again"
    await check_log(log)


@pytest.mark.parametrize("skew_s", [-600.0, 600.0])
async def test_a_wrong_clock_changes_nothing(skew_s: float) -> None:
    """The skewed one neither steals nor loses: its seconds stand in the records and decide nothing."""
    log, source = LiveLog(), MemorySource({TOPIC: 4})
    log.ahead_ms = int((time.time() - time.monotonic()) * 1000)
    fill(source, 4, 20)
    seen, other = Seen(), Seen()
    wrong = await consumer(
        View(log), source, "wrong", seen, max_claims=2, rebalance=False, wall_clock=lambda: time.time() + skew_s
    ).start()
    right = await consumer(View(log), source, "right", other, max_claims=2, rebalance=False).start()
    try:
        await seen.until(lambda one: len(one.messages) == 40)
        await other.until(lambda one: len(one.messages) == 40)
        before = wrong.partitions, right.partitions
        beats = log.end
        await until(lambda: log.end > beats + 12)
        assert (wrong.partitions, right.partitions) == before
        joined = await consumer(View(log), source, "third", Seen(), wall_clock=lambda: time.time() + skew_s).start()
        beats = log.end
        await until(lambda: log.end > beats + 12)
        assert joined.partitions == ()
        await joined.stop()
        assert (wrong.partitions, right.partitions) == before
    finally:
        await wrong.stop()
        await right.stop()
    assert set((seen.times + other.times).values()) == {1}
    world = await check_log(log)
    assert len([one for one in world.tenures() if one.began is Began.CLAIM]) == 4
    said = [decode(record.value) for record in log.records]
    seconds = {one.seconds for one in said if isinstance(one, Heartbeat) and one.client == "wrong"}
    assert all(abs(one - time.time() - skew_s) < 120 for one in seconds)


async def test_a_restart_with_the_same_client_id_takes_its_partitions_back_at_once() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 4}), Seen()
    fill(source, 4, 10)
    interval_s = 30.0
    options = {"heartbeat_interval_s": interval_s, "pick": Appetite(greedy=True)}
    anna = await consumer(View(log), source, "anna", seen, **options).start()
    await seen.until(lambda one: len(one.messages) == 40)
    await anna.stop(release=False)
    fill(source, 4, 10, first=10)
    began = time.monotonic()
    again = consumer(View(log), source, "anna", seen, heartbeat_interval_s=interval_s)
    async with again:
        await seen.until(lambda one: len(one.messages) == 80)
        assert time.monotonic() - began < interval_s, "others would wait for two"
    assert set(seen.times.values()) == {1}, "the last heartbeat said how far it was"
    claims = [record for record in log.records if record.value.startswith(b"ClaimingPartition")]
    assert len(claims) == 4, "no claim was needed"


async def test_an_older_instance_of_the_same_client_stops() -> None:
    log, source, old, new = LiveLog(), MemorySource({TOPIC: 1}), Seen(), Seen()
    gone: list[str] = []
    hooks = ConsumerHooks(on_released=lambda _, why: gone.append(why))
    first = await consumer(View(log), source, "anna", old, hooks=hooks).start()
    await until(lambda: first.partitions == (ONLY,))
    async with consumer(View(log), source, "anna", new):
        await until(lambda: bool(gone))
        assert gone == ["somebody else owns it now"]
        fill(source, 1, 10)
        await new.until(lambda one: len(one.messages) == 10)
    await first.stop()
    assert old.messages == []


async def test_an_owner_that_cannot_reach_the_log_stops_before_another_may_begin() -> None:
    log, source, old, new = LiveLog(), MemorySource({TOPIC: 1}), Seen(), Seen()
    view, gone = View(log), list[str]()
    hooks = ConsumerHooks(on_released=lambda _, why: gone.append(why), on_trouble=lambda _: None)
    fill(source, 1, 5)

    async def slow(message: MarshalMessage) -> None:
        await old(message)
        await asyncio.sleep(0.005)

    anna = await consumer(view, source, "anna", slow, hooks=hooks, grace_s=0.2, order="partition").start()
    bert = await consumer(View(log), source, "bert", new).start()
    try:
        await old.until(lambda one: len(one.messages) == 5) if anna.partitions else None
        await until(lambda: bool(anna.partitions or bert.partitions))
        if bert.partitions:  # bert was quicker: then anna is not the one to be cut off
            await bert.stop()
            await until(lambda: anna.partitions == (ONLY,))
            bert = await consumer(View(log), source, "bert", new).start()
            new.messages.clear()
            new.began_at.clear()
        fill(source, 1, 2000, first=5)
        await old.until(lambda one: len(one.began) > 20)
        view.down = True
        await new.until(lambda one: len(one.messages) > 20)
        last_of_anna = old.began_at[-1]
        assert last_of_anna < new.began_at[0]
        assert old.began_at[-1] == last_of_anna, "and it did not start again"
        view.down = False
        await until(lambda: bool(gone))
        assert gone == ["somebody else owns it now"]
        assert old.began_at[-1] == last_of_anna
    finally:
        await asyncio.gather(anna.stop(), bert.stop())
    await check_log(log)


async def test_an_owner_whose_claim_ran_out_goes_on_if_nobody_took_it() -> None:
    log, source, seen = LiveLog(), MemorySource({TOPIC: 1}), Seen()
    view = View(log)
    async with consumer(view, source, "anna", seen) as anna:
        await until(lambda: anna.partitions == (ONLY,))
        view.down = True
        await until(lambda: not may_start(anna))
        fill(source, 1, 10)
        came = asyncio.create_task(seen.until(lambda one: bool(one.began)))
        await asyncio.sleep(2 * INTERVAL_S)
        assert not came.done(), "nothing starts"
        view.down = False
        await seen.until(lambda one: len(one.messages) == 10)
        await came
    assert set(seen.times.values()) == {1}
    [claimed] = [record for record in log.records if record.value.startswith(b"ClaimingPartition")]
    assert {one.token for one in (await check_log(log)).tenures()} == {claimed.offset}


async def test_whole_topics() -> None:
    log, source = LiveLog(), MemorySource({"a": 3, "b": 3})
    seen = Seen()

    def whole(name: str) -> object:
        from keylane.marshal import Consumer  # noqa: PLC0415 - one use

        return Consumer(
            View(log),
            source,
            GROUP,
            name,
            ["a", "b"],
            seen,
            pick=Appetite(whole_topic=True, max_claims=1),
            heartbeat_interval_s=INTERVAL_S,
        )

    first, second = whole("anna"), whole("bert")
    async with first as anna, second as bert:  # type: ignore[attr-defined]
        await until(lambda: len(anna.partitions) == len(bert.partitions) == 3)
        assert len({one.topic for one in anna.partitions}) == 1
        assert {one.topic for one in anna.partitions + bert.partitions} == {"a", "b"}


async def test_greedy_takes_all_that_is_free_in_one_go() -> None:
    log, source, seen = LiveLog(partitions=4), MemorySource({TOPIC: 64}), Seen()
    async with consumer(View(log), source, "anna", seen, pick=Appetite(greedy=True)) as anna:
        await until(lambda: len(anna.partitions) == 64)


async def test_a_dead_fleets_old_log_is_no_obstacle() -> None:
    """Nobody wrote for long, so the log's time stands still; by the newcomer's clock a try is worth it."""
    log, source, seen = LiveLog(), MemorySource({TOPIC: 2}), Seen()
    log.ahead_ms = int((time.time() - time.monotonic()) * 1000)
    anna = await consumer(View(log), source, "anna", seen, heartbeat_interval_s=60.0).start()
    await until(lambda: len(anna.partitions) == 2)
    await kill(anna)
    log.make_older(3_600_000)
    began = time.monotonic()
    async with consumer(View(log), source, "bert", seen, heartbeat_interval_s=60.0) as bert:
        await until(lambda: len(bert.partitions) == 2)
        assert time.monotonic() - began < 30, "two intervals would be 120 s"
