"""The leader of a fleet: when it assigns, what it does not believe at once, and schedules on a clock of their own."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from keylane.core.assignment_strategies import Strategy
from keylane.core.fleet_leader import AssignNow, LeaderState, NoChange, Reservation, StepDown, WaitUntil, step
from keylane.core.fleet_partitions import Partition, hashed
from tests.core.fleet_model import CALM_S, WINDOWS, Fleet, started

# ---- start ------------------------------------------------------------------------------------------


def test_a_start_collects_workers_until_none_has_come_for_a_while() -> None:
    fleet = Fleet()
    fleet.join(0)
    assert fleet.look() == WaitUntil(1001.0, "start: 1 worker so far")
    fleet.now_s = 1000.9
    fleet.join(1, 2)
    assert fleet.look() == WaitUntil(1001.9, "start: 3 workers so far")
    fleet.now_s = 1001.9
    decision = fleet.look()
    assert isinstance(decision, AssignNow)
    assert (decision.epoch, decision.version, decision.cause, decision.reason) == (1, 1, "start", "3 workers")
    assert set(decision.owners.values()) == {0, 1, 2}
    assert decision.workers == {0: "run-1", 1: "run-2", 2: "run-3"}
    assert fleet.look() == NoChange("every partition has a worker")


def test_a_start_does_not_wait_for_ever() -> None:
    fleet = Fleet()
    for worker in range(20):
        fleet.join(worker)
        fleet.run(0.5)
        if fleet.versions:
            break
    assert fleet.versions[0][0] == 1000 + WINDOWS.cold_start_s


def test_nothing_to_assign_and_nobody_to_assign_to() -> None:
    fleet = Fleet(())
    assert fleet.look() == NoChange("no worker is live: the last assignment stands")
    fleet.join(0)
    assert fleet.look() == NoChange("the source has no partitions")


# ---- planned changes --------------------------------------------------------------------------------


def test_workers_that_join_are_taken_together() -> None:
    fleet = started()
    fleet.join(5)
    assert fleet.look() == WaitUntil(fleet.now_s + 1, "scale: worker 5 joined")
    fleet.run(0.9)
    fleet.join(6)
    assert [one.reason for one in fleet.run(CALM_S)] == ["workers 5,6 joined"]
    assert fleet.owned(5)
    assert fleet.owned(6)


def test_a_worker_that_came_and_went_makes_no_version() -> None:
    fleet = started()
    fleet.join(5)
    fleet.run(0.9)
    fleet.expire(5)
    assert fleet.run(CALM_S) == []


def test_a_worker_that_leaves_keeps_its_partitions_until_they_are_moved() -> None:
    fleet = started()
    had = fleet.owned(3)
    fleet.leave(3)
    assert isinstance(fleet.look(), WaitUntil)
    (version,) = fleet.run(2)
    assert (version.cause, version.reason) == ("scale", "worker 3 leaving")
    assert 3 not in version.owners.values()
    assert version.reserved[3].partitions == had


def test_the_cooldown_grows_while_changes_go_on_and_ends_with_them() -> None:
    fleet = started(2)
    for worker in range(2, 40):
        fleet.join(worker)
        fleet.run(2.0)
    times = [at_s for at_s, version in fleet.versions if version.cause == "scale"]
    gaps = [round(later - earlier) for earlier, later in pairwise(times)]
    assert gaps == [4, 12, 15, 15, 15]
    fleet.run(CALM_S)
    fleet.join(50)
    assert isinstance(decision := fleet.look(), WaitUntil)
    assert decision.at_s == fleet.now_s + WINDOWS.settle_s


@pytest.mark.parametrize("spread_s", [0.5, 5.0, 15.0, 29.0])
@pytest.mark.parametrize("seed", range(3))
def test_25_to_100_to_25_within_a_minute_makes_at_most_three_versions_a_step(spread_s: float, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - the same schedule every time
    fleet = started(25, partitions=200)
    start_s = fleet.now_s
    schedule = [(start_s + chance.uniform(0, spread_s), worker, True) for worker in range(25, 100)]
    schedule += [(start_s + 30 + chance.uniform(0, spread_s), worker, False) for worker in range(25, 100)]
    for at_s, worker, joins in sorted(schedule):
        fleet.run(at_s - fleet.now_s)
        if joins:
            fleet.join(worker)
        else:
            fleet.leave(worker)
    fleet.run(CALM_S)
    up = [one for at_s, one in fleet.versions if start_s < at_s <= start_s + 30]
    down = [one for at_s, one in fleet.versions if at_s > start_s + 30]
    assert 1 <= len(up) <= 3
    assert 1 <= len(down) <= 3
    assert fleet.current is not None
    assert fleet.current.workers.keys() == set(range(25))
    assert len(fleet.current.owners) == 200


# ---- emergencies ------------------------------------------------------------------------------------


def test_a_lease_that_ends_is_acted_on_at_once() -> None:
    fleet = started()
    had = fleet.owned(2)
    fleet.expire(2)
    decision = fleet.look()
    assert isinstance(decision, AssignNow)
    assert (decision.cause, decision.reason) == ("emergency", "worker 2 lost")
    assert {decision.owners[one] for one in had} <= {0, 1, 3, 4}


def test_an_emergency_does_not_wait_for_a_cooldown_and_takes_everything_along() -> None:
    fleet = started()
    fleet.join(5)
    fleet.run(1.5)
    fleet.join(6)
    assert isinstance(decision := fleet.look(), WaitUntil)
    assert decision.at_s > fleet.now_s + 3
    fleet.expire(0)
    decision = fleet.look()
    assert isinstance(decision, AssignNow)
    assert decision.reason == "worker 0 lost; worker 6 joined"
    assert fleet.owned(6)


def test_eight_of_25_that_die_within_a_second_make_a_version_each_half_second() -> None:
    fleet = started(25)
    for worker in range(8):
        fleet.expire(worker)
        lost_s = fleet.now_s
        fleet.run(0.125)
        assert [at_s for at_s, one in fleet.versions if at_s >= lost_s - 0.5 and one.cause == "emergency"]
    fleet.run(CALM_S)
    assert len([one for _, one in fleet.versions if one.cause == "emergency"]) == 3
    assert fleet.current is not None
    assert fleet.current.workers.keys() == set(range(8, 25))


def test_a_worker_that_owned_nothing_is_no_emergency() -> None:
    fleet = started(5, partitions=3)
    idle = next(worker for worker in range(5) if not fleet.owned(worker))
    fleet.expire(idle)
    assert fleet.run(CALM_S) == []


# ---- restarts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["consistent", "weighted", "sticky"])
def test_a_rolling_restart_gives_every_worker_its_own_partitions_back(strategy: Strategy) -> None:
    fleet = started(5, strategy)
    before = dict(fleet.current.owners) if fleet.current else {}
    for worker in range(5):
        fleet.leave(worker)
        fleet.run(20)
        assert fleet.owned(worker) == set()
        fleet.join(worker)
        fleet.run(20)
        assert fleet.current is not None
        assert fleet.current.owners == before


@pytest.mark.parametrize("strategy", ["weighted", "sticky"])
def test_after_the_grace_a_worker_is_like_any_other(strategy: Strategy) -> None:
    fleet = started(5, strategy)
    had = fleet.owned(1)
    fleet.expire(1)
    fleet.run(WINDOWS.id_grace_s + 1)
    fleet.join(1)
    fleet.run(CALM_S)
    assert fleet.owned(1)
    assert fleet.owned(1) != had


def test_another_holder_of_an_id_gets_an_assignment_of_its_own_at_once() -> None:
    fleet = started()
    before = fleet.current
    assert before is not None
    fleet.join(3)
    decision = fleet.look()
    assert isinstance(decision, AssignNow)
    assert decision.cause == "emergency"
    assert decision.owners == before.owners
    assert decision.workers[3] != before.workers[3]


@pytest.mark.parametrize("back", [(2, 1), (1, 2)])
def test_two_that_leave_one_after_the_other_both_get_their_own_back(back: tuple[int, int]) -> None:
    fleet = started(4, "sticky")
    before = dict(fleet.current.owners) if fleet.current else {}
    fleet.expire(1)
    fleet.run(3)
    fleet.expire(2)
    fleet.run(3)
    fleet.join(back[0])
    fleet.run(15)
    fleet.join(back[1])
    fleet.run(CALM_S)
    assert fleet.current is not None
    assert fleet.current.owners == before


# ---- a smaller world --------------------------------------------------------------------------------


def test_a_listing_cut_short_changes_nothing() -> None:
    fleet = started(10)
    whole = dict(fleet.live)
    for worker in range(3, 10):
        del fleet.live[worker]
    decision = fleet.look()
    assert isinstance(decision, WaitUntil)
    assert decision.reason == "more than half of the fleet is gone: look again"
    fleet.now_s += 0.5
    fleet.live = whole
    assert fleet.look() == NoChange("every partition has a worker")
    for worker in range(3, 10):
        del fleet.live[worker]
    assert fleet.look() == WaitUntil(fleet.now_s + WINDOWS.confirm_s, "more than half of the fleet is gone: look again")


def test_one_worker_without_a_record_needs_a_second_look() -> None:
    fleet = started(10)
    del fleet.live[4]
    assert fleet.look() == WaitUntil(fleet.now_s + 1, "worker 4 has no record: look again")
    (version,) = fleet.run(1)
    assert (version.cause, version.reason) == ("emergency", "worker 4 lost")


def test_more_than_half_that_expire_need_a_second_look() -> None:
    fleet = started(10)
    fleet.expire(*range(6))
    assert isinstance(fleet.look(), WaitUntil)
    started_s = fleet.now_s
    (version,) = fleet.run(5)
    assert fleet.versions[-1][0] == started_s + WINDOWS.confirm_s
    assert version.workers.keys() == {6, 7, 8, 9}


def test_half_of_the_partitions_gone_needs_a_second_look() -> None:
    fleet = started()
    whole = fleet.partitions
    fleet.partitions = whole[:20]
    fleet.look()
    fleet.partitions = whole
    assert fleet.run(CALM_S) == []
    fleet.partitions = whole[:20]
    (version,) = fleet.run(CALM_S)
    assert len(version.owners) == 20
    assert version.reason == "40 partitions removed"


def test_without_any_worker_the_last_assignment_stands() -> None:
    fleet = started()
    whole = dict(fleet.live)
    fleet.live = {}
    assert fleet.run(CALM_S) == []
    assert fleet.look() == NoChange("no worker is live: the last assignment stands")
    fleet.live = whole
    assert fleet.run(CALM_S) == []


def test_an_assignment_that_the_store_has_lost_is_written_again() -> None:
    fleet = started()
    before = fleet.current
    assert before is not None
    fleet.is_stored = False
    assert isinstance(fleet.look(), WaitUntil)
    fleet.is_stored = True
    assert fleet.look() == NoChange("every partition has a worker")
    fleet.is_stored, fleet.highest_version = False, 17
    (version,) = fleet.run(CALM_S)
    assert (version.cause, version.version, version.owners) == ("restore", 18, before.owners)


# ---- partitions and labels --------------------------------------------------------------------------


def test_new_partitions_are_taken_together_and_do_not_wait_for_a_cooldown() -> None:
    fleet = started()
    fleet.join(5)
    fleet.run(2)
    before = fleet.current
    assert before is not None
    fleet.partitions = hashed(61, "orders.*").resolve().partitions
    fleet.run(0.5)
    fleet.partitions = hashed(62, "orders.*").resolve().partitions
    (version,) = fleet.run(2)
    assert (version.cause, version.reason) == ("partitions", "partitions 60, 61 without a worker")
    assert {one: version.owners[one] for one in before.owners} == before.owners


def test_a_labelled_partition_waits_for_its_pool_then_spills_then_goes_back() -> None:
    fleet = Fleet((*hashed(9, "orders.*").resolve().partitions, Partition("9", "9.orders.*", label="gpu")))
    fleet.join(0, 1)
    (version,) = fleet.run(20)
    assert version.waiting == ("9",)
    assert fleet.look() == WaitUntil(1000 + WINDOWS.label_grace_s, "partitions wait for a worker with label gpu")
    (version,) = fleet.run(20)
    assert version.owners["9"] in (0, 1)
    assert version.waiting == ()

    fleet.state = LeaderState(epoch=2)  # a new leader does not take it away again
    fleet.join(2)
    (version,) = fleet.run(CALM_S)
    assert version.epoch == 2
    assert "9" in version.owners

    fleet.join(3, labels=["gpu"])
    (version,) = fleet.run(CALM_S)
    assert version.owners["9"] == 3


def test_a_pool_that_is_lost_for_a_moment_gets_its_partitions_back() -> None:
    fleet = Fleet((*hashed(9, "orders.*").resolve().partitions, Partition("9", "9.orders.*", label="gpu")))
    fleet.join(0, 1)
    fleet.join(2, labels=["gpu"])
    fleet.run(CALM_S)
    fleet.expire(2)
    (version,) = fleet.run(5)
    assert version.waiting == ("9",)
    fleet.join(2, labels=["gpu"])
    fleet.run(10)
    assert fleet.current is not None
    assert fleet.current.owners["9"] == 2


def test_weights_make_a_version_only_if_something_moves() -> None:
    fleet = started(3, "weighted", partitions=30)
    fleet.partitions = tuple(replace(one, weight=2.0) for one in fleet.partitions)
    assert fleet.run(CALM_S) == []
    heavy = fleet.owned(0)
    fleet.partitions = tuple(replace(one, weight=9.0 if one.id in heavy else 1.0) for one in fleet.partitions)
    (version,) = fleet.run(CALM_S)
    assert (version.cause, version.reason) == ("scale", "weights changed")
    assert len([one for one in heavy if version.owners[one] != 0]) >= 5


# ---- leaders ----------------------------------------------------------------------------------------


def test_a_new_leader_changes_nobody_and_knows_what_is_reserved() -> None:
    fleet = started(4, "sticky")
    before = dict(fleet.current.owners) if fleet.current else {}
    fleet.expire(2)
    (version,) = fleet.run(5)
    fleet.state = LeaderState(epoch=2, strategy="sticky", reserved=version.reserved)
    assert fleet.look() == NoChange("every partition has a worker")
    fleet.join(2)
    (version,) = fleet.run(10)
    assert (version.epoch, version.version) == (2, 3)
    assert version.owners == before


def test_a_leader_that_was_replaced_writes_nothing() -> None:
    fleet = started()
    assert fleet.current is not None
    fleet.current = replace(fleet.current, epoch=2, version=2)
    fleet.expire(1)
    assert fleet.look() == StepDown("the assignment is of epoch 2, and this leader's is 1")


def test_a_write_that_failed_is_proposed_again() -> None:
    fleet = started()
    fleet.expire(1)
    facts = fleet.facts()
    state, first = step(fleet.state, facts, fleet.now_s)
    state, again = step(state, facts, fleet.now_s + 0.1)
    assert isinstance(first, AssignNow)
    assert isinstance(again, AssignNow)
    assert (again.version, again.owners) == (first.version, first.owners)


def test_a_version_of_somebody_else_is_respected() -> None:
    fleet = started()
    assert fleet.current is not None
    fleet.current = replace(fleet.current, version=7)
    fleet.expire(1)
    decision = fleet.look()
    assert isinstance(decision, AssignNow)
    assert decision.version == 8
    assert decision.reserved[1] == Reservation(fleet.now_s + 30, decision.reserved[1].partitions)


# ---- trouble ----------------------------------------------------------------------------------------


def test_the_partitions_of_a_worker_in_trouble_go_to_others_and_come_back_once_it_is_tried_again() -> None:
    fleet = started()
    before = {worker: fleet.owned(worker) for worker in range(5)}
    fleet.troubled = {3}
    decision = fleet.look()
    assert isinstance(decision, AssignNow)
    assert (decision.cause, decision.reason, decision.aside) == ("trouble", "worker 3 in trouble", frozenset({3}))
    assert not fleet.owned(3)
    assert all(fleet.owned(worker) >= before[worker] for worker in (0, 1, 2, 4)), "none between workers that stay"
    assert 3 not in decision.workers
    assert isinstance(fleet.look(), WaitUntil)
    (back,) = fleet.run(WINDOWS.relief_s + CALM_S)
    assert back.reason == "worker 3 joined"
    assert fleet.owned(3), "also if it still reports its trouble"


def test_a_worker_in_trouble_is_set_aside_again_only_after_a_while() -> None:
    fleet = started()
    fleet.troubled = {3}
    first_s = fleet.now_s
    fleet.run(WINDOWS.relief_s + CALM_S)
    assert [one.cause for _, one in fleet.versions] == ["start", "trouble", "scale"]
    fleet.now_s = first_s + WINDOWS.relief_again_s - 1
    assert isinstance(fleet.look(), NoChange)
    fleet.now_s = first_s + WINDOWS.relief_again_s
    fleet.look()
    assert [one.cause for _, one in fleet.versions][-1] == "trouble"


@pytest.mark.parametrize("troubled", [{0, 1, 2}, {0, 1, 2, 3, 4}])
def test_a_trouble_that_most_workers_have_moves_nothing(troubled: set[int]) -> None:
    fleet = started()
    fleet.troubled = troubled
    assert fleet.run(CALM_S) == []


def test_a_worker_that_was_set_aside_is_taken_back_when_nobody_better_is_left() -> None:
    fleet = started(2)
    fleet.troubled = {1}
    fleet.look()
    assert len(fleet.owned(0)) == 60
    fleet.expire(0)
    fleet.run(WINDOWS.confirm_s)
    assert len(fleet.owned(1)) == 60


def test_a_worker_in_trouble_keeps_what_only_it_may_have() -> None:
    fleet = Fleet((Partition("0", "0.>", label="gpu"), Partition("1", "1.>")))
    fleet.join(0, labels=["gpu"])
    fleet.join(1, 2)
    fleet.run(CALM_S)
    fleet.troubled = {0}
    assert fleet.run(CALM_S) == []
    fleet.join(3, labels=["gpu"])
    fleet.run(CALM_S)
    assert fleet.owned(3) >= {"0"}


def test_another_run_of_a_worker_that_was_set_aside_is_one_that_joins() -> None:
    fleet = started()
    fleet.troubled = {3}
    fleet.look()
    fleet.troubled = set()
    fleet.expire(3)
    fleet.join(3)
    assert [one.reason for one in fleet.run(10)] == ["worker 3 joined"]
